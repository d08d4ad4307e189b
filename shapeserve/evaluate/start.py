"""What the start of an engine did and when: the first call of each compiled program."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._inductor.config as inductor_config
import torch._inductor.metrics as inductor_metrics

from shapeserve.evaluate.result import CompileCost, Start
from shapeserve.metrics import Metrics
from shapeserve.warmup import WarmupProgress


@torch.no_grad()
def first_compile_s(backend: str, device: torch.device) -> float:
    """Compile next to nothing: whatever is compiled first pays for loading torch's compiler.

    Without this the shared program would pay, and each specialised one after it would look cheap.
    """
    began = time.perf_counter()
    # With dynamic shapes, because those load a library of their own (sympy).
    torch.compile(_next, backend=backend, dynamic=True)(torch.zeros(3, device=device))
    return time.perf_counter() - began


def _next(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@dataclass(frozen=True, slots=True)
class Counts:
    """What has been compiled so far, as metrics and Inductor count it."""

    graphs: float
    breaks: float
    cache: tuple[float, float, float]
    kernels: int
    bytes_moved: int

    @classmethod
    def now(cls, metrics: Metrics) -> Counts:
        """Read the counters; those of Inductor are of the process."""
        stages: dict[str, float] = {}
        cache = {"hit": 0.0, "miss": 0.0, "bypass": 0.0}
        breaks = 0.0
        for sample in metrics.samples():
            if sample.name == "shapeserve_compiles_total":
                stage = sample.labels["stage"]
                stages[stage] = stages.get(stage, 0.0) + sample.value
            elif sample.name == "shapeserve_compile_cache_total":
                cache[sample.labels["result"]] += sample.value
            elif sample.name == "shapeserve_graph_breaks_total":
                breaks += sample.value
        return cls(
            # Every compile begins with the same stage; the later ones it may not reach.
            graphs=max(stages.values(), default=0.0),
            breaks=breaks,
            cache=(cache["hit"], cache["miss"], cache["bypass"]),
            kernels=inductor_metrics.generated_kernel_count,
            bytes_moved=inductor_metrics.num_bytes_accessed,
        )

    def cost_since(self, before: Counts, seconds: float, *, exact: bool) -> CompileCost:
        """Return what was compiled between the two.

        Args:
            before: earlier counts.
            seconds: by the clock.
            exact: whether it was for one shape; the bytes of others would be those of the sizes
                that the compile saw.
        """
        hits, misses, bypasses = (int(a - b) for a, b in zip(self.cache, before.cache, strict=True))
        kernels = self.kernels - before.kernels
        moved = self.bytes_moved - before.bytes_moved
        return CompileCost(
            seconds=seconds,
            graphs=int(self.graphs - before.graphs),
            graph_breaks=int(self.breaks - before.breaks),
            cache_hits=hits,
            cache_misses=misses,
            cache_bypasses=bypasses,
            # 0 is what Inductor says when it found its code in the cache, or was not asked.
            generated_kernels=kernels or None,
            bytes_moved=(moved or None) if exact else None,
        )


class StartLog:
    """Follows the steps of a start; to be given to an engine as ``on_progress``.

    Args:
        metrics: those of the engine.
        report: called with every step.
        mark_kernels: whether generated CPU kernels get a mark that the profiler sees.
    """

    def __init__(
        self, metrics: Metrics, report: Callable[[WarmupProgress], None], *, mark_kernels: bool
    ) -> None:
        self._metrics = metrics
        self._report = report
        self._mark = mark_kernels
        self._began = time.perf_counter()
        self._open: tuple[WarmupProgress, float, Counts] | None = None
        self._programs: dict[str, CompileCost] = {}
        self._capture_s: dict[str, float] = {}
        self._verify_s: dict[str, float] = {}

    def __call__(self, step: WarmupProgress) -> None:
        """Note that ``step`` begins, in the thread that will do it."""
        if self._mark:
            # Torch keeps this option for each thread, so it is set in the one that compiles.
            inductor_config.cpp.enable_kernel_profile = True
        self._close()
        self._report(step)
        self._open = (step, time.perf_counter(), Counts.now(self._metrics))

    def finish(self, graph_bytes: int, once_s: float) -> Start:
        """Return what was noted; to be called when the engine is ready.

        Args:
            graph_bytes: memory of its captures.
            once_s: of :func:`first_compile_s`.
        """
        seconds = time.perf_counter() - self._began
        self._close()
        return Start(seconds, once_s, self._programs, self._capture_s, graph_bytes, self._verify_s)

    def _close(self) -> None:
        if self._open is None:
            return
        step, began, before = self._open
        self._open = None
        seconds = time.perf_counter() - began
        if step.stage == "compile":
            now = Counts.now(self._metrics)
            self._programs[step.detail] = now.cost_since(before, seconds, exact=False)
        elif step.stage == "capture":
            self._capture_s[step.detail] = seconds
        elif step.stage in ("verify", "verify again") and step.done < step.total:
            self._verify_s[step.detail] = self._verify_s.get(step.detail, 0.0) + seconds
