"""Read a text model's directory (sentence-transformers or Hugging Face form), without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeserve.errors import ModelError
from shapeserve.models.head import is_classifier, read_head
from shapeserve.models.spec import POOLINGS, Head

# Their position ids begin at pad_token_id + 1, so that part of the position table is never used
# (create_position_ids_from_input_ids in transformers 5.24). load_text checks the others.
_OFFSET_POSITIONS = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "lilt",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)

_LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_UNLIMITED = 1_000_000  # transformers writes 1e30 where a tokenizer has no maximum


@dataclass(frozen=True, slots=True)
class TextDirectory:
    """What the JSON files of a text encoder or classification model say.

    Attributes:
        root: the model's directory.
        encoder: the directory of config.json, weights and tokenizer: ``root`` or one in it.
        config: content of config.json.
        pooling: one of ``POOLINGS``.
        normalize: whether the vectors are scaled to length 1.
        embedding_dim: length of the vectors.
        max_length: longest row the model is meant for, in tokens, or None if it does not say.
        positions: longest row its position table allows, or None without such a table.
        vocab_size: token ids are below it.
        pad_token_id: a valid token id.
        lower_case: whether text is lowercased first.
        head: of a classification model, else None; pooling and normalize mean nothing then.
        type_vocab_size: token types that a classification model must be told; 0 if none.
    """

    root: Path
    encoder: Path
    config: Mapping[str, Any]
    pooling: str
    normalize: bool
    embedding_dim: int
    max_length: int | None
    positions: int | None
    vocab_size: int
    pad_token_id: int
    lower_case: bool
    head: Head | None = None
    type_vocab_size: int = 0


def read_directory(root: Path, *, trust_remote_code: bool) -> TextDirectory:
    """Read what a text model's directory says about itself.

    Raises:
        ModelError: a file is missing or broken, or the model needs what is not supported here.
    """
    modules = _read_modules(root)
    encoder, pooling = modules.encoder, modules.pooling
    config = read_json(encoder / "config.json")
    settings = read_json(root / "config_sentence_transformers.json", missing_ok=True)
    head = None
    if pooling is None and is_classifier(config):
        head = read_head(encoder, config, settings)
    elif pooling is None:
        pooling = modules.default_pooling()
    _check_config(encoder, config, trust_remote_code, head)
    _check_prompt(root, settings)
    weight_files(encoder)
    _require(encoder / "tokenizer.json", _TOKENIZER_REMEDY.format(encoder))
    hidden = _size(encoder, config, "hidden_size", "dim", "d_model", "n_embd")
    bert = next((read_json(file) for file in sorted(encoder.glob("sentence_*_config.json"))), {})
    task = "sequence-classification" if head else "feature-extraction"
    if bert.get("transformer_task", task) != task:
        what = "classification model" if head else "encoder"
        raise ModelError(f"{encoder}: transformer_task {bert['transformer_task']!r} is no {what}")
    tokenizer = read_json(encoder / "tokenizer_config.json", missing_ok=True)
    return TextDirectory(
        root=root,
        encoder=encoder,
        config=config,
        pooling=_pooling_mode(root, pooling or {}),
        normalize=modules.normalize,
        embedding_dim=hidden,
        max_length=_maximum(bert.get("max_seq_length"), tokenizer.get("model_max_length")),
        positions=_positions(config),
        vocab_size=_size(encoder, config, "vocab_size"),
        pad_token_id=_pad_token_id(encoder, config, tokenizer),
        lower_case=bool(bert.get("do_lower_case")),
        head=head,
        type_vocab_size=_type_vocab_size(config, tokenizer) if head else 0,
    )


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file; ``{}`` if it may be missing and is.

    Raises:
        ModelError: naming the file and what to do.
    """
    if missing_ok and not path.is_file():
        return {}
    content = _parse(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object; copy the model again")
    return content


def weight_files(encoder: Path) -> list[Path]:
    """Return the safetensors files of the weights, sorted by name.

    Raises:
        ModelError: there are none, or some that the index names are missing.
    """
    index = encoder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        for name in names:
            _require(encoder / name, f"{index.name} names it; copy the model again")
        return [encoder / name for name in names]
    single = encoder / "model.safetensors"
    if not single.is_file() and any(encoder.glob("*.bin")):
        raise ModelError(
            f"{encoder} holds pickled weights only (*.bin), and unpickling runs code; where you "
            'trust the file, convert it once: python -c "import transformers as t; m = '
            f"t.AutoModel.from_pretrained('{encoder}'); m.save_pretrained('{encoder}')\""
        )
    _require(single, "copy the weights in safetensors form")
    return [single]


_TOKENIZER_REMEDY = (
    'write it once: python -c "import transformers as t; '
    "t.AutoTokenizer.from_pretrained('{0}').save_pretrained('{0}')\""
)


def _parse(path: Path) -> Any:
    _require(path, "give the directory that holds it")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:  # not UTF-8 or not JSON
        raise ModelError(f"{path} is not JSON: {error}; copy the model again") from error


def _require(path: Path, remedy: str) -> None:
    if not path.is_file():
        raise ModelError(f"{path} is missing; {remedy}")


@dataclass(frozen=True, slots=True)
class _Modules:
    """What modules.json says; without ``file`` it is plain Hugging Face form."""

    encoder: Path
    pooling: Mapping[str, Any] | None
    normalize: bool
    file: Path | None

    def default_pooling(self) -> Mapping[str, Any]:
        """Of an encoder in plain form: the mean, and not normalised, as sentence-transformers."""
        if self.file is not None:
            raise _unsupported(self.file, ["Transformer"])
        return {"pooling_mode": "mean"}


def _unsupported(file: Path, kinds: Sequence[str]) -> ModelError:
    return ModelError(
        f"{file} lists {' + '.join(kinds)}; supported are Transformer + Pooling, with or without "
        "Normalize, and a Transformer with a head for sequence classification; serve other models "
        "as a torch module, through `import`"
    )


def _read_modules(root: Path) -> _Modules:
    """Return the encoder's directory, the pooling config if it has one, whether to normalise."""
    file = root / "modules.json"
    if not file.is_file():
        return _Modules(root, None, normalize=False, file=None)
    modules = _parse(file)
    try:
        # Only the class counts: its module moved twice between sentence-transformers 2 and 6.
        kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
        paths = [root / module["path"] for module in modules]
    except (TypeError, KeyError) as error:
        raise ModelError(f"{file} is no list of modules with type and path") from error
    if kinds == ["Transformer"]:
        return _Modules(paths[0], None, normalize=False, file=file)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _unsupported(file, kinds)
    pooling = read_json(paths[1] / "config.json")
    return _Modules(paths[0], pooling, normalize=len(kinds) == 3, file=file)


def _pooling_mode(root: Path, pooling: Mapping[str, Any]) -> str:
    """Return the one mode of a pooling config, in its new form (a word) or its old (flags)."""
    given = pooling.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in _LEGACY_POOLINGS.items() if pooling.get(key)] or "mean"
    modes: Sequence[str] = [given] if isinstance(given, str) else given
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(
            f"{root}: pooling {' + '.join(modes)} is not supported; it must be one of "
            f"{', '.join(POOLINGS)}"
        )
    return modes[0]


