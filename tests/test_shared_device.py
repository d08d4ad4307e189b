"""Several engines on one device thread: right answers, separate books, one end for all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import engines
import numpy as np
import pytest
import tiny
import torch
from test_engine import Blocked, _die, at_rest, ids, vector

from shapeserve.config import AxisPolicy, ModelConfig, ServeConfig
from shapeserve.engine import DeviceThread, Engine, Result, shared_engine
from shapeserve.errors import ConfigError, RowFailed, Unavailable
from shapeserve.metrics import Metrics
from shapeserve.warmup.probe import relative_error

BUCKETS = {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 2, 4]}}
EAGER = {"tier": "eager"}


def modules(*names: str, **settings: Any) -> list[Engine]:
    """Engines of eager modules of ``tiny`` that share metrics and a device, not started."""
    device, metrics = DeviceThread(threads=1), Metrics()
    return [
        Engine(
            engines.module_config(name, name=f"{name}-{i}", compile=EAGER, **settings),
            metrics=metrics,
            device=device,
        )
        for i, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """A text encoder and a module, both compiled."""
    directory = tiny.write_model(tmp_path_factory.mktemp("models") / "tiny")
    device, metrics = DeviceThread(threads=1), Metrics()
    configs = (
        engines.text_config(directory, name="text", policy=BUCKETS),
        engines.module_config("masked_tokens", name="tokens"),
    )
    text, tokens = (Engine(config, metrics=metrics, device=device) for config in configs)
    with text.start(), tokens.start():
        yield text, tokens


def launches(monkeypatch: pytest.MonkeyPatch, *engines_: Engine) -> list[str]:
    """The names of the engines whose batches are launched from now on."""
    log: list[str] = []

    def watch(engine: Engine) -> None:
        launch = engine.runner.launch

        def watched(*args: Any, **options: Any) -> Any:
            log.append(engine.spec.name)
            return launch(*args, **options)

        monkeypatch.setattr(engine.runner, "launch", watched)

    for engine in engines_:
        watch(engine)
    return log


# --- answers and books -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_i4_i6_i7_two_engines_answer_at_once_each_its_own_rows_in_its_own_books(
    pair: tuple[Engine, Engine],
) -> None:
    text, tokens = pair
    before = {e.spec.name: engines.value(e, "rows_total", model=e.spec.name) for e in pair}
    texts = [[tiny.text_of(3 + (7 * i + k) % 40, seed=i) for k in range(4)] for i in range(10)]
    arrays = [[{"ids": np.arange(1, 2 + (5 * i + k) % 16)} for k in range(3)] for i in range(10)]
    answers = await asyncio.gather(
        *(text.submit_many(rows) for rows in texts), *(tokens.submit_many(rows) for rows in arrays)
    )
    for rows, results in zip(texts, answers[:10], strict=True):
        for row, result in zip(rows, results, strict=True):
            (sample,) = text.prepare([row])
            row_ids = sample.rows[0].arrays.arrays["input_ids"]
            (expected,) = engines.alone(text, {"input_ids": row_ids}, {"seq": len(row_ids)})
            assert relative_error([vector(result)], [expected]) < 1e-4
    for samples, results in zip(arrays, answers[10:], strict=True):
        for sample_, result in zip(samples, results, strict=True):
            expected_ = engines.alone(tokens, sample_, {"seq": len(sample_["ids"])})
            assert isinstance(result, Result)
            assert relative_error(list(result.outputs.values()), expected_) < 1e-4
    assert at_rest(text) + at_rest(tokens) == []
    done = {e.spec.name: engines.value(e, "rows_total", model=e.spec.name) for e in pair}
    assert done == {"text": before["text"] + 40, "tokens": before["tokens"] + 30}


def test_i7_the_label_model_has_the_names_of_the_configuration_and_none(
    pair: tuple[Engine, Engine],
) -> None:
    labels = {s.labels["model"] for s in pair[0].metrics.samples() if "model" in s.labels}
    assert labels == {"text", "tokens", "none"}
    for name, bucket in (("text", "batch=4,seq=24"), ("tokens", "batch=4,seq=16")):
        series = [s for s in pair[0].metrics.samples() if s.name == "shapeserve_bucket_area"]
        assert bucket in {s.labels["bucket"] for s in series if s.labels["model"] == name}
    with pytest.raises(ValueError, match="not allowed"):
        pair[0].metrics.rows_total.labels(model="tokens", mode="compiled", bucket="batch=4,seq=24")


def test_a_row_that_fails_in_one_engine_harms_none_of_the_other() -> None:
    raising, poisonous = modules("raising", "poisonous")
    with raising.start(), poisonous.start():
        with Blocked(raising):
            bad = raising.admit_when_free(raising.prepare([ids(1, 3), ids(tiny.POISON), ids(4)]))
            good = poisonous.admit_when_free(poisonous.prepare([ids(1, 3), ids(5, 7)]))
        assert [isinstance(result, RowFailed) for result in bad()] == [False, True, False]
        assert [float(r.outputs["mean"][0]) for r in good()] == [2.0, 6.0]  # type: ignore[union-attr]
        assert engines.value(raising, "rows_dropped_total", model="raising-0") == 1
        assert engines.value(raising, "rows_dropped_total", model="poisonous-1") == 0
        assert at_rest(raising) + at_rest(poisonous) == []


def test_i2_a_compile_is_counted_for_its_own_model_only() -> None:
    device, metrics = DeviceThread(threads=1), Metrics()
    first, second = (
        Engine(engines.module_config("poisonous", name=name), metrics=metrics, device=device)
        for name in ("first", "second")
    )

    def compiles(model: str, **labels: str) -> float:
        return engines.value(first, "compiles_total", model=model, **labels)

    with first.start():
        own = compiles("first")
        assert own > 0
        with second.start():
            # One program or two: whether one row pays for its own is measured at each start.
            assert compiles("first") == own
            assert compiles("second") > 0

            def recompile() -> None:  # what a stray tensor would do, and nobody has collected
                program, _ = first.runner.programs.for_sizes({"batch": 2, "seq": 4})
                program(*(torch.ones(2, 4, dtype=torch.int32) for _ in range(2)))

            first.on_device(recompile)
            second.run([ids(1, 3)])
            assert engines.value(first, "recompiles_total") == 0
            first.run([ids(1, 3)])
            assert engines.value(first, "recompiles_total", model="first", reason="dtype") == 1
            assert engines.value(first, "recompiles_total", model="second") == 0
            assert compiles("second", phase="request") == 0
            assert at_rest(first) + at_rest(second) == []


# --- turns -------------------------------------------------------------------------------------


def test_a_lone_row_passes_the_flood_of_the_other_model(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tokens = pair
    log = launches(monkeypatch, text, tokens)
    with Blocked(text):
        flood = text.admit_when_free(text.prepare([tiny.text_of(8, seed=i) for i in range(200)]))
        lone = tokens.admit_when_free(tokens.prepare([{"ids": np.arange(1, 5)}]))
    assert len(lone()) == 1
    assert len(flood()) == 200
    assert log.count("text") >= 50
    assert log.index("tokens") <= 1


def test_i2_the_policy_of_one_is_swapped_step_by_step_under_load_of_the_other(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tokens = pair
    log = launches(monkeypatch, text)
    old, other = tokens.grid.version, text.grid.version
    on_device = tokens.on_device

    def watched(job: Callable[[], Any]) -> Any:
        def step() -> Any:
            log.append("step")
            return job()

        return on_device(step)

    monkeypatch.setattr(tokens, "on_device", watched)
    policy = {"seq": AxisPolicy(explicit=(4, 16)), "batch": AxisPolicy(explicit=(1, 2))}
    swap = threading.Thread(target=tokens.swap_policy, args=(policy,))
    rows = [tiny.text_of(8, seed=i) for i in range(400)]
    with Blocked(text):
        flood = text.admit_when_free(text.prepare(rows))
        swap.start()
        while not text._device._jobs:  # its first step waits as the flood does
            time.sleep(0.001)
    swap.join(60)
    assert len(flood()) == 400
    assert log.count("step") >= 5
    waiting = log[: len(log) - log[::-1].index("text")]  # until the last batch
    assert "step" in waiting
    assert ("step", "step") not in pairwise(waiting)
    assert tokens.grid.version != old
    assert text.grid.version == other
    swaps = [engines.value(text, "policy_swaps_total", model=m) for m in ("text", "tokens")]
    assert swaps == [0, 1]
    assert tokens.run([{"ids": np.arange(1, 6)}])[0].bucket.endswith("seq=16")
    assert engines.value(text, "recompiles_total") == 0


# --- life --------------------------------------------------------------------------------------


def test_closing_one_drains_it_and_leaves_the_other_serving() -> None:
    one, other = modules("poisonous", "poisonous")
    device = one._device
    with one.start(), other.start():
        with Blocked(one):
            flood = other.admit_when_free(other.prepare([ids(2, 4)] * 200))
            last = one.admit_when_free(one.prepare([ids(1, 3)] * 20))
            closer = threading.Thread(target=one.close, args=(30.0,))
            closer.start()
        assert len(last()) == 20
        closer.join(30)
        assert len(flood()) == 200
        for refused in (lambda: one.run([ids(1)]), lambda: one.on_device(_die)):
            with pytest.raises(Unavailable):
                refused()
        assert float(other.run([ids(3, 5)])[0].outputs["mean"][0]) == 4.0
        other.healthy()
        assert device.alive
        assert at_rest(one) + at_rest(other) == []
    assert not device.alive


def test_closing_one_without_time_fails_only_its_waiting_rows() -> None:
    one, other = modules("poisonous", "poisonous")
    with one.start(), other.start():
        with Blocked(other):
            stays = other.admit_when_free(other.prepare([ids(2, 4)] * 3))
            gone = one.admit_when_free(one.prepare([ids(1, 3)] * 3))
            one.close(0.0)
            with pytest.raises(Unavailable):
                gone()
        assert len(stays()) == 3
        assert engines.value(one, "rows_dropped_total", model="poisonous-0", reason="shutdown") == 3
        assert at_rest(one) + at_rest(other) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_i6_a_device_thread_that_dies_fails_the_rows_of_all_and_turns_all_red() -> None:
    pair = modules("poisonous", "raising")
    for engine in pair:
        engine.start()
    with Blocked(pair[0], last=_die):
        waiting = [e.admit_when_free(e.prepare([ids(1, 3)] * 3)) for e in pair]
    for engine, answers in zip(pair, waiting, strict=True):
        with pytest.raises(Unavailable, match="died"):
            answers()
        with pytest.raises(Unavailable, match="died"):
            engine.healthy()
        with pytest.raises(Unavailable):
            engine.run([ids(1)])
        assert at_rest(engine) == []
        engine.close()


def test_a_start_that_fails_or_is_closed_leaves_the_other_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, broken, closed = modules("poisonous", "padding_sensitive", "poisonous")
    with first.start():
        with pytest.raises(Exception, match="padding changes the answers"):
            broken.start()
        closed._on_progress = lambda _: setattr(closed, "_state", "closing")
        with pytest.raises(Unavailable, match="closed while it started"):
            closed.start()
        assert len(first.run([ids(1, 3)])) == 1
    assert not first._device.alive


def test_one_engine_is_not_stuck_while_the_other_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shapeserve.engine.engine.STUCK_AFTER_S", 0.0)
    first, second = modules("poisonous", "poisonous")
    seen: list[bool] = []

    def look(_: object) -> None:
        first.healthy()
        seen.append(first.ready and not second.ready)

    second._on_progress = look
    with first.start(), second.start():
        assert seen
        assert all(seen)


def test_other_threads_than_the_shared_ones_are_refused() -> None:
    device = DeviceThread(threads=1)
    config = engines.module_config("poisonous").models[0]
    with pytest.raises(ConfigError, match=r"threads: 2 asked for, but .* has 1"):
        Engine(config.model_copy(update={"threads": 2}), device=device)
    Engine(config.model_copy(update={"threads": None}), device=device).close()


def test_a_replica_has_one_device_thread_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: dict[str, DeviceThread] = {}

    def make(device: str) -> Engine:
        config = ServeConfig.from_dict(
            {"models": [tiny.module_config("poisonous", device=device, threads=1)]}
        )
        model: ModelConfig = config.models[0]
        return shared_engine(model, Metrics(), devices)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = [make(device) for device in ("cpu", "auto", "cuda", "cpu")]
    assert [e._device is devices["cpu"] for e in made] == [True, False, False, True]
    assert [e._device is devices["cuda"] for e in made] == [False, True, True, False]
    for engine in made:
        engine.close()
