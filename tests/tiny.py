"""Tiny models for the tests: seconds become milliseconds, the code paths stay the same.

``write_model(directory)`` makes a sentence-transformers directory with random weights, and
``module_config(module)`` the config of one of the modules below, to be imported as ``tiny:MODULE``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

POISON = 13
"""The value that makes ``poisonous`` answer NaN and ``raising`` raise."""

WORDS = ["the", "a", "of", "to", "in", "and", "cat", "dog", "bird", "sat", "ran", "flew", "on"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCAB = [*SPECIALS, *WORDS, *(c for c in LETTERS if c not in WORDS), *(f"##{c}" for c in LETTERS)]


def text_of(tokens: int, seed: int = 0) -> str:
    """A text of exactly ``tokens`` ids for the tiny tokenizer, [CLS] and [SEP] included."""
    return " ".join(WORDS[(seed + 5 * i) % len(WORDS)] for i in range(tokens - 2))


def write_model(
    directory: Path,
    *,
    kind: str = "bert",
    pooling: Mapping[str, Any] | str = "mean",
    normalize: bool = True,
    max_length: int | None = 24,
    positions: int = 48,
    seed: int = 0,
) -> Path:
    """Write a tiny randomly initialised sentence-transformers directory and return it.

    Args:
        directory: created if missing.
        kind: ``bert``, ``roberta`` (positions start after the pad id) or ``qwen3`` (a decoder).
        pooling: a pooling mode, or the whole content of 1_Pooling/config.json.
        normalize: whether modules.json ends in a Normalize module.
        max_length: ``max_seq_length`` of sentence_bert_config.json; None leaves it out.
        positions: longest row; the length of the position table where there is one.
        seed: of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    write_weights(directory, kind, positions, seed)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write_json(
        directory / "modules.json",
        [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(modules[: 3 if normalize else 2])
        ],
    )
    if isinstance(pooling, str):
        pooling = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    _write_json(directory / "1_Pooling" / "config.json", pooling)
    bert = {"do_lower_case": False} | ({"max_seq_length": max_length} if max_length else {})
    _write_json(directory / "sentence_bert_config.json", bert)
    (directory / "README.md").write_text(f"---\nlicense: apache-2.0\n---\n\n# tiny-{kind}\n")
    return directory


def write_classifier(
    directory: Path,
    *,
    kind: str = "bert",
    labels: int = 1,
    positions: int = 48,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a tiny randomly initialised model for sequence classification and return it.

    Args:
        directory: created if missing.
        kind: ``bert`` (two token types), ``roberta``, ``distilbert`` or ``qwen3`` (a decoder).
        labels: of the head; one makes a cross-encoder.
        positions: longest row.
        seed: of the weights.
        config: further keys of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    write_weights(directory, kind, positions, seed, labels=labels, **config)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a WordPiece tokenizer.json that truncates and pads to 8 tokens.

    all-MiniLM-L6-v2 ships one that does so to 128, and whoever trusts it cuts its texts.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocab = {token: i for i, token in enumerate(VOCAB)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="[PAD]")
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "model_max_length": 512},
    )


def write_weights(
    directory: Path, kind: str, positions: int, seed: int, *, labels: int = 0, **config_keys: Any
) -> None:
    """Write config.json and model.safetensors of a model with 2 layers and 32 features.

    With ``labels`` it has a head for sequence classification.
    """
    import transformers
    from safetensors.torch import save_file

    sizes = {
        "vocab_size": len(VOCAB),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "pad_token_id": 0,
        **({"num_labels": labels} if labels else {}),
        **config_keys,
    }
    if kind == "bert":
        config = transformers.BertConfig(**sizes, max_position_embeddings=positions)
    elif kind == "roberta":
        config = transformers.RobertaConfig(
            **{"type_vocab_size": 1, **sizes}, max_position_embeddings=positions + 1
        )
    elif kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers"}
        names |= {"num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"}
        renamed = {names.get(key, key): value for key, value in sizes.items()}
        config = transformers.DistilBertConfig(**renamed, max_position_embeddings=positions)
    else:
        config = transformers.Qwen3Config(
            **sizes, num_key_value_heads=2, head_dim=16, max_position_embeddings=positions
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        auto = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
        model = auto.from_config(config)
        # Larger weights than the usual 0.02: with those every text has nearly the same vector.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.25)
    config.architectures = [type(model).__name__]
    config.to_json_file(directory / "config.json")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))


