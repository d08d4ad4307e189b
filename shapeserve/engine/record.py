"""Writes the shapes of accepted rows to a file, off the request path."""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from shapeserve.config import Record
from shapeserve.metrics import Metrics, RecordResult

log = logging.getLogger("shapeserve.engine")

# What a crash loses, and how often the disk is bothered. Arbitrary.
FLUSH_S = 1.0
# Requests that may wait for a disk that hangs: 10 s of more than one replica answers. Beyond it
# rows are lost, and counted.
MAX_PENDING = 100_000

Sizes = Sequence[tuple[int, ...]]


class Recorder:
    """Appends ``t_s,AXIS,...`` lines to two files: the newer half and the older half.

    Args:
        settings: where, and how much.
        model: its name.
        axes: row axes, in the order of the sizes.
        metrics: where rows are counted that were written, or lost.
        clock: Unix time, one for all replicas of a service.

    Thread rule: :meth:`add` may be called from any thread, and neither blocks nor raises. A thread
    of its own writes; :meth:`flush` is for it, and for tests that do not start it.
    """

    def __init__(
        self,
        settings: Record,
        model: str,
        axes: Sequence[str],
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"{started}-{platform.node() or 'host'}-{os.getpid()}"
        directory = Path(settings.path) / re.sub(r"[^\w.-]", "_", model)
        self.path = directory / f"{name}.csv"
        self._old = directory / f"{name}.older.csv"
        self._half_bytes = settings.max_bytes // 2
        self._header = f"t_s,{','.join(axes)}\n".encode()
        self._clock = clock
        self._counted = metrics.recorded_rows_total
        self._model = model
        self._pending: deque[tuple[float, Sizes]] = deque()
        self._last_s = 0.0
        self._told = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shapeserve-record", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def add(self, sizes: Sizes) -> None:
        """Note rows that were accepted just now."""
        if len(self._pending) >= MAX_PENDING:
            self._counted.child(self._model, RecordResult.LOST).inc(len(sizes))
        else:
            self._pending.append((self._clock(), sizes))

    def close(self) -> None:
        """Write what is left; waits no longer than the disk may take for one write."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(2 * FLUSH_S)

    def _run(self) -> None:
        while not self._end.wait(FLUSH_S):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Write what waits; what cannot be written is lost and counted."""
        waiting = [self._pending.popleft() for _ in range(len(self._pending))]
        if not waiting:
            return
        rows = sum(len(sizes) for _, sizes in waiting)
        try:
            self._append(self._lines(waiting))
            result = RecordResult.WRITTEN
        except OSError as error:
            result = RecordResult.LOST
            if not self._told:
                log.error(
                    "rows of %s cannot be recorded (record.path): %s; requests are not touched, "
                    "and it is tried again without further words",
                    *(self._model, error),
                )
            self._told = True
        self._counted.child(self._model, result).inc(rows)

    def _lines(self, waiting: Sequence[tuple[float, Sizes]]) -> bytes:
        lines = []
        # Threads may have appended in another order than they looked at the clock, and the clock
        # may be set back; a trace never goes back.
        for time_s, sizes in sorted(waiting, key=lambda item: item[0]):
            self._last_s = max(self._last_s, time_s)
            lines += [f"{self._last_s:.3f},{','.join(map(str, row))}\n" for row in sizes]
        return "".join(lines).encode()

    def _append(self, lines: bytes) -> None:
        """Write whole lines or nothing, so that what is there can always be read."""
        # Opened each time: somebody may have moved the file away, or the disk may be back.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            start = file.tell()
            if not start or start + len(lines) <= self._half_bytes:
                self._write(file, start, lines)
                return
        os.replace(self.path, self._old)
        with self.path.open("ab", buffering=0) as file:
            self._write(file, 0, lines)

    def _write(self, file: FileIO, start: int, lines: bytes) -> None:
        left = memoryview(lines if start else self._header + lines)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(start)
            raise
