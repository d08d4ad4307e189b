"""Offline work: any number of samples through the engine's own queue, in order."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from shapeserve.engine.rows import PreparedSample, Result, Sample
from shapeserve.errors import InvalidRequest, RowFailed

if TYPE_CHECKING:
    from shapeserve.engine.engine import Engine

Answer = Result | RowFailed | InvalidRequest

# Large enough that every bucket finds full batches in it, small enough that two fit the queue. The
# first one is small, so that the device does not wait for the others to be tokenised.
_WINDOW_ROWS = 2048
_FIRST_WINDOW_ROWS = 256
_NEVER = 1_000_000  # collections of the middle generation before one of the oldest
_IN_FLIGHT = 2  # one is tokenised while the device works on the other


def run_offline(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    progress: bool,
    on_error: Literal["raise", "return"],
) -> list[Answer]:
    """Answer ``samples`` in order; see ``Engine.run``."""
    results: dict[int, Answer] = {}
    with _no_full_collections():
        _run(engine, samples, results, progress=progress, stop_at_error=on_error == "raise")
    in_order = [results[i] for i in range(len(samples))]
    failed = next((answer for answer in in_order if not isinstance(answer, Result)), None)
    if failed is not None and on_error == "raise":
        raise failed
    return in_order


def _run(
    engine: Engine,
    samples: Sequence[Sample],
    results: dict[int, Answer],
    *,
    progress: bool,
    stop_at_error: bool,
) -> None:
    """Fill ``results`` (index -> answer)."""
    waiting: deque[tuple[Sequence[int], Callable[[], list[Result | RowFailed]]]] = deque()
    with _progress_bar(len(samples), enabled=progress) as advance:

        def gather() -> None:
            indices, answers = waiting.popleft()
            results.update(zip(indices, answers(), strict=True))
            advance(len(indices))

        for window in _windows(engine, samples, results, stop_at_error=stop_at_error):
            if len(waiting) == _IN_FLIGHT:
                gather()
            indices = tuple(window)
            answers = engine.admit_when_free([*window.values()], indices=indices)
            waiting.append((indices, answers))
        while waiting:
            gather()


@contextlib.contextmanager
def _no_full_collections() -> Iterator[None]:
    """Keep the garbage collector from looking through everything that lives in the process.

    The objects of thousands of rows make it walk torch's and the model's million objects again and
    again, 0.3 s each time, more than the rows themselves take. Young garbage is still collected.
    """
    young, middle, old = gc.get_threshold()
    if old >= _NEVER:  # another run does so, or somebody who wants to keep it
        yield
        return
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _windows(
    engine: Engine, samples: Sequence[Sample], results: dict[int, Answer], *, stop_at_error: bool
) -> Iterator[dict[int, PreparedSample]]:
    """Prepare samples window by window (index -> sample), each within half of the queue's bounds.

    The error of a bad sample goes into ``results``, or is raised.
    """
    limits = engine.config.limits
    most_rows = max(min(_WINDOW_ROWS, limits.max_queue_rows // _IN_FLIGHT), 1)
    most_tokens = limits.max_queue_tokens // _IN_FLIGHT
    window: dict[int, PreparedSample] = {}
    rows = tokens = 0
    end = 0
    while end < len(samples):
        start, end = end, end + min(most_rows, max(_FIRST_WINDOW_ROWS, end))
        part = engine.prepare_each(samples[start:end], first=start)
        for index, sample in enumerate(part, start):
            if not isinstance(sample, PreparedSample):
                if stop_at_error:
                    raise sample
                results[index] = sample
                continue
            cost = sum(row.cost for row in sample.rows)
            if window and (rows + len(sample.rows) > most_rows or tokens + cost > most_tokens):
                yield window
                window, rows, tokens = {}, 0, 0
            window[index] = sample
            rows += len(sample.rows)
            tokens += cost
        if window:  # nobody would ever answer a request without rows
            yield window
        window, rows, tokens = {}, 0, 0


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
