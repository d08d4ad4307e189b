"""From a model's config to its spec, reading JSON files only."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.config import along, axes_of, policy_of
from shapeserve.config.paths import model_directory
from shapeserve.errors import ConfigError
from shapeserve.models.directory import TextDirectory, read_directory
from shapeserve.models.naming import own_name
from shapeserve.models.spec import ModelSpec, TensorSpec

if TYPE_CHECKING:
    from shapeserve.config import ModelConfig

SEQ = "seq"
"""The axis of a text encoder's tokens."""

# Arbitrary: a module has no position table, and one request must not ask for any size at all.
_MODULE_HARD_LIMIT_FACTOR = 2


def describe(config: ModelConfig) -> ModelSpec:
    """Return the spec of the configured model, without torch and without its weights.

    Raises:
        ConfigError: the config contradicts the model, or says too little about a module.
        ModelError: the model's directory is incomplete or holds what is not supported.
    """
    if config.path is None:
        return _describe_module(config)
    return describe_text(config, read_text_directory(config))


def read_text_directory(config: ModelConfig) -> TextDirectory:
    """Read the directory of a text encoder.

    Raises:
        ConfigError: there is no such directory.
        ModelError: it is incomplete, or holds what is not supported.
    """
    root = model_directory(str(config.path))
    return read_directory(root, trust_remote_code=config.trust_remote_code)


def describe_text(config: ModelConfig, directory: TextDirectory) -> ModelSpec:
    """Return the spec of a text encoder or classification model from what its directory says.

    Raises:
        ConfigError: the config contradicts the model.
    """
    head = directory.head
    if head is not None:
        _check_classifier(config)
    end, hard = _text_limits(config, directory)
    _check_queue(config, {SEQ: hard})
    inputs, outputs = _text_inputs(directory), _text_outputs(config, directory)
    return ModelSpec(
        name=config.name or own_name(directory.root, str(config.path), directory.config),
        task="embed" if head is None else "classify",
        dtype=config.dtype,
        inputs={tensor.name: tensor for tensor in inputs},
        outputs={tensor.name: tensor for tensor in outputs},
        axes=(BATCH, SEQ),
        max_length={SEQ: end},
        hard_limit={SEQ: hard},
        padding_invariant=config.padding_invariant,
        vocab_size=directory.vocab_size,
        pad_token_id=directory.pad_token_id,
        embedding_dim=directory.embedding_dim if head is None else None,
        pooling=directory.pooling if head is None else None,
        normalize=directory.normalize,
        head=head,
    )


def _text_inputs(directory: TextDirectory) -> list[TensorSpec]:
    dims, pad, types = (BATCH, SEQ), directory.pad_token_id, directory.type_vocab_size
    inputs = [
        TensorSpec("input_ids", "int64", dims, pad=pad, below=directory.vocab_size),
        TensorSpec("attention_mask", "int64", dims, make="mask"),
    ]
    if types:
        inputs.append(TensorSpec("token_type_ids", "int64", dims, below=types))
    return inputs


def _text_outputs(config: ModelConfig, directory: TextDirectory) -> list[TensorSpec]:
    if directory.head is not None:
        return [TensorSpec("logits", "float32", (BATCH, len(directory.head.labels)))]
    dim = directory.embedding_dim
    outputs = [TensorSpec("sentence_embedding", "float32", (BATCH, dim))]
    if config.token_embeddings:
        outputs.append(TensorSpec("token_embeddings", "float32", (BATCH, SEQ, dim)))
    return outputs


def _check_classifier(config: ModelConfig) -> None:
    """Refuse what the config asks of a classification model that none can do."""
    if config.packs("cpu"):  # asked for, by the layout or the policy
        key = "layout" if config.layout == "packed" else f"policy.{TOKENS}"
        raise ConfigError(
            f"{key}: {config.path} is a classification model, whose rows cannot be packed; use "
            f"layout: padded, and a policy of {BATCH} and {SEQ}"
        )
    if config.token_embeddings:
        raise ConfigError(
            f"token_embeddings: {config.path} is a classification model, which gives logits only; "
            "remove it"
        )
    rules = config.rare_shapes.get(SEQ)
    if rules is not None and rules.over_max == "split":
        raise ConfigError(
            f"rare_shapes.{SEQ}.over_max: split makes no sense for a classification model "
            f"({config.path}): the logits of a text are not those of its pieces; use fallback, "
            "truncate or reject"
        )


