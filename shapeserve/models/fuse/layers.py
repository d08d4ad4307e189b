"""Linear layers that share a product, and linear layers that apply the GELU after them.

A layer is rewritten in place: the object, its names, parameters and state dict stay, its class and
so its ``forward`` change. The weights of joined layers become views of one tensor, so they are in
memory once, and tied weights stay tied.

Layers hand tensors to each other through a :class:`Slot` that is empty between forwards. Dynamo
traces that away: a compiled program has no trace of it but one ``None`` written back per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

LinearGelu = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [..., in], weight [out, in], bias [out]) -> gelu(x @ weight.T + bias) [..., out], exact."""


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The reference :data:`LinearGelu`: two kernels, for devices without a fused one."""
    return F.gelu(F.linear(x, weight, bias))


class Slot:
    """What one layer leaves for another within one forward."""

    def __init__(self) -> None:
        self.offer: tuple[Tensor, Tensor] | None = None

    def take(self, key: Tensor) -> Tensor | None:
        """Return what was left for the tensor object ``key`` and empty the slot, else None."""
        offer, self.offer = self.offer, None
        return offer[1] if offer is not None and offer[0] is key else None


class Leader(nn.Linear):
    """The first of several layers with one input: computes the product for all of them."""

    _joint_weight: Tensor  # [sum of out_features, in_features]
    _joint_bias: Tensor | None
    _sizes: list[int]
    _slots: tuple[Slot, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out_features], a slice of the joint product; leave the others' slices."""
        joint = F.linear(input, self._joint_weight, self._joint_bias)
        first, *rest = joint.split_with_sizes(self._sizes, dim=-1)
        for slot, part in zip(self._slots, rest, strict=True):
            slot.offer = (input, part)
        return first


class Follower(nn.Linear):
    """Takes its slice of the leader's product, once.

    If there is none, or it was made of another tensor, the layer computes its own product: a model
    that takes another path than the trial did is slower there, never wrong.
    """

    _slot: Slot

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., out_features]."""
        part = self._slot.take(input)
        return F.linear(input, self.weight, self.bias) if part is None else part


class GeluLinear(nn.Linear):
    """A linear layer with the GELU in it; the :class:`SpentGelu` after it passes that on."""

    _gelu: LinearGelu
    _slot: Slot

    def forward(self, input: Tensor) -> Tensor:
        """Return gelu of the product, [..., out_features]."""
        output = self._gelu(input, self.weight, self.bias)
        self._slot.offer = (output, output)
        return output


class SpentGelu(nn.Module):
    """A GELU that the layer before it has applied."""

    _slot: Slot
    _original: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` as it is.

        Raises:
            RuntimeError: ``input`` is not what the layer before just made, so nobody knows whether
                the GELU is in it: two forwards at a time, or another path than the trial took.
        """
        output = self._slot.take(input)
        if output is None:
            raise RuntimeError(
                "a fused GELU got a tensor that is not the output of its linear layer; run one "
                "forward at a time, or do not fuse the GELUs of this model"
            )
        return output


def join(linears: Sequence[nn.Linear]) -> None:
    """Make one product of layers that are called with the same tensor, the first one first.

    The layers must agree in ``in_features``, dtype, device and whether they have a bias. Needs
    memory for one more copy of their weights until it returns.
    """
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.data for linear in linears])
    optional: list[Tensor | None] = [linear.bias for linear in linears]
    biases = [bias.data for bias in optional if bias is not None]
    bias = torch.cat(biases) if biases else None
    # Same parameter objects, other memory: whoever else holds them sees the same values.
    for linear, rows in zip(linears, weight.split_with_sizes(sizes), strict=True):
        linear.weight.data = rows
    if bias is not None:
        for linear, rows in zip(linears, bias.split_with_sizes(sizes), strict=True):
            linear.bias.data = rows
    leader, *followers = linears
    # Buffers, because Inductor packs as constants only what modules register. Not persistent: the
    # parameters hold the same memory.
    leader.register_buffer("_joint_weight", weight, persistent=False)
    leader.register_buffer("_joint_bias", bias, persistent=False)
    slots = tuple(Slot() for _ in followers)
    _turn_into(leader, Leader, _sizes=sizes, _slots=slots)
    for follower, slot in zip(followers, slots, strict=True):
        _turn_into(follower, Follower, _slot=slot)


def absorb(linears: Sequence[nn.Linear], activation: nn.Module, gelu: LinearGelu) -> None:
    """Move a GELU into the layers before it.

    Args:
        linears: every layer whose output the activation gets; it gets nothing else. Each has a
            bias.
        activation: an exact GELU.
        gelu: what the layers compute instead.
    """
    slot = Slot()
    _turn_into(activation, SpentGelu, _slot=slot, _original=type(activation))
    for linear in linears:
        _turn_into(linear, GeluLinear, _slot=slot, _gelu=gelu)


def restore(layer: nn.Module) -> bool:
    """Undo the rewrite of one layer; say whether there was one.

    Joined weights get memory of their own again.
    """
    if isinstance(layer, Leader | Follower):
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.clone()
    if isinstance(layer, Leader):
        _turn_back(layer, nn.Linear, "_joint_weight", "_joint_bias", "_sizes", "_slots")
    elif isinstance(layer, Follower):
        _turn_back(layer, nn.Linear, "_slot")
    elif isinstance(layer, GeluLinear):
        _turn_back(layer, nn.Linear, "_slot", "_gelu")
    elif isinstance(layer, SpentGelu):
        _turn_back(layer, layer._original, "_slot", "_original")
    else:
        return False
    return True


def _turn_into(layer: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    # Past nn.Module.__setattr__, which would register a callable that is a module.
    layer.__dict__.update(attributes)
    layer.__class__ = kind


def _turn_back(layer: nn.Module, kind: type[nn.Module], *attributes: str) -> None:
    for name in attributes:
        delattr(layer, name)
    layer.__class__ = kind
