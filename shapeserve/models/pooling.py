"""From a row's token vectors to one vector, in fp32 whatever the model's dtype.

Each takes hidden [B, S, D] and mask [B, S] (1 on real tokens, right-padded, at least one a row)
and returns [B, D] float32. Padding vectors are replaced, not multiplied by 0: they may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pooling = Callable[[Tensor, Tensor], Tensor]


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of the real tokens."""
    real = mask.unsqueeze(-1).bool()  # [B, S, 1]
    total = torch.where(real, hidden.float(), 0.0).sum(1)
    return total / mask.sum(1, keepdim=True).float()


def cls(hidden: Tensor, mask: Tensor) -> Tensor:
    """First token: rows are right-padded here, whatever side the model was trained with."""
    return hidden[:, 0].float()


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Last real token: the last 1 of the mask."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * positions).amax(1)  # [B]
    index = last[:, None, None].expand(-1, 1, hidden.shape[2])
    return hidden.gather(1, index).squeeze(1).float()


def maximum(hidden: Tensor, mask: Tensor) -> Tensor:
    """Largest value of each feature over the real tokens."""
    real = mask.unsqueeze(-1).bool()
    return torch.where(real, hidden.float(), float("-inf")).amax(1)


POOL: dict[str, Pooling] = {"mean": mean, "cls": cls, "lasttoken": last_token, "max": maximum}
