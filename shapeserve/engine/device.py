"""The device thread: the one thread that touches the models of a device after they are loaded.

It runs jobs (warm-up steps, policy swaps) and the batches of one engine or several, which are its
*sources*; :class:`~shapeserve.turns.Turns` says whose batch is next. One long-lived thread, because
CUDA graph capture, library handles and OpenMP pools all belong to the thread that made them, and
because nothing may run on a device while a graph is captured there.

A batch may end in two parts, launch and finish; then the next batch, of whichever source, is
launched while the device works on this one. A job runs only when nothing is in flight. While
batches wait, jobs get a quarter of the time: after each one a batch has its turn, and batches have
three times as long as the job took: whoever swaps a policy under load waits, requests do not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shapeserve.turns import Turns

log = logging.getLogger("shapeserve.engine")

T = TypeVar("T")
Finish = Callable[[], None]
Step = Callable[[], Finish | None]

# While batches wait, they have so many seconds for each second of a job. Arbitrary: a job that
# verifies one bucket of MiniLM takes 0.3 s on a CPU, ten batches; turn by turn, a replica that was
# busy for 40 % of the time fell behind by a minute while 72 of them were verified.
_BATCH_SECONDS_PER_JOB_SECOND = 3.0


@dataclass(frozen=True, slots=True)
class Work:
    """A batch that has left its queue.

    Attributes:
        run: runs it, or launches it and returns what waits for it and settles its rows.
        cost: padded elements that it executes.
    """

    run: Step
    cost: int


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where batches come from: one engine.

    Attributes:
        next_work: called with the lock held when it is this source's turn, and with whether a
            batch is in flight; returns the next batch, or None if it can wait until none is.
        max_in_flight: batches on the device, of whatever source, with which this one may launch
            another is one less than this; 1 without overlap.
        next_wakeup: called with the lock held; seconds until ``next_work`` has something although
            nobody notifies: 0 now, None never.
        on_death: called once, without the lock, with whatever killed the thread.
    """

    next_work: Callable[[bool], Work | None]
    max_in_flight: Callable[[], int]
    next_wakeup: Callable[[], float | None]
    on_death: Callable[[BaseException], None]