def _check_config(
    encoder: Path, config: Mapping[str, Any], trust_remote_code: bool, head: Head | None
) -> None:
    model = "AutoModelForSequenceClassification" if head else "AutoModel"
    needs_code = {"AutoConfig", model} & set(config.get("auto_map") or {})
    if needs_code and not trust_remote_code:
        raise ModelError(
            f"{encoder}/config.json runs Python code of its own (auto_map); read that code and set "
            "trust_remote_code: true, or remove auto_map if transformers knows the model by itself"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{encoder} is an encoder-decoder; give a text encoder")


def _check_prompt(root: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a default prompt: sentence-transformers would prepend it, and we would not."""
    name = settings.get("default_prompt_name")
    if name and (settings.get("prompts") or {}).get(name):
        raise ModelError(
            f"{root}: the default prompt {name!r} is not supported; set default_prompt_name to "
            "null in config_sentence_transformers.json and send the prompt as part of the text"
        )


def _size(encoder: Path, config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of ``keys`` that config.json holds (models differ in the word)."""
    for key in keys:
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    raise ModelError(
        f"{encoder}/config.json has no {keys[0]}; if this is a text encoder, write the full "
        f"config: transformers.AutoConfig.from_pretrained('{encoder}').save_pretrained('{encoder}')"
    )


def _maximum(*candidates: object) -> int | None:
    return next((c for c in candidates if isinstance(c, int) and 0 < c < _UNLIMITED), None)


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest row of the position table."""
    size = _maximum(config.get("max_position_embeddings"), config.get("n_positions"))
    if size is None or config.get("model_type") not in _OFFSET_POSITIONS:
        return size
    pad = config.get("pad_token_id")
    return size - (1 if pad is None else int(pad)) - 1  # 1: the default of those models


def _type_vocab_size(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """Return how many token types the model tells apart, 0 where its tokenizer gives none."""
    size = config.get("type_vocab_size")
    names = tokenizer.get("model_input_names") or ["token_type_ids"]
    return size if isinstance(size, int) and size > 1 and "token_type_ids" in names else 0


def _pad_token_id(encoder: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """Return the id to pad with: the model's, else the tokenizer's, else 0.

    Any valid id does, because padding is masked; a model that skips its own pad id in position ids
    needs that one.
    """
    if isinstance(pad := config.get("pad_token_id"), int) and pad >= 0:
        return pad
    token = tokenizer.get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return 0
    added = read_json(encoder / "tokenizer.json").get("added_tokens", [])
    return next((entry["id"] for entry in added if entry.get("content") == text), 0)
