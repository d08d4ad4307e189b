"""What the device thread does with a batch: run it, retry its rows alone, settle every row."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from shapeserve.batcher import Batch, Row
from shapeserve.engine.rows import Outcome, RowAnswer, RowPayload, Run, Ticket
from shapeserve.errors import RowFailed, ShapeServeError, Unavailable
from shapeserve.layout import RowArrays
from shapeserve.metrics import REAL, DropReason, Metrics
from shapeserve.runner import Execution, Flight

log = logging.getLogger("shapeserve.engine")


class BatchExecutor:
    """Runs batches of one model and settles their rows, each exactly once.

    A batch that raises is retried row by row once, so that only the poisonous row fails; a row
    whose output is not finite fails alone.
    """

    def __init__(self, model: str, metrics: Metrics) -> None:
        self._model = model
        self._metrics = metrics
        self._batches = 0

    def launch(self, batch: Batch) -> Flight | None:
        """Start ``batch``; None if it failed at once, and its rows are settled by a retry."""
        now = time.monotonic()
        queue_seconds = self._metrics.queue_seconds.labels(model=self._model)
        queue_seconds.observe_all([now - row.enqueued_s for row in batch.rows])
        payloads: list[RowPayload] = [row.payload for row in batch.rows]
        try:
            return self._launch(batch, payloads, batch.sizes)
        except torch.AcceleratorError:
            raise  # no later launch can succeed: the thread ends, and Serve replaces the replica
        except Exception as error:
            self._retry(batch, payloads, error)
            return None

    def finish(self, batch: Batch, flight: Flight) -> None:
        """Wait for ``batch`` and settle each of its rows; never raises for what a row did."""
        payloads: list[RowPayload] = [row.payload for row in batch.rows]
        try:
            done = self._finish(payloads, flight)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._retry(batch, payloads, error)
        else:
            self._settle(payloads, *done)

    def _launch(
        self, batch: Batch, payloads: Sequence[RowPayload], sizes: Mapping[str, int]
    ) -> Flight:
        runner = payloads[0].prepared.runner
        fallback = batch.lane.fallback
        return runner.launch_counted(_arrays(payloads), sizes, fallback=fallback)

    def _finish(self, payloads: Sequence[RowPayload], flight: Flight) -> tuple[Execution, Run]:
        execution = flight.finish()
        counted = payloads[0].prepared.runner.count(execution, _arrays(payloads))
        elements = sum(counted.values())
        self._batches += 1
        return execution, Run(
            execution.started_s,
            execution.written_s,
            execution.finished_s,
            self._batches,
            execution.mode,
            execution.bucket,
            len(payloads),
            elements,
            elements - counted.get(REAL, 0),
        )

    def _retry(self, batch: Batch, payloads: Sequence[RowPayload], cause: Exception) -> None:
        """Run every row alone once, so that only the poisonous one fails."""
        log.warning("a batch of %d rows failed, retrying row by row: %r", len(payloads), cause)
        lane = batch.lane
        for row, payload in zip(batch.rows, payloads, strict=True):
            try:
                if len(payloads) == 1:
                    raise cause
                size = next(s for s in lane.batch_sizes if s >= row.units)
                flight = self._launch(batch, [payload], lane.sizes(size))
                done = self._finish([payload], flight)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                payload.ticket.context.run(log.exception, "a row failed on the device")
                why = f"the model raised {type(error).__name__} for this row"
                _settle_all([payload], [self._failed(payload, why)])
            else:
                self._settle([payload], *done)

    def _settle(self, payloads: Sequence[RowPayload], execution: Execution, run: Run) -> None:
        model = self._model
        good = sum(execution.finite)
        self._metrics.rows_total.labels(
            model=model, mode=execution.mode, bucket=execution.bucket
        ).inc(good)
        if good < len(payloads):
            self._metrics.nonfinite_rows_total.labels(model=model).inc(len(payloads) - good)
        answers: list[Outcome] = [RowAnswer(row, run) for row in execution.outputs]
        if good < len(payloads):
            why = "the model's output is not finite (NaN or infinity)"
            for i, finite in enumerate(execution.finite):
                if not finite:
                    answers[i] = self._failed(payloads[i], why)
        _settle_all(payloads, answers)

    def _failed(self, payload: RowPayload, why: str) -> RowFailed:
        self.count_dropped(1, DropReason.FAILED)
        return RowFailed(why, param=f"input[{payload.row_index}]")

    def abandon(self, batch: Batch, cause: BaseException) -> None:
        """Settle the rows of a batch that ended the device thread."""
        left = [row for row in batch.rows if not row.payload.ticket.settled(row.payload.row_index)]
        self.drop(left, DropReason.FAILED, Unavailable(f"the device thread died: {cause!r}"))

    def drop(self, rows: Sequence[Row], reason: DropReason, error: ShapeServeError) -> None:
        """Settle rows that will not run with ``error``."""
        self.count_dropped(len(rows), reason)
        _settle_all([row.payload for row in rows], [error] * len(rows))

    def count_dropped(self, rows: int, reason: DropReason) -> None:
        """Count accepted rows that get no result."""
        if rows:
            self._metrics.rows_dropped_total.labels(model=self._model, reason=reason).inc(rows)


def _settle_all(payloads: Sequence[RowPayload], outcomes: Sequence[Outcome]) -> None:
    """Settle rows, those of one request that stand together at once."""
    together: list[tuple[int, Outcome]] = []
    last: Ticket | None = None
    for (ticket, index, _), outcome in zip(payloads, outcomes, strict=True):
        if ticket is not last:
            if last is not None:
                last.settle(together)
            last, together = ticket, []
        together.append((index, outcome))
    if last is not None:
        last.settle(together)


def _arrays(payloads: Sequence[RowPayload]) -> list[RowArrays]:
    return [payload.prepared.arrays for payload in payloads]
