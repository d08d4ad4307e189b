"""The engine: one model, its buckets, a queue and a device thread; a plain object without Ray."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, Self, TypeVar, overload

from shapeserve.batcher import Batch, Batcher, Row
from shapeserve.buckets import Grid
from shapeserve.compile.debug import keep_artefacts, log_all_recompiles
from shapeserve.compile.record import CompileRecord, compile_record
from shapeserve.config import ModelConfig, Policy, ServeConfig, predicted_waste
from shapeserve.engine.build import Built, build, new_runner
from shapeserve.engine.combine import combine
from shapeserve.engine.device import DeviceThread, Finish, Source, Work
from shapeserve.engine.execute import BatchExecutor
from shapeserve.engine.mail import Mail
from shapeserve.engine.offline import run_offline
from shapeserve.engine.prepare import Preparer
from shapeserve.engine.record import Recorder
from shapeserve.engine.rows import (
    Outcome,
    PreparedRow,
    PreparedSample,
    RecentFallback,
    Result,
    RowAnswer,
    RowPayload,
    Sample,
    Ticket,
)
from shapeserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    RowFailed,
    Unavailable,
)
from shapeserve.metrics import CompilePhase, DropReason, Metrics, SwapResult
from shapeserve.models.spec import ModelSpec, TextPair
from shapeserve.runner import Flight, ModelRunner
from shapeserve.warmup import (
    Probe,
    WarmupContext,
    WarmupProgress,
    launch_overhead,
    publish_variants,
    warm_up,
)

log = logging.getLogger("shapeserve.engine")

# A batch of the largest bucket takes a fraction of a second; one that has run for a minute hangs.
STUCK_AFTER_S = 60.0
# Arrays of so few rows are checked in the caller's event loop; 4 rows take 30 microseconds.
_INLINE_ROWS = 4
_TEXT = (str, TextPair)
# Waiters are notified after every batch; this only bounds a lost wake-up. Arbitrary.
_POLL_S = 0.1
# Requests with rows outside the grid that are remembered, for whoever looks. Arbitrary.
_FALLBACKS_KEPT = 50

T = TypeVar("T")
State = Literal["new", "starting", "ready", "closing", "closed", "dead"]


class Engine:
    """Serves one model through its buckets.

    Args:
        config: a model's configuration, or a service's with exactly one model.
        metrics: where to count; an own registry if not given.
        on_progress: called with every step of the warm-up, in the device thread.
        device: the device thread to run on, which other engines may share: their batches take
            turns, and a start or a policy swap of one runs between the batches of the others. It
            ends when the last of its engines is closed. An own one if not given.

    Raises:
        ConfigError: ``threads`` differs from those of the shared device thread.

    Thread rule: all public methods may be called from any thread. The async ones resolve in the
    caller's event loop and never block it.

    Example::

        with Engine(ServeConfig.for_model_dir(path)).start() as engine:
            vectors = [r.outputs["sentence_embedding"] for r in engine.run(texts)]
    """

    def __init__(
        self,
        config: ServeConfig | ModelConfig,
        *,
        metrics: Metrics | None = None,
        on_progress: Callable[[WarmupProgress], None] | None = None,
        device: DeviceThread | None = None,
    ) -> None:
        self.config = _one_model(config)
        self._policy = self.config.policy
        self.metrics = metrics or Metrics()
        self.progress = WarmupProgress()
        self._on_progress = on_progress
        self._state: State = "new"
        self._cause: BaseException | None = None
        self._swap_lock = threading.Lock()
        self._mail: Mail[list[Outcome]] = Mail()
        limits = self.config.limits
        self._batcher = Batcher(
            max_queue_rows=limits.max_queue_rows,
            max_queue_tokens=limits.max_queue_tokens,
            batch_wait_timeout_s=self.config.batching.batch_wait_timeout_s,
        )
        self._executor: BatchExecutor
        self._fallbacks: deque[RecentFallback] = deque(maxlen=_FALLBACKS_KEPT)
        self._running: list[Batch] = []  # taken from the queue and not settled
        self._built: Built | None = None
        self._preparer: Preparer | None = None
        self._recorder: Recorder | None = None
        self._device = device or DeviceThread(threads=self.config.threads)
        if self.config.threads not in (None, self._device.threads):
            raise ConfigError(
                f"threads: {self.config.threads} asked for, but the device thread that is shared "
                f"has {self._device.threads}; give its models the same number, or leave it out"
            )
        self._source = Source(
            next_work=self._next_work,
            max_in_flight=self._max_in_flight,
            next_wakeup=lambda: self._batcher.next_wakeup(time.monotonic()),
            on_death=self._died,
        )
        self._device.join(self._source)

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> Self:
        """Load, test, compile, warm, verify and seal; returns when the engine is ready.

        Raises:
            ConfigError: the policy does not fit the model.
            ModelError: the model cannot be loaded or does not pass its self-test, or a variant
                failed under ``compile.strict``.
        """
        if self._state != "new":
            raise RuntimeError(f"cannot start: the engine is {self._state}; make a new one")
        self._state = "starting"
        started = time.monotonic()
        self._device.start()
        try:
            self._device.call(self._start_on_device, bounded=False).result()
        except BaseException:
            self._device.leave(self._source, 1.0)
            self._state = "closed"
            raise
        if self.config.record is not None:
            self._recorder = Recorder(
                self.config.record, self.spec.name, self.spec.row_axes, self.metrics
            )
            self._recorder.start()
        self.metrics.warmup_seconds.labels(model=self.spec.name).set(time.monotonic() - started)
        with self._device.lock:
            if self._state != "starting":
                raise Unavailable(f"the engine was closed while it started ({self._state})")
            self._state = "ready"
        return self

    def _start_on_device(self) -> None:
        settings = self.config.compile
        if settings.log_recompiles:
            log_all_recompiles()
        with keep_artefacts(settings.debug_dir, self.config.name or "model"):
            built = self._built = build(self.config, self.metrics, self._report)
        self._executor = BatchExecutor(built.spec.name, self.metrics)
        self._batcher.set_overhead(launch_overhead(built.runner, built.probe))
        self._preparer = self._new_preparer(built)

    def _report(self, progress: WarmupProgress) -> None:
        if self._state != "starting":  # others may need the device
            raise Unavailable(f"the engine was closed while it started ({self._state})")
        self.progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)

    def close(self, drain_s: float = 10.0) -> None:
        """Refuse new rows, finish the queue within ``drain_s`` seconds, then stop.

        Rows that are still waiting then fail with :class:`Unavailable`.
        """
        if self._state == "closed":
            return
        deadline = time.monotonic() + drain_s
        with self._device.lock:
            if self._state in ("new", "starting"):
                deadline = time.monotonic()  # there is nothing to drain
            if self._state != "dead":
                self._state = "closing"
            self._wait_while(self._unfinished, deadline)
            left = self._batcher.close()
            self._count_queue()
        if left:
            gone = Unavailable("the service is shutting down")
            self._executor.drop(left, DropReason.SHUTDOWN, gone)
        deadline = max(deadline, time.monotonic() + 1.0)
        with self._device.lock:
            self._wait_while(lambda: bool(self._running), deadline)
        self._device.leave(self._source, deadline - time.monotonic())
        if self._recorder is not None:
            self._recorder.close()
        self._state = "closed"

    def _wait_while(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Wait, the lock being held, as long as the device thread lives to change it."""
        while self._device.alive and condition() and time.monotonic() < deadline_s:
            self._device.lock.wait(_POLL_S)

    def _unfinished(self) -> bool:
        return self._batcher.queue_rows > 0 or bool(self._running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it is ---------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """The model's tensors and limits."""
        return self._ready_parts().spec

    @property
    def grid(self) -> Grid:
        """The grid that serves now."""
        return self._ready_parts().runner.grid

    @property
    def policy(self) -> Policy:
        """The policy that the grid was made from."""
        return self._policy

    @property
    def runner(self) -> ModelRunner:
        """What runs batches on the grid that serves now; for use through :meth:`on_device`."""
        return self._ready_parts().runner

    @property
    def probe(self) -> Probe:
        """Makes random rows of the model; for use through :meth:`on_device`."""
        return self._ready_parts().probe

    def compile_record(self) -> CompileRecord:
        """Return what was compiled, and what serves of that."""
        built = self._ready_parts()
        return compile_record(built.spec.name, built.runner.variants, built.monitor, self.metrics)

    @property
    def recent_fallbacks(self) -> tuple[RecentFallback, ...]:
        """The last requests with rows outside the grid, oldest first."""
        return tuple(self._fallbacks)

    def on_device(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the device thread, between batches, and return its result."""
        if self._state == "closed":
            raise Unavailable("the engine is closed")
        return self._device.call(job).result()

    @property
    def ready(self) -> bool:
        """Whether every variant is sealed and rows are accepted."""
        return self._state == "ready"

    def healthy(self) -> None:
        """Raise :class:`Unavailable` if the device thread is dead or stuck."""
        if self._state == "dead":
            raise Unavailable(f"the device thread died: {self._cause!r}")
        if self._state == "ready" and self._device.busy_s() > STUCK_AFTER_S:
            raise Unavailable(f"a batch has been running for more than {STUCK_AFTER_S:.0f} s")

    def _ready_parts(self) -> Built:
        if self._built is None:
            raise RuntimeError(f"the engine is {self._state}; call start() first")
        return self._built

    # --- serving ------------------------------------------------------------------------------

    def prepare(
        self,
        samples: Sequence[Sample],
        *,
        over_max: str | None = None,
        item: str = "input",
        first: str | None = None,
        start: int = 0,
    ) -> list[PreparedSample]:
        """Tokenise, check and route samples; CPU work, to be called off the event loop.

        Args:
            samples: texts, pairs of texts, token ids or arrays by input name.
            over_max: what to do with rows beyond the largest bucket, instead of the configured
                ``rare_shapes``: fallback, split, truncate or reject.
            item: what errors call the samples.
            first: what they call the first text of the pairs, where all have the same one.
            start: index of the first of the samples in the caller's list, for error messages.

        Raises:
            InvalidRequest: names the bad items by index.
        """
        if self._preparer is None:
            raise Unavailable(f"the engine is {self._state}")
        return self._preparer.prepare(
            samples, over_max=over_max, item=item, first=first, start=start
        )

    def prepare_each(
        self, samples: Sequence[Sample], *, first: int = 0
    ) -> list[PreparedSample | InvalidRequest]:
        """As :meth:`prepare`, with the error of a bad sample in its place.

        Args:
            samples: any number.
            first: index of the first of them in the caller's list, for error messages.
        """
        if self._preparer is None:
            raise Unavailable(f"the engine is {self._state}")
        return self._preparer.prepare_each(samples, first=first)

    async def submit(
        self, sample: Sample, *, over_max: str | None = None, deadline_s: float | None = None
    ) -> Result:
        """Answer one sample; see :meth:`submit_many`. A failed row raises :class:`RowFailed`."""
        (outcome,) = await self.submit_many([sample], over_max=over_max, deadline_s=deadline_s)
        if isinstance(outcome, RowFailed):
            raise outcome
        return outcome

    async def submit_many(
        self,
        samples: Sequence[Sample],
        *,
        over_max: str | None = None,
        deadline_s: float | None = None,
    ) -> list[Result | RowFailed]:
        """Answer samples in order; a row that failed has its :class:`RowFailed` in its place.

        Args:
            samples: texts, token ids or arrays by input name.
            over_max: see :meth:`prepare`.
            deadline_s: point on ``time.monotonic()`` after which waiting rows are dropped.

        Raises:
            InvalidRequest: some sample cannot run; nothing was queued.
            Overloaded: the queue is full; nothing was queued.
            DeadlineExceeded: at least one row was not started in time.
            Unavailable: closing, or the device thread died.
        """
        prepare = partial(self.prepare, samples, over_max=over_max)
        if len(samples) <= _INLINE_ROWS and not any(isinstance(s, _TEXT) for s in samples):
            prepared = prepare()  # microseconds, less than the hop to a thread
        else:
            prepared = await asyncio.get_running_loop().run_in_executor(None, prepare)
        return await self.submit_prepared(prepared, deadline_s=deadline_s)

    async def submit_prepared(
        self, samples: Sequence[PreparedSample], *, deadline_s: float | None = None
    ) -> list[Result | RowFailed]:
        """As :meth:`submit_many`, for samples from :meth:`prepare`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Outcome]] = loop.create_future()

        ticket = self._admit(samples, partial(self._mail.post, loop, future), deadline_s)
        try:
            outcomes = await future
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise
        return self._results(samples, outcomes)

    @overload
    def run(
        self,
        samples: Sequence[Sample],
        *,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
    ) -> list[Result]: ...

    @overload
    def run(
        self, samples: Sequence[Sample], *, progress: bool = False, on_error: Literal["return"]
    ) -> list[Result | RowFailed | InvalidRequest]: ...

    def run(
        self,
        samples: Sequence[Sample],
        *,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> Sequence[Result | RowFailed | InvalidRequest]:
        """Answer any number of samples offline, in order, waiting where the queue is full.

        Args:
            samples: texts, token ids or arrays by input name.
            progress: show a progress bar on stderr.
            on_error: ``raise`` the error of the first bad or failed sample, or ``return`` it in
                the sample's place.
        """
        return run_offline(self, samples, progress=progress, on_error=on_error)

    def admit_when_free(
        self, samples: Sequence[PreparedSample], *, indices: Sequence[int] | None = None
    ) -> Callable[[], list[Result | RowFailed]]:
        """Queue samples as soon as the queue has room for all of them; blocks until then.

        Args:
            samples: prepared ones.
            indices: where each stands in the caller's list, for error messages.

        Returns:
            What waits for the results and returns them.
        """
        future: Future[list[Outcome]] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        rows = sum(len(sample.rows) for sample in samples)
        cost = sum(row.cost for sample in samples for row in sample.rows)
        with self._device.lock:
            while self._state == "ready" and not self._batcher.has_room(rows, cost):
                self._device.lock.wait(_POLL_S)
            self._admit(samples, future.set_result, None)
        # Put together by whoever waits: the device thread has the next batch to launch.
        return lambda: self._results(samples, future.result(), indices)

    def _admit(
        self,
        samples: Sequence[PreparedSample],
        deliver: Callable[[list[Outcome]], None],
        deadline_s: float | None,
    ) -> Ticket:
        """Queue all rows of a request or none."""
        prepared = [row for sample in samples for row in sample.rows]
        ticket = Ticket(prepared, deliver)
        now = time.monotonic()
        ticket.rows = tuple(
            Row(
                payload=RowPayload(ticket, index, row),
                lane=row.lane,
                cost_tokens=row.cost,
                units=row.units,
                deadline_s=deadline_s,
            )
            for index, row in enumerate(prepared)
        )
        with self._device.lock:
            if self._state != "ready":
                raise Unavailable(f"the engine is {self._state}")
            self._batcher.offer(ticket.rows, now)
            self._device.notify()
            self._count_queue()
        self._count_admitted(samples, prepared)
        return ticket

    def _count_admitted(
        self, samples: Sequence[PreparedSample], prepared: Sequence[PreparedRow]
    ) -> None:
        metrics, model = self.metrics, self.spec.name
        metrics.rows_accepted_total.labels(model=model).inc(len(prepared))
        columns = [[sample.sizes[axis] for sample in samples] for axis in self.spec.row_axes]
        for axis, lengths in zip(self.spec.row_axes, columns, strict=True):
            metrics.request_length.labels(model=model, axis=axis).observe_all(lengths)
        if self._recorder is not None:
            self._recorder.add([*zip(*columns, strict=True)])
        outside = [row.reason for row in prepared if row.reason is not None]
        for reason in set(outside):
            rows = outside.count(reason)
            metrics.fallbacks_total.labels(model=model, reason=reason).inc(rows)
            self._fallbacks.append(RecentFallback(reason, rows, time.time()))

    def _count_queue(self) -> None:
        """Set the queue's gauges; the lock must be held."""
        if self._built is None:
            return
        model = self.spec.name
        self.metrics.queue_rows.labels(model=model).set(self._batcher.queue_rows)
        self.metrics.queue_tokens.labels(model=model).set(self._batcher.queue_tokens)

    def _cancel(self, ticket: Ticket) -> None:
        """Drop the rows that still wait; those on the device run and are not looked at."""
        with self._device.lock:
            dropped = [row for row in ticket.rows if self._batcher.cancel(row)]
            self._count_queue()
        now = time.monotonic()
        late = sum(row.deadline_s is not None and row.deadline_s <= now for row in dropped)
        self._executor.count_dropped(late, DropReason.DEADLINE)
        self._executor.count_dropped(len(dropped) - late, DropReason.CANCELLED)

    def _results(
        self,
        samples: Sequence[PreparedSample],
        outcomes: Sequence[Outcome],
        indices: Sequence[int] | None = None,
    ) -> list[Result | RowFailed]:
        """Put the rows' outcomes together, one result per sample."""
        results: list[Result | RowFailed] = []
        start, spec = 0, self.spec
        for index, sample in zip(indices or range(len(samples)), samples, strict=True):
            rows = outcomes[start : start + len(sample.rows)]
            start += len(sample.rows)
            answers = [row for row in rows if isinstance(row, RowAnswer)]
            if len(answers) == len(rows):
                results.append(combine(spec, sample, answers))
                continue
            error = next(row for row in rows if not isinstance(row, RowAnswer))
            if not isinstance(error, RowFailed):
                raise error
            results.append(RowFailed(error.message, param=f"input[{index}]"))
        return results

    # --- device thread ------------------------------------------------------------------------

    def _max_in_flight(self) -> int:
        return self._built.runner.layout.slots if self._built is not None else 1

    def _next_work(self, ahead: bool) -> Work | None:
        """Called by the device thread with the lock held."""
        now = time.monotonic()
        expired = self._batcher.expire(now)
        batch = self._batcher.next_batch(now, ahead=ahead)
        if expired or batch is not None:
            self._count_queue()
        if batch is None and not expired:
            return None
        if batch is not None:
            self._running.append(batch)
        return Work(partial(self._work, batch, expired), batch.area if batch is not None else 0)

    def _work(self, batch: Batch | None, expired: Sequence[Row]) -> Finish | None:
        late = DeadlineExceeded("the deadline passed before the row was started")
        self._executor.drop(expired, DropReason.DEADLINE, late)
        if batch is None:
            return None
        flight = self._executor.launch(batch)
        finish = partial(self._finish, batch, flight)
        if flight is not None and self._max_in_flight() > 1:
            return finish
        finish()
        return None

    def _finish(self, batch: Batch, flight: Flight | None) -> None:
        """Settle the rows, unless a retry has, and make room for the next batch."""
        if flight is not None:
            self._executor.finish(batch, flight)
        with self._device.lock:
            self._running.remove(batch)
            self._batcher.complete(batch, time.monotonic())
            self._device.notify()

    def _died(self, error: BaseException) -> None:
        """The device thread is gone: everybody who waits is told, nobody new is let in."""
        with self._device.lock:
            self._state, self._cause = "dead", error
            left = self._batcher.close()
            self._count_queue()
        for batch in self._running:
            self._executor.abandon(batch, error)
        self._running.clear()
        if left:  # while the engine starts there is neither a row nor who would settle it
            dead = Unavailable(f"the device thread died: {error!r}")
            self._executor.drop(left, DropReason.FAILED, dead)

    # --- policy -------------------------------------------------------------------------------

    def swap_policy(self, policy: Policy) -> Grid:
        """Replace the grid: validate, warm beside the old one, verify, swap between batches.

        Rows that are queued already run on the grid they were prepared for; the old one is freed
        with the last of them. Blocks until the new grid serves.

        Raises:
            ConfigError: the policy does not fit the model; the old grid keeps serving.
            ModelError: a variant failed its verification; the old grid keeps serving.
        """
        built = self._ready_parts()
        with self._swap_lock:
            swaps = partial(self.metrics.policy_swaps_total.labels, model=self.spec.name)
            try:
                runner = self.on_device(
                    partial(new_runner, built, self.config, policy, self.metrics)
                )
                steps = warm_up(
                    WarmupContext(
                        runner,
                        built.probe,
                        built.monitor,
                        self.metrics,
                        CompilePhase.BACKGROUND,
                        strict=True,
                    )
                )
                while self.on_device(partial(next, steps, None)) is not None:
                    pass  # one step at a time, between batches
            except ConfigError:
                swaps(result=SwapResult.REJECTED).inc()
                raise
            except Exception:
                swaps(result=SwapResult.FAILED).inc()
                raise
            self._built = built.with_runner(runner)
            self._preparer = self._new_preparer(self._built)
            self._policy = policy
            self.metrics.set_grid_version(self.spec.name, runner.grid.version)
            self.metrics.set_predicted_waste(self.spec.name, predicted_waste(policy))
            publish_variants(runner, self.metrics)
            swaps(result=SwapResult.APPLIED).inc()
        return runner.grid

    def _new_preparer(self, built: Built) -> Preparer:
        return Preparer(
            built.runner,
            built.dispatcher,
            built.tokenizer,
            max_rows=self.config.limits.max_rows,
            max_fallback_elements=built.runner.layout.capacity,
        )


def _one_model(config: ServeConfig | ModelConfig) -> ModelConfig:
    if isinstance(config, ModelConfig):
        return config
    if len(config.models) != 1:
        raise ConfigError(
            f"models: an engine serves one model, {len(config.models)} given; pass config.models[i]"
        )
    return config.models[0]
