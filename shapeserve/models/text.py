"""Text models: any transformers encoder with its pooling, or classifier, as one module."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shapeserve.errors import ModelError
from shapeserve.models.classifier import TextClassifier, check_classifier
from shapeserve.models.describe import SEQ, describe_text, read_text_directory
from shapeserve.models.directory import TextDirectory, weight_files
from shapeserve.models.pooling import POOL
from shapeserve.models.spec import LoadedModel, ModelSpec

try:
    import transformers
    from transformers.utils import logging as transformers_logging

    from shapeserve.models.tokenizer import TextTokenizer
except ImportError as error:
    raise ModelError(
        f"text models need the extra hf ({error}); install it: pip install 'shapeserve[hf]'"
    ) from error

if TYPE_CHECKING:
    from shapeserve.config import ModelConfig


class TextEncoder(nn.Module):
    """Token ids and mask to one vector a row: what is compiled and captured as one program.

    Shapes: input_ids and attention_mask [B, S] int64; returns ([B, D] float32,), with
    ``token_embeddings`` ([B, D], [B, S, D]).
    """

    def __init__(
        self, encoder: nn.Module, pooling: str, normalize: bool, *, token_embeddings: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._pool = POOL[pooling]
        self._normalize = normalize
        self._token_embeddings = token_embeddings

    @property
    def inner(self) -> nn.Module:
        """The transformers model."""
        return self.encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Encode, pool and normalise; token types are left out, so that the model takes zeros."""
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, return_dict=False
        )[0]  # [B, S, D]
        vectors = self._pool(hidden, attention_mask)
        if self._normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return (vectors, hidden.float()) if self._token_embeddings else (vectors,)


def load_text(config: ModelConfig, device: torch.device | str) -> LoadedModel:
    """Load a text encoder or classification model from its directory.

    Raises:
        ConfigError: the config contradicts the model.
        ModelError: the model cannot be loaded.
    """
    directory = read_text_directory(config)
    spec = describe_text(config, directory)
    tokenizer = TextTokenizer(
        directory.encoder / "tokenizer.json",
        vocab_size=directory.vocab_size,
        lower_case=directory.lower_case,
        type_vocab_size=directory.type_vocab_size,
    )
    if spec.max_length[SEQ] <= tokenizer.special_tokens:
        raise ModelError(
            f"{spec.name}: a grid that ends at {spec.max_length[SEQ]} tokens holds no text beside "
            f"{tokenizer.special_tokens} special tokens; raise limits.max_length"
        )
    model = _load_model(directory, spec, trust_remote_code=config.trust_remote_code)
    module: TextEncoder | TextClassifier
    if directory.head is None:
        module = TextEncoder(
            model,
            directory.pooling,
            directory.normalize,
            token_embeddings=config.token_embeddings,
        )
    else:
        check_classifier(model, directory, spec)
        module = TextClassifier(model)
    module.eval().requires_grad_(False).to(device)
    packed, bounded = _bounded(config, module, directory, device)
    fingerprint = _fingerprint(directory, spec)
    return LoadedModel(spec, module, tokenizer, fingerprint, packed, bounded)


def _bounded(
    config: ModelConfig,
    module: TextEncoder | TextClassifier,
    directory: TextDirectory,
    device: torch.device | str,
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the encoder for packed rows, and for padded rows with bounds, where of use."""
    cuda = torch.device(device).type == "cuda"
    if isinstance(module, TextClassifier) or not (cuda or config.packs("cpu")):
        return None, None
    from shapeserve.models.packed import bounded  # registers an attention with transformers

    packed, padded = bounded(
        module.encoder,
        directory.pooling,
        directory.normalize,
        token_embeddings=config.token_embeddings,
    )
    return packed, padded if cuda else None


def _load_model(directory: TextDirectory, spec: ModelSpec, *, trust_remote_code: bool) -> nn.Module:
    kind = "AutoModel" if directory.head is None else "AutoModelForSequenceClassification"
    try:
        with _quiet_transformers():
            model, report = _from_pretrained(directory.encoder, kind, spec.dtype, trust_remote_code)
    except Exception as error:  # transformers raises of many kinds, and each means the same
        raise ModelError(
            f"{directory.encoder}: the weights cannot be loaded: {error}; copy the model again (a "
            "Git LFS pointer is not the file), or use a newer transformers"
        ) from error
    needless = () if directory.head else ("pooler.",)
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(needless))
    if missing:
        raise ModelError(
            f"{directory.encoder}: the weights lack {len(missing)} tensors ({missing[0]}, ...) and "
            "would be random there; weights and config.json are not of the same model"
        )
    _drop_unused(model)
    _check_positions(model, spec)
    return model


def _from_pretrained(
    path: Path, kind: str, dtype: str, trust_remote_code: bool
) -> tuple[nn.Module, Any]:
    def load(attention: str) -> tuple[nn.Module, Any]:
        loaded: tuple[nn.Module, Any] = getattr(transformers, kind).from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        return loaded

    # Named, not left to transformers: a config.json may ask for a kernel from the network.
    try:
        return load("sdpa")
    except ValueError:  # an architecture without it
        return load("eager")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence progress bars and the load report; what is wrong is raised."""
    bars, verbosity = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _drop_unused(model: nn.Module) -> None:
    """Take out what is not needed: the pooler of an encoder, and the cache of decoders."""
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None  # type: ignore[assignment] # what add_pooling_layer=False does
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False


def _check_positions(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a hard limit beyond the position table: on a GPU such a row ends the process."""
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            # A table with a padding index begins after it (RoBERTa and its relatives).
            used = 0 if table.padding_idx is None else table.padding_idx + 1
            if table.num_embeddings - used < spec.hard_limit[SEQ]:
                raise ModelError(
                    f"{spec.name} has {table.num_embeddings - used} positions, fewer than the hard "
                    f"limit {spec.hard_limit[SEQ]}; set limits.hard_limit"
                )


def _fingerprint(directory: TextDirectory, spec: ModelSpec) -> str:
    """Hash what decides the program: configs, layout of the weights, dtype, versions.

    The values of the weights do not count: reading them would cost more than a start saves, and
    a program keeps them outside unless it is frozen.
    """
    digest = hashlib.sha256((directory.encoder / "config.json").read_bytes())
    for file in weight_files(directory.encoder):
        with file.open("rb") as weights:
            (header_bytes,) = struct.unpack("<Q", weights.read(8))  # the safetensors format
            digest.update(weights.read(header_bytes))
        digest.update(str(file.stat().st_size).encode())
    facts = (
        spec.task,
        tuple(spec.outputs),
        spec.pooling,
        spec.normalize,
        spec.dtype,
        torch.__version__,
        transformers.__version__,
    )
    digest.update(repr(facts).encode())
    return digest.hexdigest()