def _text_limits(config: ModelConfig, directory: TextDirectory) -> tuple[int, int]:
    """Return the end of the grid and the longest row along ``seq``."""
    limits = config.limits
    sections = (
        ("policy", [axis for key in config.policy for axis in axes_of(key)], (BATCH, SEQ, TOKENS)),
        ("rare_shapes", list(config.rare_shapes), (SEQ,)),
        ("limits", list(limits.axes), (SEQ,)),
    )
    for section, named, axes in sections:
        for axis in named:
            if axis not in axes:
                raise ConfigError(
                    f"{section}.{axis}: a text model has the axes {', '.join(axes)} there"
                )
    table = directory.positions
    asked, asked_hard = _asked_length(config, SEQ), along(limits.hard_limit, SEQ)
    end = asked or directory.max_length or table
    if end is None:
        raise ConfigError(f"{directory.root} states no maximum length; set limits.max_length")
    if asked_hard and table and asked_hard > table:
        raise ConfigError(
            f"limits.hard_limit {asked_hard} is above the model's {table} positions; use "
            f"{table} or less"
        )
    hard = asked_hard or table or end
    if asked and asked > hard:
        key = "limits.max_length" if along(limits.max_length, SEQ) else f"policy.{SEQ}"
        raise ConfigError(f"{key}: {asked} is above the model's {hard} positions; end it at {hard}")
    return min(end, hard), hard


def _asked_length(config: ModelConfig, axis: str) -> int | None:
    """Return the end of the grid that the config asks for; it has checked that the two agree."""
    decided = policy_of(config.policy, axis)
    if length := along(config.limits.max_length, axis):
        return length
    if decided is None:
        return None
    _, place, sizes = decided
    return sizes.ends[place][1]


def _describe_module(config: ModelConfig) -> ModelSpec:
    inputs, outputs = _tensors(config.inputs), _tensors(config.outputs)
    named = [dim for spec in inputs.values() for dim in spec.dims if isinstance(dim, str)]
    axes = tuple(dict.fromkeys(named))  # batch first: every spec's dims begin with it
    ends = {axis: _module_length(config, axis) for axis in axes if axis != BATCH}
    hard = {
        axis: along(config.limits.hard_limit, axis) or _MODULE_HARD_LIMIT_FACTOR * end
        for axis, end in ends.items()
    }
    _check_queue(config, hard)
    return ModelSpec(
        name=config.name or str(config.import_).rsplit(":", 1)[1].rsplit(".", 1)[-1],
        task="module",
        dtype=config.dtype,
        inputs=inputs,
        outputs=outputs,
        axes=axes,
        max_length=ends,
        hard_limit=hard,
        min_length={axis: along(config.limits.min_length, axis) or 1 for axis in ends},
        padding_invariant=config.padding_invariant,
    )


def _check_queue(config: ModelConfig, hard: Mapping[str, int]) -> None:
    """Refuse a queue that the largest row would never enter."""
    area, room = prod(hard.values()), config.limits.max_queue_tokens
    if area > room:
        longest = " x ".join(f"{axis}={size}" for axis, size in hard.items())
        raise ConfigError(
            f"limits.max_queue_tokens {room} would never admit the largest row, {longest} "
            f"(limits.hard_limit), of {area} elements; use a multiple of {area}, or a lower "
            "limits.hard_limit"
        )


def _tensors(specs: Mapping[str, Any] | None) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name, spec.dtype, spec.dims, getattr(spec, "pad", 0), getattr(spec, "make", None)
        )
        for name, spec in (specs or {}).items()
    }


def _module_length(config: ModelConfig, axis: str) -> int:
    length = _asked_length(config, axis)
    if length is None:
        raise ConfigError(
            f"{config.import_} has no maximum of its own along {axis}; set policy.{axis} or "
            "limits.max_length"
        )
    return length