class MaskedTokens(nn.Module):
    """Attention over tokens with a mask: two outputs, one of them a vector a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.project = nn.Linear(16, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)  # [B, S, 16]
        real = mask[:, None, :].bool()
        hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, real)
        tokens = self.project(hidden)  # [B, S, 8]
        weights = mask[:, :, None].to(tokens.dtype)
        pooled = (tokens * weights).sum(1) / weights.sum(1)
        return {"pooled": pooled, "tokens": tokens}


class MaskedConv(nn.Module):
    """Two convolutions over pixels, masked after each, so that padding changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, pixels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        real = mask[:, None].to(pixels.dtype)  # [B, 1, H, W]
        hidden = torch.relu(self.first(pixels * real)) * real
        maps = self.second(hidden) * real
        return maps.sum((2, 3)) / real.sum((2, 3)), maps


class PaddingSensitive(nn.Module):
    """A mean over the whole padded row: no mask, so padding changes the answer."""

    def forward(self, values: Tensor) -> Tensor:
        return values.mean(dim=1, keepdim=True)


class MeanOverPixels(nn.Module):
    """A mean over the padded picture, channel by channel."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.mean((2, 3))


class ConvBorders(nn.Module):
    """Two convolutions without a mask: the second reads what the first made of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(pixels)))