class DeviceThread:
    """Runs the work of its sources until the last of them leaves, or until it dies.

    Args:
        threads: CPU threads of the models; they are a property of the calling thread in OpenMP
            builds, and Dynamo guards on them, so they are set here before anything compiles and
            are the same for all sources. None: torch's own.

    Thread rule: any thread; ``lock`` guards the queues of all its sources.
    """

    def __init__(self, *, threads: int | None = None) -> None:
        self.lock = threading.Condition()
        self.threads = threads
        self._sources: list[Source] = []
        self._turns: Turns[Source] = Turns()
        self._flights: deque[Finish] = deque()
        self._jobs: deque[tuple[Step, Future[Any]]] = deque()
        self._after_job = False  # and no batch has run since
        self._owed_s = 0.0  # what batches may have before the next job
        self._closing = False
        self._busy_since: float | None = None
        self._done_s = 0.0  # when the last batch was done
        self._thread = threading.Thread(target=self._main, name="shapeserve-device", daemon=True)

    def join(self, source: Source) -> None:
        """Take the batches of ``source`` from now on.

        Raises:
            RuntimeError: the thread has ended.
        """
        with self.lock:
            if self._closing:
                raise RuntimeError("the device thread has ended; make a new DeviceThread")
            self._sources.append(source)
            self._turns.join(source)

    def leave(self, source: Source, timeout_s: float) -> None:
        """Take no more batches of ``source``; with the last source the thread ends.

        Waits for that for up to ``timeout_s``.
        """
        with self.lock:
            if source in self._sources:
                self._sources.remove(source)
                self._turns.leave(source)
            last = not self._sources
            self._closing = self._closing or last
            self.lock.notify_all()
        if last and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        with self.lock:
            if self._thread.ident is None:
                self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds that the current batch or bounded job has been running, 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def call(self, job: Callable[[], T], *, bounded: bool = True) -> Future[T]:
        """Run ``job`` on the device thread; while batches wait, when it is the jobs' turn again.

        Args:
            job: what to run.
            bounded: whether it must end soon. The start of an engine may compile for minutes and
                is no sign of a device that hangs.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not bounded:
                self._busy_since = None
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise  # SystemExit and its like end the thread, and everybody is told

        with self.lock:
            if self._closing or not self.alive:
                future.set_exception(RuntimeError("the device thread is not running"))
                return future
            self._jobs.append((run, future))
            self.lock.notify_all()
        return future

    def notify(self) -> None:
        """Say that there may be work; the lock must be held."""
        self.lock.notify_all()

    # --- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            if self.threads:
                torch.set_num_threads(self.threads)
            with torch.no_grad():
                self._loop()
        except BaseException as error:  # whatever it is, those who wait must be told
            log.critical("the device thread died: %r", error, exc_info=error)
            self._tell_all(error)

    def _tell_all(self, error: BaseException) -> None:
        with self.lock:
            self._closing = True  # no job is taken any more
            left, self._jobs = self._jobs, deque()
            sources = tuple(self._sources)
        for _, future in left:
            future.set_exception(RuntimeError(f"the device thread died: {error!r}"))
        for source in sources:
            try:
                source.on_death(error)
            except Exception:  # the others must hear of it too
                log.exception("an engine could not be told that its device thread died")

    def _loop(self) -> None:
        flights = self._flights
        while True:
            step = self._next_step()
            if step is None:
                if not flights:
                    return
                step = flights.popleft()
            self._busy_since = time.monotonic()
            if (finish := step()) is not None:
                flights.append(finish)
            elif not flights:
                self._busy_since = None

    def _next_step(self) -> Step | None:
        """Wait for a job or a batch; None: finish the oldest batch, or end if there is none."""
        with self.lock:
            while True:
                ready, wakeup_s = self._ready()
                step = self._take(ready)
                if step is not None or self._flights or self._closing:
                    return step
                self.lock.wait(wakeup_s)

    def _ready(self) -> tuple[list[Source], float | None]:
        """Return the sources that have a batch, and the seconds until another one has."""
        ready: list[Source] = []
        soonest_s: float | None = None
        for source in self._sources:
            seconds = source.next_wakeup()
            if seconds is None:
                continue
            if seconds <= 0:
                ready.append(source)
            if soonest_s is None or seconds < soonest_s:
                soonest_s = seconds
        return ready, soonest_s

    def _take(self, ready: list[Source]) -> Step | None:
        """Return the next job, or the batch of the source whose turn it is.

        That source may have to wait until the oldest batch is done; then all do, else a stream of
        batches of another one could keep it waiting for ever.
        """
        if self._jobs and not (ready and (self._after_job or self._owed_s > 0)):
            if self._flights:
                return None
            return partial(self._run_job, self._jobs.popleft()[0])
        source = self._turns.next(ready)
        if source is None or self._closing or len(self._flights) >= source.max_in_flight():
            return None
        work = source.next_work(bool(self._flights))
        if work is None:
            return None
        self._after_job = False
        return partial(self._run, source, work, self._turns.take(source, work.cost))

    def _run_job(self, job: Step) -> None:
        started_s = time.monotonic()
        job()
        with self.lock:
            self._after_job = True
            waited_s = time.monotonic() - started_s if self._ready()[0] else 0.0
            self._owed_s = _BATCH_SECONDS_PER_JOB_SECOND * waited_s

    def _run(self, source: Source, work: Work, charge_s: float) -> Finish | None:
        started_s = time.monotonic()

        def done() -> None:
            now = time.monotonic()
            seconds = now - max(started_s, self._done_s)  # beside another batch is not its own
            self._done_s = now
            with self.lock:
                self._owed_s -= seconds
                self._turns.done(source, work.cost, charge_s, seconds)

        def finish_and_done(finish: Finish) -> None:
            finish()
            done()

        finish = work.run()
        if finish is not None:
            return partial(finish_and_done, finish)
        done()
        return None
