"""Where a warm-up is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WarmupProgress:
    """One step of a warm-up.

    Attributes:
        stage: load, fuse, self-test, compile, capture, verify, verify again or sealed.
        done: variants verified so far.
        total: variants to verify; 0 until the grid is known.
        detail: the bucket or program at work.
    """

    stage: str = "load"
    done: int = 0
    total: int = 0
    detail: str = ""
