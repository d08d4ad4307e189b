"""The device thread: turns, jobs between batches, batches in flight, its end; without models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from shapeserve.engine import DeviceThread
from shapeserve.engine.device import Finish, Source, Work

PATIENCE_S = 30


class Clock:
    """The device thread's time: every batch takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("shapeserve.engine.device.time", made)
    return made


class Batches:
    """A source whose batches only note in ``log`` that they were launched and finished.

    Args:
        patient: its last batch waits until nothing is in flight, as the batcher's do.
        clock: what its batches advance.

    ``on_launch`` is called with the number of each batch.
    """

    def __init__(
        self,
        device: DeviceThread,
        name: str,
        log: list[str],
        *,
        slots: int = 1,
        patient: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.device, self.name, self.log, self.slots = device, name, log, slots
        self.waiting = self.launched = self.finished = 0
        self.deaths: list[BaseException] = []
        self._patient = patient
        self._clock = clock or Clock()
        self.on_launch: Callable[[int], None] = lambda n: None
        self.source = Source(
            next_work=self._next,
            max_in_flight=lambda: slots,
            next_wakeup=lambda: 0.0 if self.waiting else None,
            on_death=self.deaths.append,
        )
        device.join(self.source)

    def put(self, batches: int) -> None:
        with self.device.lock:
            self.waiting += batches
            self.device.notify()

    def _next(self, ahead: bool) -> Work | None:
        if ahead and self.waiting == 1 and self._patient:
            return None
        self.waiting -= 1
        return Work(self._launch, 1)

    def _launch(self) -> Finish | None:
        self.launched += 1
        self.log.append(self.name)
        self.on_launch(self.launched)
        if self.slots > 1:
            return self._finish
        self._finish()
        return None

    def _finish(self) -> None:
        self._clock.now += 1
        self.finished += 1

    def wait(self, batches: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.finished < batches:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.001)


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(threads=1)
    keeper = Batches(made, "keeper", [])  # until here the others may leave
    made.start()
    yield made
    made.leave(keeper.source, PATIENCE_S)


class Held:
    """Keeps the thread at a job while what it shall find is prepared."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._open = threading.Event()

    def __enter__(self) -> None:
        reached = threading.Event()

        def job() -> None:
            reached.set()
            self._open.wait(PATIENCE_S)

        self._device.call(job)
        reached.wait(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self._open.set()


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_flood_lets_a_lone_batch_pass_after_what_is_in_flight(
    clock: Clock, device: DeviceThread, slots: int, patient: bool
) -> None:
    log: list[str] = []
    lone, flood = (
        Batches(device, name, log, slots=slots, patient=patient, clock=clock)
        for name in ("lone", "flood")
    )
    flood.on_launch = lambda n: lone.put(1) if n % 10 == 0 else None
    flood.put(100)
    flood.wait(100)
    lone.wait(10)
    assert log == (["flood"] * 10 + ["lone"]) * 10
    for batches in (lone, flood):
        device.leave(batches.source, PATIENCE_S)


def test_batches_in_flight_stay_within_the_bound_of_whoever_launches(device: DeviceThread) -> None:
    log: list[str] = []
    sources: list[Batches] = []
    in_flight: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], None]:
        def look(_: int) -> None:
            in_flight.append((name, sum(s.launched - s.finished for s in sources)))

        return look

    for name, slots in (("one", 1), ("two", 2), ("three", 3)):
        sources.append(Batches(device, name, log, slots=slots))
        sources[-1].on_launch = note(name)
    with Held(device):
        for source in sources:
            source.put(30)
    for source in sources:
        source.wait(30)
    assert len(log) == 90
    highest = {name: max(n for who, n in in_flight if who == name) for name in ("one", "two")}
    assert highest == {"one": 1, "two": 2}
    assert max(n for _, n in in_flight) == 3  # what is launched counts


@pytest.mark.parametrize("slots", [1, 2])
def test_jobs_and_batches_that_wait_take_turns(
    clock: Clock, device: DeviceThread, slots: int
) -> None:
    log: list[str] = []
    batches = Batches(device, "batch", log, slots=slots, clock=clock)
    with Held(device):
        batches.put(8)
        jobs = [device.call(lambda: log.append("job")) for _ in range(5)]
    for job in jobs:
        job.result(PATIENCE_S)
    assert log[:10] == ["batch", "job"] * 5
    batches.wait(8)


def test_jobs_get_a_quarter_of_the_time_while_batches_wait_and_all_of_it_while_none_does(
    clock: Clock, device: DeviceThread
) -> None:
    log: list[str] = []

    def job() -> None:
        clock.now += 2
        log.append("job")

    batches = Batches(device, "batch", log, clock=clock)  # each takes a second
    with Held(device):
        batches.put(15)
        jobs = [device.call(job) for _ in range(5)]
    for each in jobs:
        each.result(PATIENCE_S)
    batches.wait(15)
    assert (
        log
        == ["batch", "job", *["batch"] * 6, "job", *["batch"] * 6, "job", *["batch"] * 2]
        + ["job"] * 2
    )


def test_a_job_for_which_no_batch_waited_owes_them_nothing(
    clock: Clock, device: DeviceThread
) -> None:
    log: list[str] = []
    batches = Batches(device, "batch", log, clock=clock)

    def long() -> None:
        clock.now += 100

    device.call(long).result(PATIENCE_S)
    while device.busy_s():
        time.sleep(0.001)
    with device.lock:
        batches.put(3)
        job = device.call(lambda: log.append("job"))
    job.result(PATIENCE_S)
    batches.wait(3)
    assert log == ["batch", "job", "batch", "batch"]


def test_a_start_that_takes_long_is_no_sign_of_a_device_that_hangs(device: DeviceThread) -> None:
    def busy() -> float:
        time.sleep(0.01)
        return device.busy_s()

    assert device.call(busy).result(PATIENCE_S) > 0
    assert device.call(busy, bounded=False).result(PATIENCE_S) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_reaches_all_even_if_one_of_them_fails_to_hear() -> None:
    device = DeviceThread()
    log: list[str] = []
    deaf = Batches(device, "deaf", log)
    object.__setattr__(deaf.source, "on_death", lambda error: 1 / 0)
    hears = Batches(device, "hears", log)
    device.start()

    def die() -> None:
        raise SystemExit("planted")

    with Held(device):
        dying: Future[None] = device.call(die)
        later = device.call(lambda: None)
    assert isinstance(dying.exception(PATIENCE_S), SystemExit)
    with pytest.raises(RuntimeError, match="died"):
        later.result(PATIENCE_S)
    device._thread.join(PATIENCE_S)
    assert [str(error) for error in hears.deaths] == ["planted"]
    for refused in (lambda: Batches(device, "late", log), device.call(die).result):
        with pytest.raises(RuntimeError, match=r"ended|not running"):
            refused()
    device.leave(deaf.source, 0)
    with pytest.raises(RuntimeError, match="ended"):
        Batches(device, "late", log)


def test_the_thread_ends_with_its_last_source_and_finishes_what_is_in_flight() -> None:
    device = DeviceThread()
    log: list[str] = []
    first, second = (Batches(device, name, log, slots=2) for name in ("first", "second"))
    device.start()
    device.start()  # each engine does so
    first.put(3)
    first.wait(3)
    device.leave(first.source, PATIENCE_S)
    first.put(1)
    second.put(3)
    second.wait(3)
    assert (device.alive, first.waiting) == (True, 1)
    second.put(50)
    device.leave(second.source, PATIENCE_S)
    assert not device.alive
    assert second.launched == second.finished
