"""Bounds on the variants of a proposal: their number, the memory of their graphs, the warm-up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shapeserve.buckets import Grid
from shapeserve.errors import ConfigError
from shapeserve.tuning.variants import VariantCosts

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the variants of a grid take.

    Attributes:
        variants: how many there are.
        graph_bytes: memory of their graphs; None where there are none, or it was not measured.
        warmup_s: of a start with them; None where it was not measured.
    """

    variants: int
    graph_bytes: float | None = None
    warmup_s: float | None = None

    @classmethod
    def of(cls, grid: Grid, costs: VariantCosts | None) -> Footprint:
        """Return what the variants of ``grid`` take, as far as it was measured."""
        if costs is None:
            return cls(len(grid))
        sizes = [bucket.as_dict() for bucket in grid.buckets]
        return cls(len(grid), costs.graph_bytes(sizes), costs.warmup_s(sizes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a proposal may take; None: anything.

    Attributes:
        variants: how many, row shapes times the batch sizes that fit.
        graph_bytes: memory of their graphs.
        warmup_s: seconds of a start from an empty compile cache.
    """

    variants: int | None = None
    graph_bytes: float | None = None
    warmup_s: float | None = None

    @property
    def free(self) -> bool:
        """Whether anything is allowed."""
        return self == Limits()

    def check(self, costs: VariantCosts | None) -> None:
        """Refuse limits of what was not measured.

        Raises:
            ConfigError: it says what to measure.
        """
        measured = (("--max-graph-mb", self.graph_bytes), ("--max-warmup-s", self.warmup_s))
        for option, limit in measured:
            if limit is not None and costs is None:
                raise ConfigError(
                    f"{option} needs what a variant costs; measure it with `shapeserve profile "
                    "CONFIG.yaml --out COSTS.json` and give --costs COSTS.json"
                )
        if self.graph_bytes is not None and costs is not None and not costs.captured:
            raise ConfigError(
                "--max-graph-mb: the costs are of a service without CUDA graphs, whose variants "
                "take no memory; leave it out, or profile on a GPU"
            )

    def broken(self, footprint: Footprint) -> list[str]:
        """Return what is above its limit, in words; empty if nothing is."""
        over = []
        if self.variants is not None and footprint.variants > self.variants:
            over.append(f"{footprint.variants} variants (--max-variants {self.variants})")
        held = footprint.graph_bytes or 0.0
        if self.graph_bytes is not None and held > self.graph_bytes:
            limit = self.graph_bytes / MIB
            over.append(f"{held / MIB:.1f} MiB of graphs (--max-graph-mb {limit:g})")
        took = footprint.warmup_s or 0.0
        if self.warmup_s is not None and took > self.warmup_s:
            over.append(f"{took:.1f} s of warm-up (--max-warmup-s {self.warmup_s:g})")
        return over
