"""Between the ragged layout and padded tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def row_bounds(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Say for every token which row it is of, and where that row lies.

    An operator rather than plain torch: Inductor of torch 2.11 compiles the search on CUDA to wrong
    rows without a word.

    Args:
        offsets: [R + 1] int32, where the rows lie (see :mod:`shapeserve.ops`).
        tokens: T, the capacity of the token axis; rows that pass it are cut.

    Returns:
        Four int32 tensors [T]: the row (R for filler), the row's start and end (the token alone
        for filler), and the position in the row (0 for filler).

    Raises:
        ValueError: ``offsets`` is no int32 [R + 1].
    """
    if offsets.dim() != 1 or offsets.dtype != torch.int32:
        raise ValueError(f"offsets must be int32 [R + 1], not {offsets.dtype} {offsets.shape}")
    rows, starts, ends, positions = _row_bounds(offsets, tokens)
    return rows, starts, ends, positions


@torch.library.custom_op("shapeserve::row_bounds", mutates_args=(), device_types="cpu")
def _row_bounds(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = torch.arange(tokens, dtype=torch.int32, device=offsets.device)
    # How many rows end at or before the token: those in front of it, empty ones too.
    rows = torch.searchsorted(offsets[1:].contiguous(), index, right=True, out_int32=True)
    filler = rows == offsets.shape[0] - 1
    starts = torch.where(filler, index, offsets[rows])
    ends = torch.where(filler, index + 1, offsets[(rows + 1).clamp(max=offsets.shape[0] - 1)])
    return rows, starts, ends.clamp(max=tokens), index - starts


@_row_bounds.register_fake
def _(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, starts, ends, positions = (offsets.new_empty(tokens) for _ in range(4))
    return rows, starts, ends, positions


@_row_bounds.register_kernel("cuda")
def _(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from shapeserve.ops.ragged_kernels import launch_bounds

    with torch.cuda.device(offsets.device):
        return launch_bounds(offsets, tokens)


def pad_ragged(tokens: Tensor, offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    """Make the padded ids and the mask of a ragged batch of token ids.

    Args:
        tokens: [capacity] int32, rows one after the other.
        offsets: [B + 1] int32, where the rows lie (see :mod:`shapeserve.ops`).
        seq: length to pad to; longer rows are cut.
        pad: id beyond a row's end.

    Returns:
        ids and mask, both [B, seq] int64; the mask is 1 on real tokens. An empty row has one
        valid mask element, the first: a fully masked row makes NaN in some attention kernels.

    Raises:
        ValueError: tokens or offsets are not one-dimensional int32.
    """
    for name, tensor in (("tokens", tokens), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 and 1-D, not {tensor.dtype} {tensor.dim()}-D")
    ids, mask = _pad_ragged(tokens, offsets, seq, pad)
    return ids, mask


@torch.library.custom_op("shapeserve::pad_ragged", mutates_args=(), device_types="cpu")
def _pad_ragged(tokens: Tensor, offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    column = torch.arange(seq, dtype=torch.int32, device=tokens.device)
    low = offsets[:-1].unsqueeze(1)
    high = offsets[1:].unsqueeze(1).clamp(max=tokens.shape[0])
    at = low + column  # [B, seq]
    real = at < high
    # One more element than tokens, so that there is one to gather where nothing is real.
    source = torch.nn.functional.pad(tokens.long(), (0, 1), value=pad)
    ids = torch.where(real, source[at.clamp(max=tokens.shape[0])], pad)
    return ids, (real | ((high <= low) & (column == 0))).long()


@_pad_ragged.register_fake
def _(tokens: Tensor, offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    shape = (offsets.shape[0] - 1, seq)
    return tokens.new_empty(shape, dtype=torch.int64), tokens.new_empty(shape, dtype=torch.int64)


@_pad_ragged.register_kernel("cuda")
def _(tokens: Tensor, offsets: Tensor, seq: int, pad: int) -> tuple[Tensor, Tensor]:
    from shapeserve.ops.ragged_kernels import launch_pad

    with torch.cuda.device(tokens.device):
        return launch_pad(tokens, offsets, seq, pad)


def unpad_ragged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Put the real tokens of a padded batch one after the other.

    Args:
        padded: [B, S, ...], rows right-padded, of any dtype but a complex one.
        offsets: [B + 1] int32, where the rows go (see :mod:`shapeserve.ops`).
        total: length of the token axis that is made.

    Returns:
        [total, ...] contiguous; 0 beyond the last row, and where a row is longer than S.

    Raises:
        ValueError: padded has fewer than two dims, or offsets do not fit it.
    """
    if padded.dim() < 2 or offsets.dtype != torch.int32:
        raise ValueError(
            f"padded must be [B, S, ...] and offsets int32, not {padded.dim()}-D and "
            f"{offsets.dtype}"
        )
    if offsets.dim() != 1 or offsets.shape[0] != padded.shape[0] + 1:
        raise ValueError(
            f"offsets must be [{padded.shape[0] + 1}] for {padded.shape[0]} rows, not "
            f"{tuple(offsets.shape)}"
        )
    tokens: Tensor = _unpad_ragged(padded, offsets, total)
    return tokens


@torch.library.custom_op("shapeserve::unpad_ragged", mutates_args=(), device_types="cpu")
def _unpad_ragged(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    rows, _, _, positions = row_bounds(offsets, total)
    real = (rows < padded.shape[0]) & (positions < padded.shape[1])
    out = padded.new_zeros((total, *padded.shape[2:]))
    out[real] = padded[rows[real], positions[real]]
    return out


@_unpad_ragged.register_fake
def _(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    return padded.new_empty((total, *padded.shape[2:]))


@_unpad_ragged.register_kernel("cuda")
def _(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    from shapeserve.ops.ragged_kernels import launch_unpad

    with torch.cuda.device(padded.device):
        return launch_unpad(padded, offsets, total)
