"""Offline work: any number of samples through the engine's own queue, in order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from shapeserve.engine.rows import PreparedSample, Result, Sample
from shapeserve.errors import RowFailed

if TYPE_CHECKING:
    from shapeserve.engine.engine import Engine

# Large enough that every bucket finds full batches in it, small enough that two fit the queue.
_WINDOW_ROWS = 2048
_IN_FLIGHT = 2  # one is tokenised while the device works on the other


def run_offline(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    progress: bool,
    on_error: Literal["raise", "return"],
) -> list[Result | RowFailed]:
    """Answer ``samples`` in order; see ``Engine.run``."""
    results: list[Result | RowFailed] = []
    waiting: deque[Future[list[Result | RowFailed]]] = deque()
    with _progress_bar(len(samples), enabled=progress) as advance:

        def gather() -> None:
            answers = waiting.popleft().result()
            results.extend(answers)
            advance(len(answers))

        for window in _windows(engine, samples):
            if len(waiting) == _IN_FLIGHT:
                gather()
            waiting.append(engine.admit_when_free(window))
        while waiting:
            gather()
    failed = next((r for r in results if isinstance(r, RowFailed)), None)
    if failed is not None and on_error == "raise":
        raise failed
    return results


def _windows(engine: Engine, samples: Sequence[Sample]) -> Iterator[list[PreparedSample]]:
    """Prepare samples window by window, each within half of the queue's bounds."""
    limits = engine.config.limits
    rows = max(min(_WINDOW_ROWS, limits.max_queue_rows // _IN_FLIGHT, limits.max_rows), 1)
    budget = limits.max_queue_tokens // _IN_FLIGHT
    for start in range(0, len(samples), rows):
        window: list[PreparedSample] = []
        used = 0
        for sample in engine.prepare(samples[start : start + rows]):
            cost = sum(row.cost for row in sample.rows)
            if window and used + cost > budget:
                yield window
                window, used = [], 0
            window.append(sample)
            used += cost
        yield window


@contextlib.contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, or nothing."""
    if not enabled:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("samples", total=total)
        yield lambda n: bar.advance(task, n)