class GroupNormOverTime(nn.Module):
    """Frames normalised over the padded recording, as in wav2vec 2.0 base, then a masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(5, 5)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        frames = self.norm(features.transpose(1, 2)) * mask[:, None]
        return frames.sum(2) / mask.sum(1, keepdim=True)


class StridedFrames(nn.Module):
    """Masked convolutions that halve the frame rate twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(5, 4, 3, stride=2, padding=1)
        self.second = nn.Conv1d(4, 4, 3, stride=2, padding=1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        hidden, real = features.transpose(1, 2), mask[:, None]
        for conv in (self.first, self.second):
            hidden, real = torch.relu(conv(hidden * real)), real[:, :, ::2]
        return hidden.transpose(1, 2)


class NeedsFourFrames(nn.Module):
    """A convolution over four frames without padding: shorter rows raise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 4, 4)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        hidden = self.conv((features * mask[:, :, None]).transpose(1, 2))
        real = mask[:, None, 3:]  # a cell is real if its last frame is
        return (hidden * real).sum(2) / real.sum(2).clamp(min=1)


class Poisonous(nn.Module):
    """A masked mean of the ids that is NaN for a row which holds ``POISON``."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        mean = (ids * mask).sum(1, keepdim=True).float() / mask.sum(1, keepdim=True)
        bad = ((ids == POISON) & (mask == 1)).any(1, keepdim=True)
        return torch.where(bad, torch.full_like(mean, float("nan")), mean)


class Raising(nn.Module):
    """The same mean, but a batch with ``POISON`` in it raises (tier eager only)."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if bool(((ids == POISON) & (mask == 1)).any()):
            raise RuntimeError("poisonous batch")
        return (ids * mask).sum(1, keepdim=True).float() / mask.sum(1, keepdim=True)


class WaitsWhenLong(nn.Module):
    """The same mean, but a wide batch waits for a value of the device (no graph holds that)."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if ids.shape[1] > 32 and bool(mask.sum() < 0):
            raise RuntimeError("never")
        return (ids * mask).sum(1, keepdim=True).float() / mask.sum(1, keepdim=True)


def _seeded(make: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def masked_tokens() -> nn.Module:
    return _seeded(MaskedTokens)


def masked_conv() -> nn.Module:
    return _seeded(MaskedConv)


def padding_sensitive() -> nn.Module:
    return PaddingSensitive()


def mean_over_pixels() -> nn.Module:
    return MeanOverPixels()


def conv_borders() -> nn.Module:
    return _seeded(ConvBorders)


def group_norm_over_time() -> nn.Module:
    return GroupNormOverTime()


def strided_frames() -> nn.Module:
    return _seeded(StridedFrames)


def needs_four_frames() -> nn.Module:
    return _seeded(NeedsFourFrames)


def poisonous() -> nn.Module:
    return Poisonous()


def raising() -> nn.Module:
    return Raising()


def waits_when_long() -> nn.Module:
    return WaitsWhenLong()


_IDS = {
    "ids": {"dtype": "int64", "dims": ["batch", "seq"]},
    "mask": {"dtype": "int64", "dims": ["batch", "seq"], "make": "mask"},
}
_PIXELS = {"pixels": {"dtype": "float32", "dims": ["batch", 3, "height", "width"]}}
_FRAMES = {
    "features": {"dtype": "float32", "dims": ["batch", "frames", 5]},
    "mask": {"dtype": "float32", "dims": ["batch", "frames"], "make": "mask"},
}
_MEAN = {"mean": {"dtype": "float32", "dims": ["batch", 1]}}

_TENSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "masked_tokens": (
        _IDS,
        {
            "pooled": {"dtype": "float32", "dims": ["batch", 8]},
            "tokens": {"dtype": "float32", "dims": ["batch", "seq", 8]},
        },
    ),
    "masked_conv": (
        {
            "pixels": {"dtype": "float32", "dims": ["batch", 3, "height", "width"]},
            "mask": {"dtype": "float32", "dims": ["batch", "height", "width"], "make": "mask"},
        },
        {
            "pooled": {"dtype": "float32", "dims": ["batch", 4]},
            "maps": {"dtype": "float32", "dims": ["batch", 4, "height", "width"]},
        },
    ),
    "mean_over_pixels": (_PIXELS, {"mean": {"dtype": "float32", "dims": ["batch", 3]}}),
    "conv_borders": (
        _PIXELS,
        {"maps": {"dtype": "float32", "dims": ["batch", 4, "height", "width"]}},
    ),
    "group_norm_over_time": (_FRAMES, {"mean": {"dtype": "float32", "dims": ["batch", 5]}}),
    "strided_frames": (
        _FRAMES,
        {"states": {"dtype": "float32", "dims": ["batch", "frames/4", 4]}},
    ),
    "needs_four_frames": (_FRAMES, {"mean": {"dtype": "float32", "dims": ["batch", 4]}}),
    "padding_sensitive": ({"values": {"dtype": "float32", "dims": ["batch", "seq"]}}, _MEAN),
    "poisonous": (_IDS, _MEAN),
    "raising": (_IDS, _MEAN),
    "waits_when_long": (_IDS, _MEAN),
}


def module_config(module: str, /, **settings: Any) -> dict[str, Any]:
    """Plain config data of one of the modules above; ``settings`` are further keys of it.

    Buckets up to 16 along ``seq`` and ``frames``, or to 8 along ``height`` and ``width``, and
    batches of up to 4, unless ``settings`` say otherwise.
    """
    inputs, outputs = _TENSORS[module]
    axes = {dim for spec in inputs.values() for dim in spec["dims"] if isinstance(dim, str)}
    ends = {"seq": [4, 8, 16], "frames": [4, 8, 16], "height": [4, 8], "width": [4, 8]}
    sizes = {axis: ends[axis] for axis in sorted(axes & set(ends))} | {"batch": [1, 2, 4]}
    policy = {axis: {"explicit": made} for axis, made in sizes.items()}
    base = {"import": f"tiny:{module}", "inputs": inputs, "outputs": outputs, "policy": policy}
    return {**base, **settings}
