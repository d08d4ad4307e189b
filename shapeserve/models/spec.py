"""What a model takes and gives, in words that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from torch import nn

    from shapeserve.models.tokenizer import TextTokenizer

POOLINGS = ("mean", "cls", "lasttoken", "max")
"""Ways to make one vector of a row's token vectors, in sentence-transformers' words."""

Activation = Literal["sigmoid", "softmax", "identity"]
"""What turns logits into the scores that a client sees."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classification model reads as one row, such as a query and a document.

    Only ``text_pair`` is ever cut.
    """

    text: str
    text_pair: str


@dataclass(frozen=True, slots=True)
class Head:
    """What a classification model says of its logits.

    Attributes:
        labels: a name for each logit.
        activation: makes the scores of the labels.
        relevance: makes a relevance of the one logit; None for a model with several, which
            cannot rerank.
    """

    labels: tuple[str, ...]
    activation: Activation
    relevance: Literal["sigmoid", "identity"] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output tensor.

    Attributes:
        name: as the config, the protocols and the results call it.
        dtype: element type, a name that torch knows.
        dims: axis names and fixed sizes; the first is ``batch``. In an output ``frames/4`` is the
            axis at a quarter of its rate, rounded up.
        pad: value of the elements beyond a row's end (inputs only).
        make: made by the layout instead of sent by the caller (inputs only): ``mask`` is 1 on
            elements that are real along every axis, ``positions`` counts along the only axis.
        below: integers of a caller are in [0, below); None: not bounded (inputs only).
    """

    name: str
    dtype: str
    dims: tuple[str | int, ...]
    pad: float = 0
    make: Literal["mask", "positions"] | None = None
    below: int | None = None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tensor's shape for ``sizes`` (axis -> size, ``batch`` included)."""
        return tuple(dim if isinstance(dim, int) else size_along(dim, sizes) for dim in self.dims)


def size_along(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the size of a named dim: that of its axis, or its share where it says ``frames/4``."""
    axis, _, rate = dim.partition("/")
    return -(-sizes[axis] // int(rate)) if rate else sizes[axis]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as everything but its own adapter sees it.

    Attributes:
        name: the name in requests, labels and answers.
        task: ``embed`` takes text or token ids and gives one vector, ``classify`` takes those
            or pairs of texts and gives logits, ``module`` takes arrays.
        dtype: type of weights and arithmetic.
        inputs: name -> tensor, in call order.
        outputs: name -> tensor, in return order.
        axes: every dynamic axis, ``batch`` first.
        max_length: row axis -> end of the grid.
        hard_limit: row axis -> longest row that runs at all.
        min_length: row axis -> shortest row that runs; 1 where it is not there.
        padding_invariant: whether padding leaves answers unchanged; None: not known yet.
        vocab_size: token ids are in [0, vocab_size); None without a vocabulary.
        pad_token_id: id written beyond a row's end; None without a vocabulary.
        embedding_dim: length of the vectors; None unless the task is ``embed``.
        pooling: one of ``POOLINGS``; None unless the task is ``embed``.
        normalize: whether the vectors have length 1.
        head: what the logits mean; None unless the task is ``classify``.
        widths: every size of a weight or buffer; empty before they are loaded.
    """

    name: str
    task: Literal["embed", "classify", "module"]
    dtype: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    axes: tuple[str, ...]
    max_length: Mapping[str, int]
    hard_limit: Mapping[str, int]
    min_length: Mapping[str, int] = field(default_factory=dict)
    padding_invariant: bool | None = None
    vocab_size: int | None = None
    pad_token_id: int | None = None
    embedding_dim: int | None = None
    pooling: str | None = None
    normalize: bool = False
    head: Head | None = None
    widths: frozenset[int] = frozenset()

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Every axis but ``batch``."""
        return self.axes[1:]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run.

    Attributes:
        spec: what it takes and gives.
        module: in eval mode, without gradients, on its device; ``forward`` takes the tensors of
            ``spec.inputs`` in order and returns a tuple of those of ``spec.outputs`` in order.
        tokenizer: turns text into rows; None for the task ``module``.
        packed: the same weights for packed rows: ``forward(tokens [T] int32, offsets [R+1] int32)``
            returns a tuple of the outputs with R rows; None where the model cannot take them.
        fingerprint: equal for equal programs on any host; weights count by their layout only.
    """

    spec: ModelSpec
    module: nn.Module
    tokenizer: TextTokenizer | None
    fingerprint: str
    packed: nn.Module | None = None
    bounded: nn.Module | None = None

    @property
    def inner(self) -> nn.Module:
        """The model as its author knows it, without what holds it to its spec."""
        return cast("nn.Module", self.module.inner)
