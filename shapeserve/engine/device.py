"""The device thread: the one thread that touches the model after it is loaded.

It runs jobs (warm-up steps, policy swaps) and batches. One long-lived thread, because CUDA graph
capture, library handles and OpenMP pools all belong to the thread that made them. A batch may end
in two parts, launch and finish; then the next batch is launched while the device works on this
one. A job runs only when nothing is in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

log = logging.getLogger("shapeserve.engine")

T = TypeVar("T")
Finish = Callable[[], None]
Work = Callable[[], Finish | None]
"""Runs a batch, or launches it and returns what waits for it and settles its rows."""


class DeviceThread:
    """Runs work until it is closed or dies.

    Args:
        next_work: called with the lock held, and with whether a batch is in flight; returns the
            next batch to run, or None.
        next_wakeup: called with the lock held; seconds until ``next_work`` may have something
            although nobody notifies, or None.
        max_in_flight: batches that may be launched and not finished.
        on_death: called once, without the lock, with whatever killed the thread.
        threads: CPU threads of the model; they are a property of the calling thread in OpenMP
            builds, and Dynamo guards on them, so they are set here before anything compiles.
    """

    def __init__(
        self,
        *,
        next_work: Callable[[bool], Work | None],
        max_in_flight: Callable[[], int] = lambda: 1,
        next_wakeup: Callable[[], float | None],
        on_death: Callable[[BaseException], None],
        threads: int | None,
    ) -> None:
        self.lock = threading.Condition()
        self._next_work = next_work
        self._next_wakeup = next_wakeup
        self._on_death = on_death
        self._threads = threads
        self._max_in_flight = max_in_flight
        self._flights: deque[Finish] = deque()
        self._jobs: deque[tuple[Work, Future[Any]]] = deque()
        self._closing = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="shapeserve-device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds that the current batch or job has been running, 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job`` on the device thread before the next batch."""
        future: Future[T] = Future()

        def run() -> None:
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

    def close(self, timeout_s: float) -> bool:
        """Let the thread end after its current work; return whether it did within ``timeout_s``."""
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.alive

    def _main(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            with torch.no_grad():
                self._loop()
        except BaseException as error:  # whatever it is, those who wait must be told
            log.critical("the device thread died: %r", error, exc_info=error)
            with self.lock:
                self._closing = True  # no job is taken any more
                left, self._jobs = self._jobs, deque()
            for _, future in left:
                future.set_exception(RuntimeError(f"the device thread died: {error!r}"))
            self._on_death(error)

    def _loop(self) -> None:
        flights = self._flights
        while True:
            work = self._next_step()
            if work is None:
                if not flights:
                    return
                work = flights.popleft()
            self._busy_since = time.monotonic()
            if (finish := work()) is not None:
                flights.append(finish)
            elif not flights:
                self._busy_since = None

    def _next_step(self) -> Work | None:
        """Wait for a job or a batch; None: finish the oldest batch, or end if there is none."""
        with self.lock:
            while True:
                if len(self._flights) >= self._max_in_flight():
                    return None
                work = self._take()
                if work is not None or self._flights or self._closing:
                    return work
                self.lock.wait(self._next_wakeup())

    def _take(self) -> Work | None:
        if self._jobs:
            return None if self._flights else self._jobs.popleft()[0]
        return None if self._closing else self._next_work(bool(self._flights))
