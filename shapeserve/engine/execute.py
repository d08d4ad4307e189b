"""What the device thread does with a batch: run it, retry its rows alone, settle every row."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from shapeserve.batcher import Batch, Row
from shapeserve.engine.rows import RowAnswer, RowPayload
from shapeserve.errors import RowFailed, ShapeServeError, Unavailable
from shapeserve.layout import RowArrays
from shapeserve.metrics import DropReason, Metrics
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
            execution = self._finish(payloads, flight)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._retry(batch, payloads, error)
        else:
            self._settle(payloads, execution)

    def _launch(
        self, batch: Batch, payloads: Sequence[RowPayload], sizes: Mapping[str, int]
    ) -> Flight:
        runner = payloads[0].prepared.runner
        fallback = batch.lane.fallback
        return runner.launch_counted(_arrays(payloads), sizes, fallback=fallback)

    def _finish(self, payloads: Sequence[RowPayload], flight: Flight) -> Execution:
        execution = flight.finish()
        payloads[0].prepared.runner.count(execution, _arrays(payloads))
        return execution

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
                execution = self._finish([payload], flight)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                log.exception("a row failed on the device")
                self._fail(payload, f"the model raised {type(error).__name__} for this row")
            else:
                self._settle([payload], execution)

    def _settle(self, payloads: Sequence[RowPayload], execution: Execution) -> None:
        model = self._model
        good = sum(execution.finite)
        self._metrics.rows_total.labels(
            model=model, mode=execution.mode, bucket=execution.bucket
        ).inc(good)
        if good < len(payloads):
            self._metrics.nonfinite_rows_total.labels(model=model).inc(len(payloads) - good)
        for payload, outputs, finite in zip(
            payloads, execution.outputs, execution.finite, strict=True
        ):
            if finite:
                answer = RowAnswer(outputs, execution.mode, execution.bucket)
                payload.ticket.settle(payload.index, answer)
            else:
                self._fail(payload, "the model's output is not finite (NaN or infinity)")

    def _fail(self, payload: RowPayload, why: str) -> None:
        self.count_dropped(1, DropReason.FAILED)
        payload.ticket.settle(payload.index, RowFailed(why, param=f"input[{payload.index}]"))

    def abandon(self, batch: Batch, cause: BaseException) -> None:
        """Settle the rows of a batch that ended the device thread."""
        left = [row for row in batch.rows if not row.payload.ticket.settled(row.payload.index)]
        self.drop(left, DropReason.FAILED, Unavailable(f"the device thread died: {cause!r}"))

    def drop(self, rows: Sequence[Row], reason: DropReason, error: ShapeServeError) -> None:
        """Settle rows that will not run with ``error``."""
        self.count_dropped(len(rows), reason)
        for row in rows:
            payload: RowPayload = row.payload
            payload.ticket.settle(payload.index, error)

    def count_dropped(self, rows: int, reason: DropReason) -> None:
        """Count accepted rows that get no result."""
        if rows:
            self._metrics.rows_dropped_total.labels(model=self._model, reason=reason).inc(rows)


def _arrays(payloads: Sequence[RowPayload]) -> list[RowArrays]:
    return [payload.prepared.arrays for payload in payloads]
