"""What a classification model's configs say of its logits: labels, and how they become scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shapeserve.errors import ModelError
from shapeserve.models.spec import Activation, Head

_ARCHITECTURE = "ForSequenceClassification"
_DEFAULT_LABELS = 2  # transformers leaves a map of two unnamed labels out of config.json


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a model with a head for sequence classification."""
    return any(str(name).endswith(_ARCHITECTURE) for name in config.get("architectures") or ())


def read_head(encoder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Head:
    """Return the head of a classification model.

    Args:
        encoder: the model's directory, for messages.
        config: content of config.json.
        settings: content of config_sentence_transformers.json, empty without one.

    Raises:
        ModelError: the labels are not numbered from 0, or a cross-encoder has an activation that
            is not supported.
    """
    labels = _labels(encoder, config)
    relevance = _relevance(encoder, config, settings) if len(labels) == 1 else None
    return Head(labels, _activation(config, len(labels)), relevance)


def _labels(encoder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", _DEFAULT_LABELS)
        names = {str(i): f"LABEL_{i}" for i in range(count if isinstance(count, int) else 0)}
    expected = [str(i) for i in range(len(names))] if isinstance(names, dict) else []
    if not expected or set(names) != set(expected):
        raise ModelError(
            f"{encoder}/config.json: id2label must name the labels 0, 1, 2 ... without a gap; "
            "correct it, or write it anew with save_pretrained"
        )
    return tuple(str(names[i]) for i in expected)


def _activation(config: Mapping[str, Any], labels: int) -> Activation:
    """Return what the text-classification pipeline of transformers would apply."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"


def _relevance(
    encoder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Literal["sigmoid", "identity"]:
    """Return what a sentence-transformers CrossEncoder would apply to its only logit.

    It keeps the class in one of three places: since 6, since 4, and before.
    """
    own = config.get("sentence_transformers")
    stated = (
        settings.get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or config.get("sbert_ce_default_activation_function")
        or "torch.nn.modules.activation.Sigmoid"
    )
    known = str(stated).rsplit(".", 1)[-1] if str(stated).startswith("torch.") else ""
    if known == "Sigmoid":
        return "sigmoid"
    if known == "Identity":
        return "identity"
    raise ModelError(
        f"{encoder}: the activation {str(stated)[:80]!r} is not supported; a reranker has "
        "torch.nn.modules.activation.Sigmoid or torch.nn.modules.linear.Identity"
    )
