"""Text encoders that are told where each row begins and ends, instead of a mask.

An attention function registered with transformers attends from each token only to the tokens of
its own row. So packed rows, one sequence to the encoder, stay apart, and padded ones need no mask,
which no flash kernel takes. No model code is changed; an encoder whose attention does more than
that (a causal mask, a window, a bias by position) is refused here, and what slips through by the
self-test.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from shapeserve.errors import ModelError
from shapeserve.models.pooling import POOL
from shapeserve.ops import packed_attention, row_bounds, segment_pool

_ATTENTION = "shapeserve_packed"
# What a row's attention may be told besides query, key and value without becoming another one.
_REFUSED = ("sliding_window", "position_bias", "softcap", "s_aux")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within the rows' bounds if they are given, else as ``sdpa`` does.

    Shapes: query, key, value [B, H, S, D]; bounds [B * S], where packed rows have B = 1; returns
    [B, S, H, D].
    """
    if row_starts is None or row_ends is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    refused = [name for name in _REFUSED if options.get(name) is not None]
    if refused or getattr(module, "is_causal", False) or key.shape[1] != query.shape[1]:
        what = refused[0] if refused else "a causal mask or grouped heads"
        raise ModelError(f"rows with bounds: the attention of this model has {what}")
    batch, heads, size, dim = query.shape
    # Views: the projections lie as [B, S, H, D].
    q, k, v = (x.transpose(1, 2).reshape(batch * size, heads, dim) for x in (query, key, value))
    scale = dim**-0.5 if scaling is None else scaling
    attended = packed_attention(q, k, v, row_starts, row_ends, scale)
    return attended.view(batch, size, heads, dim), None


def _mask(**options: Any) -> Tensor | None:
    """No mask for rows with bounds, which say it all; ``sdpa``'s for others."""
    if options.get("attention_mask") is None:
        return None
    mask: Tensor | None = sdpa_mask(**options)
    return mask


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _mask)


class PackedTextEncoder(nn.Module):
    """Packed tokens to one vector a row, and if asked for one a token.

    Shapes: tokens [T] int32, offsets [R+1] int32 (repeating the total after the last row); returns
    ([R, D] float32,), zeros for rows without tokens; with ``token_embeddings`` ([R, D], [T, D]).
    """

    def __init__(
        self, encoder: nn.Module, pooling: str, normalize: bool, *, token_embeddings: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._pooling = pooling
        self._normalize = normalize
        self._token_embeddings = token_embeddings
        self._first_position = _first_position(encoder)

    def forward(self, tokens: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """Encode, pool and normalise."""
        _, starts, ends, positions = row_bounds(offsets, tokens.shape[0])
        hidden = self.encoder(
            input_ids=tokens[None].long(),
            position_ids=(positions + self._first_position)[None].long(),
            row_starts=starts,
            row_ends=ends,
            return_dict=False,
        )[0][0]  # [T, D]
        vectors = segment_pool(hidden, offsets, self._pooling, self._normalize)
        return (vectors, hidden.float()) if self._token_embeddings else (vectors,)


class BoundedTextEncoder(nn.Module):
    """Padded rows as ``TextEncoder`` takes them, with bounds instead of a mask in the attention.

    The mask must be ones up to each row's length, as the layouts make it. Shapes: input_ids and
    attention_mask [B, S] int64; returns ([B, D] float32,), with ``token_embeddings``
    ([B, D], [B, S, D]).
    """

    def __init__(
        self, encoder: nn.Module, pooling: str, normalize: bool, *, token_embeddings: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._pool = POOL[pooling]
        self._normalize = normalize
        self._token_embeddings = token_embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Encode, pool and normalise."""
        starts, ends = padded_bounds(attention_mask)
        hidden = self.encoder(
            input_ids=input_ids, row_starts=starts, row_ends=ends, return_dict=False
        )[0]  # [B, S, D]
        vectors = self._pool(hidden, attention_mask)
        if self._normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return (vectors, hidden.float()) if self._token_embeddings else (vectors,)


def padded_bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of padded rows: starts and ends, both [B * S] int32.

    A padding element is a row of its own, as ``packed_attention`` wants its filler.
    """
    batch, size = mask.shape
    position = torch.arange(size, device=mask.device)
    first = torch.arange(batch, device=mask.device)[:, None] * size
    lengths = mask.sum(1, keepdim=True)
    real = position < lengths
    starts = torch.where(real, first, first + position)
    ends = torch.where(real, first + lengths, first + position + 1)
    return starts.flatten().int(), ends.flatten().int()


def bounded(
    encoder: nn.Module, pooling: str, normalize: bool, *, token_embeddings: bool = False
) -> tuple[PackedTextEncoder | None, BoundedTextEncoder | None]:
    """Return the encoder for packed rows and for padded rows with bounds.

    None where its attention cannot be chosen; for packed rows also where it takes no positions.
    """
    parameters = inspect.signature(encoder.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None, None
    try:
        encoder.set_attn_implementation(_ATTENTION)  # type: ignore[operator]
    except ValueError:  # an architecture whose attention cannot be chosen
        return None, None
    tokens = token_embeddings
    padded = BoundedTextEncoder(encoder, pooling, normalize, token_embeddings=tokens).eval()
    if "position_ids" not in parameters:
        return None, padded
    packed = PackedTextEncoder(encoder, pooling, normalize, token_embeddings=tokens).eval()
    return packed, padded


def _first_position(encoder: nn.Module) -> int:
    """The position of a row's first token: RoBERTa and its relatives count from the pad id on."""
    for name, table in encoder.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            return 0 if table.padding_idx is None else table.padding_idx + 1
    return 0
