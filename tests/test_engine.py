"""The engine from outside: order, isolation, limits, life cycle, and what it counts."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shapeserve.config import AxisPolicy, ServeConfig
from shapeserve.engine import Engine, Result
from shapeserve.engine.mail import Mail
from shapeserve.engine.prepare import _as_array
from shapeserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RowFailed,
    Unavailable,
)
from shapeserve.layout import PaddedLayout
from shapeserve.metrics import identities
from shapeserve.models.spec import TensorSpec
from shapeserve.warmup.probe import relative_error

BUCKETS = {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 2, 4]}}


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("models") / "tiny")


LAYOUTS = {"padded": BUCKETS, "packed": {"tokens": {"explicit": [16, 48, 128]}}}


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request: pytest.FixtureRequest, text_dir: Path) -> Iterator[Engine]:
    policy = LAYOUTS[request.param]
    config = engines.text_config(text_dir, layout=request.param, policy=policy)
    with engines.started(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def padded(text_dir: Path) -> Iterator[Engine]:
    with engines.started(engines.text_config(text_dir, policy=BUCKETS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokens() -> Iterator[Engine]:
    with engines.started(engines.module_config("masked_tokens")) as engine:
        yield engine


def vector(result: object) -> np.ndarray:
    return result.outputs["sentence_embedding"]  # type: ignore[attr-defined, no-any-return]


def at_rest(engine: Engine) -> list[str]:
    """Violated identities (I7), once the device thread has counted its last batch."""
    for _ in range(100):
        if not engine._unfinished():
            break
        time.sleep(0.01)
    return identities(engine.metrics.samples())


@pytest.fixture
def two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are launched while one is unfinished, as on a GPU."""
    init = PaddedLayout.__init__

    def with_two_slots(self: PaddedLayout, *args: Any) -> None:
        init(self, *args)
        self.slots = 2

    monkeypatch.setattr(PaddedLayout, "__init__", with_two_slots)


@pytest.fixture
def overlapped(text_dir: Path, two_slots: None) -> Iterator[Engine]:
    with engines.started(engines.text_config(text_dir, policy=BUCKETS)) as engine:
        yield engine


def test_i6_batches_launched_before_the_last_is_finished_keep_rows_and_order(
    overlapped: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished: list[int] = []
    launch = overlapped.runner.launch

    def watched(*args: Any, **options: Any) -> Any:
        flight = launch(*args, **options)
        unfinished.append(len(overlapped._device._flights) + 1)
        return flight

    monkeypatch.setattr(overlapped.runner, "launch", watched)
    texts = [tiny.text_of(3 + (5 * i) % 22, seed=i) for i in range(60)]
    alone = {i: vector(overlapped.run([texts[i]])[0]) for i in range(0, 60, 7)}
    results = overlapped.run(texts)
    assert max(unfinished) == 2
    for i, expected in alone.items():
        assert relative_error([vector(results[i])], [expected]) < 1e-5
    assert at_rest(overlapped) == []


@pytest.mark.usefixtures("two_slots")
def test_i6_a_batch_that_fails_while_another_is_in_flight_harms_only_its_row() -> None:
    with engines.started(engines.module_config("raising", compile={"tier": "eager"})) as engine:
        rows = [ids(*range(1, 2 + i % 9)) for i in range(40)]
        rows[17] = ids(tiny.POISON, 1)
        results = engine.run(rows, on_error="return")
        assert [i for i, r in enumerate(results) if isinstance(r, RowFailed)] == [17]
        assert at_rest(engine) == []


# --- I4, I6: answers and their order -------------------------------------------------------------


@pytest.mark.usefixtures("_share")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(3, 48), min_size=1, max_size=40))
def test_i4_i6_any_mix_of_lengths_gives_each_row_its_own_unpadded_answer(
    lengths: list[int],
) -> None:
    engine = _shared()
    texts = [tiny.text_of(n, seed=i) for i, n in enumerate(lengths)]
    for text, result in zip(texts, engine.run(texts), strict=True):
        (ids,) = engine._built.tokenizer.encode([text])  # type: ignore[union-attr]
        (expected,) = engines.alone(engine, {"input_ids": ids}, {"seq": len(ids)})
        assert relative_error([vector(result)], [expected]) < 1e-4
    assert at_rest(engine) == []
    assert engines.value(engine, "recompiles_total") == 0


_SHARED: list[Engine] = []


@pytest.fixture
def _share(engine: Engine) -> None:
    _SHARED[:] = [engine]


def _shared() -> Engine:
    """The module's engine, for hypothesis tests (they may not take fixtures of smaller scope)."""
    return _SHARED[0]


@pytest.mark.parametrize("neighbour", [3, 8, 9, 24], ids=lambda n: f"neighbour={n}")
def test_i4_a_row_does_not_depend_on_who_shares_its_batch(engine: Engine, neighbour: int) -> None:
    text = tiny.text_of(8)
    alone = vector(engine.run([text])[0])
    crowd = [tiny.text_of(neighbour, seed=i) for i in range(7)]
    together = vector(engine.run([*crowd[:3], text, *crowd[3:]])[3])
    assert relative_error([together], [alone]) < 1e-5


def test_length_equal_to_a_bucket_uses_that_bucket_with_no_seq_padding(padded: Engine) -> None:
    before = engines.value(padded, "tokens_total", kind="padding_seq")
    (result,) = padded.run([tiny.text_of(16)])
    assert result.bucket.endswith("seq=16")
    assert engines.value(padded, "tokens_total", kind="padding_seq") == before


def test_more_rows_than_the_largest_batch_come_back_in_order(engine: Engine) -> None:
    texts = [tiny.text_of(3 + i % 20, seed=i) for i in range(103)]
    many = [vector(r) for r in engine.run(texts)]
    for i in (0, 1, 50, 102):
        assert relative_error([many[i]], [vector(engine.run([texts[i]])[0])]) < 1e-5


def test_an_offline_run_puts_full_collections_off_and_back(engine: Engine) -> None:
    before = gc.get_threshold()
    during: list[int] = []

    class Text(str):
        def __len__(self) -> int:  # looked at when the row is prepared
            during.append(gc.get_threshold()[2])
            return super().__len__()

    engine.run([Text("a b c")])
    assert min(during) > 1000 * before[2]
    assert gc.get_threshold() == before


def test_i5_results_do_not_change_when_later_batches_run(engine: Engine) -> None:
    (first,) = engine.run([tiny.text_of(8)])
    kept = vector(first).copy()
    engine.run([tiny.text_of(3 + i % 20, seed=i) for i in range(40)])
    assert np.array_equal(vector(first), kept)


def test_batches_of_ten_two_ten_rows_give_the_same_vectors(engine: Engine) -> None:
    texts = [tiny.text_of(10, seed=i) for i in range(10)]
    first = engine.run(texts)
    engine.run(texts[:2])
    for a, b in zip(first, engine.run(texts), strict=True):
        assert relative_error([vector(a)], [vector(b)]) < 1e-5


def test_token_level_outputs_come_back_unpadded(tokens: Engine) -> None:
    rows = [{"ids": np.arange(1, n + 1)} for n in (1, 4, 5, 16, 7)]
    for row, result in zip(rows, tokens.run(rows), strict=True):
        n = len(row["ids"])
        assert result.outputs["tokens"].shape == (n, 8)
        expected = engines.alone(tokens, row, {"seq": n})
        assert relative_error(list(result.outputs.values()), expected) < 1e-4


def test_a_long_row_does_not_pull_short_neighbours_into_its_bucket(padded: Engine) -> None:
    results = padded.run([tiny.text_of(24)] + [tiny.text_of(4, seed=i) for i in range(3)])
    assert results[0].bucket.endswith("seq=24")
    assert all(r.bucket.endswith("seq=8") for r in results[1:])


# --- rare shapes ---------------------------------------------------------------------------------


def test_beyond_the_grid_falls_back_by_default_and_says_why(padded: Engine) -> None:
    before = engines.value(padded, "fallbacks_total", reason="over_max")
    (result,) = padded.run([tiny.text_of(30)])
    assert (result.mode, result.bucket, result.reason) == ("fallback", "none", "over_max")
    assert engines.value(padded, "fallbacks_total", reason="over_max") == before + 1
    last = padded.recent_fallbacks[-1]
    assert (last.reason, last.rows) == ("over_max", 1)


def test_length_at_the_hard_limit_runs_and_one_more_is_refused_saying_at_most(
    engine: Engine,
) -> None:
    assert engine.run([tiny.text_of(48)])[0].length == 48
    with pytest.raises(InvalidRequest, match=r"input\[1\].*49.*at most 48") as e:
        engine.run([tiny.text_of(5), tiny.text_of(49)])
    assert e.value.param == "input[1]"
    assert e.value.code == "too_long"


def test_truncation_is_done_only_when_asked_and_is_reported(engine: Engine) -> None:
    text = tiny.text_of(60)
    (prepared,) = engine.prepare([text], over_max="truncate")
    assert (prepared.length, prepared.truncated_from) == (24, 60)
    ids = prepared.rows[0].arrays.arrays["input_ids"]
    assert ids[-1] == tiny.VOCAB.index("[SEP]")


def test_a_split_row_is_answered_by_the_weighted_mean_of_its_pieces(text_dir: Path) -> None:
    config = engines.text_config(
        text_dir, policy=BUCKETS, rare_shapes={"seq": {"over_max": "split"}}
    )
    with engines.started(config) as engine:
        (result,) = engine.run([tiny.text_of(40)])
        assert result.pieces == 2
        assert np.linalg.norm(vector(result)) == pytest.approx(1.0, abs=1e-5)
        assert at_rest(engine) == []


def test_a_split_row_of_token_outputs_is_put_together_in_order() -> None:
    config = engines.module_config(
        "masked_tokens",
        rare_shapes={"seq": {"over_max": "split"}},
        limits={"max_length": 16, "hard_limit": 64},
    )
    with engines.started(config) as engine:
        (result,) = engine.run([{"ids": np.arange(1, 41)}])
        assert result.pieces == 3
        assert result.outputs["tokens"].shape == (40, 8)


def test_padding_waste_over_the_guard_goes_to_the_fallback(text_dir: Path) -> None:
    config = engines.text_config(
        text_dir,
        policy={"seq": {"explicit": [4, 24]}, "batch": {"explicit": [2]}},
        rare_shapes={"seq": {"max_padding_waste": 0.5, "guard_min": 8}},
    )
    with engines.started(config) as engine:
        short, long = engine.run([tiny.text_of(8), tiny.text_of(20)])
        assert (short.mode, short.reason) == ("fallback", "padding_waste")
        assert long.bucket == "batch=2,seq=24"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "index"),
    [
        (["the cat", ""], 1),
        (["the cat", "  \n\t"], 1),
        (["the cat", "\ud800"], 1),
        (["the cat", []], 1),
        ([[1, 2], [1, -1]], 1),
        ([[1, 2], [1, 10_000]], 1),
        ([[1, 2], [1, 2.5]], 1),
        ([[1, 2], [True, False]], 1),
        ([None], 0),
        ([[[1], [1, 2]]], 0),
        ([{"wrong": np.array([1])}], 0),
    ],
    ids=[
        "empty",
        "blank",
        "no unicode",
        "no ids",
        "negative",
        "out of vocabulary",
        "float",
        "bool",
        "none",
        "ragged",
        "name",
    ],
)
def test_bad_samples_are_refused_by_index_and_nothing_is_queued(
    engine: Engine, samples: list[object], index: int
) -> None:
    before = engines.value(engine, "rows_accepted_total")
    with pytest.raises(InvalidRequest, match=rf"input\[{index}\]") as e:
        engine.run(samples)  # type: ignore[arg-type]
    assert e.value.param == f"input[{index}]"
    assert engines.value(engine, "rows_accepted_total") == before
    assert len(engine.run(["the cat"])) == 1


def test_all_bad_rows_are_named_up_to_ten(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"input\[0\].*input\[9\].*and 2 more"):
        engine.prepare([""] * 12)


def test_no_samples_is_refused_online_and_empty_offline(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.prepare([])
    assert engine.run([]) == []


def test_arrays_of_a_wrong_rank_or_kind_name_the_input(tokens: Engine) -> None:
    for bad in (np.zeros((2, 3), int), np.array(["x"]), np.zeros(0, int)):
        with pytest.raises(InvalidRequest, match=r"input\[0\].*ids"):
            tokens.run([{"ids": bad}])
    with pytest.raises(InvalidRequest, match="takes tensors"):
        tokens.run(["text"])


# --- isolation -----------------------------------------------------------------------------------


def ids(*values: int) -> dict[str, np.ndarray]:
    return {"ids": np.array(values)}


def test_i6_a_nan_answer_fails_its_row_only_and_is_counted() -> None:
    with engines.started(engines.module_config("poisonous")) as engine:
        rows = [ids(1, 3), ids(tiny.POISON, 1), ids(5, 7)]
        good, bad, other = engine.run(rows, on_error="return")
        assert float(good.outputs["mean"][0]) == 2.0  # type: ignore[union-attr]
        assert float(other.outputs["mean"][0]) == 6.0  # type: ignore[union-attr]
        assert isinstance(bad, RowFailed)
        assert bad.param == "input[1]"
        assert engines.value(engine, "nonfinite_rows_total") == 1
        assert engines.value(engine, "rows_dropped_total", reason="failed") == 1
        assert at_rest(engine) == []


def test_i6_a_batch_that_raises_is_retried_row_by_row() -> None:
    with engines.started(engines.module_config("raising", compile={"tier": "eager"})) as engine:
        rows = [ids(1, 3), ids(tiny.POISON, 1), ids(5, 7), ids(2, 2)]
        results = engine.run(rows, on_error="return")
        assert [isinstance(r, RowFailed) for r in results] == [False, True, False, False]
        with pytest.raises(RowFailed, match="RuntimeError"):
            engine.run(rows)
        assert at_rest(engine) == []


class Blocked:
    """Keeps the device thread busy until released, and then does ``last`` there."""

    def __init__(self, engine: Engine, last: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._last = last
        self._release = threading.Event()
        self._started = threading.Event()

    def __enter__(self) -> None:
        def job() -> None:
            self._started.set()
            self._release.wait(30)
            self._last()

        self._job = self._engine._device.call(job)
        self._started.wait(30)

    def __exit__(self, *_: object) -> None:
        self._release.set()
        self._job.exception()


@pytest.mark.asyncio
async def test_i6_a_cancelled_request_leaves_the_queue_and_harms_nobody(engine: Engine) -> None:
    with Blocked(engine):
        gone = asyncio.create_task(engine.submit_many([tiny.text_of(5)] * 3))
        stays = asyncio.create_task(engine.submit(tiny.text_of(6)))
        while engine._batcher.queue_rows < 4:
            await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert engine._batcher.queue_rows == 1
    assert (await stays).length == 6
    assert engines.value(engine, "rows_dropped_total", reason="cancelled") >= 3
    assert at_rest(engine) == []


@pytest.mark.asyncio
async def test_a_deadline_that_passes_in_the_queue_drops_the_row(engine: Engine) -> None:
    with Blocked(engine):
        late = asyncio.create_task(
            engine.submit(tiny.text_of(5), deadline_s=time.monotonic() + 0.05)
        )
        fine = asyncio.create_task(engine.submit(tiny.text_of(5)))
        await asyncio.sleep(0.2)
    with pytest.raises(DeadlineExceeded):
        await late
    assert (await fine).length == 5
    assert at_rest(engine) == []


@pytest.mark.asyncio
async def test_i6_a_full_queue_refuses_with_a_hint_and_loses_nothing(text_dir: Path) -> None:
    config = engines.text_config(text_dir, policy=BUCKETS, limits={"max_queue_rows": 4})
    with engines.started(config) as engine:
        with Blocked(engine):
            waiting = asyncio.create_task(engine.submit_many([tiny.text_of(5)] * 4))
            while engine._batcher.queue_rows < 4:
                await asyncio.sleep(0.01)
            with pytest.raises(Overloaded) as e:
                await engine.submit(tiny.text_of(5))
            assert e.value.retry_after_s is not None
            assert e.value.retry_after_s >= 1
        assert len(await waiting) == 4
        assert len(engine.run([tiny.text_of(5)] * 50)) == 50  # offline waits instead
        assert at_rest(engine) == []


@pytest.mark.asyncio
async def test_three_concurrent_requests_get_their_own_rows(engine: Engine) -> None:
    lists = [[tiny.text_of(4 + i, seed=10 * k + i) for i in range(5)] for k in range(3)]
    answers = await asyncio.gather(*(engine.submit_many(texts) for texts in lists))
    for texts, results in zip(lists, answers, strict=True):
        for text, result in zip(texts, results, strict=True):
            assert relative_error([vector(result)], [vector(engine.run([text])[0])]) < 1e-5


@pytest.mark.asyncio
async def test_i6_i7_random_traffic_with_cancellations_keeps_the_books(engine: Engine) -> None:
    rng = random.Random(3)

    async def client(k: int) -> None:
        for i in range(6):
            texts = [tiny.text_of(rng.randint(3, 48), seed=i) for _ in range(rng.randint(1, 9))]
            task = asyncio.create_task(engine.submit_many(texts))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert len(await task) == len(texts)

    await asyncio.gather(*(client(k) for k in range(8)))
    assert at_rest(engine) == []
    assert engines.value(engine, "queue_rows") == 0
    assert engines.value(engine, "recompiles_total") == 0


# --- life cycle ----------------------------------------------------------------------------------


def test_close_finishes_what_is_queued_and_refuses_what_comes_later(text_dir: Path) -> None:
    engine = engines.started(engines.text_config(text_dir, policy=BUCKETS))
    answers = engine.admit_when_free(engine.prepare([tiny.text_of(5)] * 30))
    engine.close(drain_s=30)
    assert len(answers()) == 30
    with pytest.raises(Unavailable):
        engine.run([tiny.text_of(5)])
    assert at_rest(engine) == []


def test_close_without_time_fails_the_waiting_rows_instead_of_leaving_them(text_dir: Path) -> None:
    engine = engines.started(engines.text_config(text_dir, policy=BUCKETS))
    with Blocked(engine):
        answers = engine.admit_when_free(engine.prepare([tiny.text_of(5)] * 3))
        closer = threading.Thread(target=engine.close, args=(0.0,))
        closer.start()
        with pytest.raises(Unavailable):
            answers()
    closer.join(10)
    assert engines.value(engine, "rows_dropped_total", reason="shutdown") == 3
    assert at_rest(engine) == []


def _die() -> None:
    raise SystemExit("planted")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_device_thread_fails_everybody_and_turns_health_red(text_dir: Path) -> None:
    engine = engines.started(engines.text_config(text_dir, policy=BUCKETS))
    engine.healthy()
    with Blocked(engine, last=_die):
        answers = engine.admit_when_free(engine.prepare([tiny.text_of(5)] * 3))
    with pytest.raises(Unavailable, match="died"):
        answers()
    with pytest.raises(Unavailable, match="died"):
        engine.healthy()
    with pytest.raises(Unavailable):
        engine.run([tiny.text_of(5)])
    assert at_rest(engine) == []
    engine.close()


class _Exits(dict[str, np.ndarray]):
    """Arrays that end the thread which reads them: what a SystemExit in a model does."""

    def __getitem__(self, key: str) -> np.ndarray:
        raise SystemExit("planted")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_i6_a_device_thread_that_dies_in_a_batch_settles_its_rows_too(text_dir: Path) -> None:
    engine = engines.started(engines.text_config(text_dir, policy=BUCKETS))
    (sample,) = engine.prepare([tiny.text_of(5)])
    (row,) = sample.rows
    arrays = replace(row.arrays, arrays=_Exits(row.arrays.arrays))
    deadly = replace(sample, rows=(replace(row, arrays=arrays),))
    with Blocked(engine):
        doomed = engine.admit_when_free([deadly, sample])
        later = engine.admit_when_free([replace(sample)])
    for answers in (doomed, later):
        with pytest.raises(Unavailable, match="died"):
            answers()
    assert engines.value(engine, "rows_dropped_total", reason="failed") == 3
    assert at_rest(engine) == []
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_accelerator_ends_the_thread_instead_of_failing_every_row_for_ever(
    text_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    engine = engines.started(engines.text_config(text_dir, policy=BUCKETS))
    monkeypatch.setattr(engine.runner, "launch", broken)
    with pytest.raises(Unavailable, match="illegal memory access"):
        engine.run([tiny.text_of(5)] * 3)
    engine._device._thread.join(10)
    with pytest.raises(Unavailable, match="died"):
        engine.healthy()
    assert at_rest(engine) == []
    engine.close()


def test_a_factory_that_exits_ends_the_start_with_its_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny, "poisonous", _die)
    with pytest.raises(SystemExit, match="planted"):
        engines.started(engines.module_config("poisonous"))


def test_closing_an_engine_that_starts_ends_the_start(text_dir: Path) -> None:
    closers: list[threading.Thread] = []

    def close(_: object) -> None:
        if not closers:
            closers.append(threading.Thread(target=engine.close, args=(0.0,)))
            closers[0].start()
            time.sleep(0.05)

    engine = Engine(engines.text_config(text_dir, policy=BUCKETS), on_progress=close)
    with pytest.raises(Unavailable, match="closed while it started"):
        engine.start()
    closers[0].join(30)
    assert not engine.ready


def test_offline_errors_stand_in_their_place_with_their_own_index(engine: Engine) -> None:
    samples = [tiny.text_of(5), "", tiny.text_of(6), tiny.text_of(60)]
    good, empty, also, long = engine.run(samples, on_error="return")
    assert [type(x) for x in (good, also)] == [Result, Result]
    assert isinstance(empty, InvalidRequest)
    assert empty.param == "input[1]"
    assert isinstance(long, InvalidRequest)
    assert long.param == "input[3]"


def test_offline_windows_of_nothing_but_errors_end(engine: Engine) -> None:
    results = engine.run([[10**6]] * 300, on_error="return")
    assert len(results) == 300
    assert all(isinstance(r, InvalidRequest) for r in results)


@pytest.mark.parametrize(("wanted", "joined"), [("on", True), ("off", False), ("auto", False)])
def test_layers_are_joined_when_asked_and_answers_stay(
    text_dir: Path, engine: Engine, wanted: str, joined: bool
) -> None:
    compile_ = {"fuse_layers": wanted, "tier": "eager"}
    with engines.started(engines.text_config(text_dir, policy=BUCKETS, compile=compile_)) as other:
        kinds = {type(m).__name__ for m in other._ready_parts().model.module.modules()}
        assert ("Leader" in kinds) == joined
        texts = [tiny.text_of(3 + i, seed=i) for i in range(12)]
        for a, b in zip(other.run(texts), engine.run(texts), strict=True):
            assert relative_error([vector(a)], [vector(b)]) < 1e-5


def test_one_wake_up_of_a_loop_delivers_all_that_is_posted_until_it_looks() -> None:
    mail: Mail[int] = Mail()
    woken: list[object] = []

    async def receive() -> list[int]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a, **k: (woken.append(a), wake(*a, **k))[1]  # type: ignore[method-assign]
        futures = [loop.create_future() for _ in range(5)]
        futures[2].cancel()
        for i, future in enumerate(futures):
            mail.post(loop, future, i)
        return await asyncio.gather(*futures[:2], *futures[3:])

    assert asyncio.run(receive()) == [0, 1, 3, 4]
    assert len(woken) == 1
    closed = asyncio.new_event_loop()
    future = closed.create_future()
    closed.close()
    mail.post(closed, future, 1)  # nobody is left who could wait for it
    assert not future.done()


def test_a_text_of_absurd_length_is_refused_without_reading_it(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"input\[0\] has 1000000 characters") as e:
        engine.prepare(["x" * 1_000_000])
    assert e.value.code == "too_long"


@pytest.mark.parametrize(
    "bad", [np.array([0.5]), [2**40], [[1], [1, 2]]], ids=["float", "range", "ragged"]
)
def test_arrays_that_the_input_cannot_hold_are_refused_instead_of_cast(bad: object) -> None:
    spec = TensorSpec("ids", "int32", ("batch", "seq"))
    assert _as_array(bad, spec) is None


def test_a_stuck_device_thread_turns_health_red(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shapeserve.engine.engine.STUCK_AFTER_S", 0.01)
    with Blocked(engine):
        time.sleep(0.05)
        with pytest.raises(Unavailable, match="running for more than"):
            engine.healthy()
    engine.healthy()


# --- policy --------------------------------------------------------------------------------------


def test_i2_a_new_policy_is_warmed_beside_the_old_one_and_swapped(text_dir: Path) -> None:
    with engines.started(engines.text_config(text_dir, policy=BUCKETS)) as engine:
        old = engine.grid
        compiles = engines.value(engine, "compiles_total")
        grid = engine.swap_policy(
            policy := {
                "seq": AxisPolicy(explicit=(12, 24), predicted_waste=0.3),
                "batch": AxisPolicy(explicit=(1, 3)),
            }
        )
        assert engine.grid is grid
        assert engine.policy == policy
        assert engines.value(engine, "policy_predicted_waste", axis="seq") == 0.3
        assert grid.version != old.version
        assert engine.run([tiny.text_of(10)])[0].bucket.endswith("seq=12")
        assert engines.value(engine, "compiles_total") == compiles
        assert engines.value(engine, "policy_swaps_total", result="applied") == 1
        assert at_rest(engine) == []


def test_i2_a_bad_policy_is_refused_and_the_old_one_keeps_serving(engine: Engine) -> None:
    old = engine.grid
    with pytest.raises(ConfigError):
        engine.swap_policy({"seq": AxisPolicy(explicit=(8, 9999))})
    assert engine.grid is old
    assert engines.value(engine, "policy_swaps_total", result="rejected") == 1
    assert len(engine.run([tiny.text_of(10)])) == 1


@pytest.mark.asyncio
async def test_i2_traffic_during_a_swap_loses_no_request(text_dir: Path) -> None:
    with engines.started(engines.text_config(text_dir, policy=BUCKETS)) as engine:
        done = threading.Event()

        def swap() -> None:
            for sizes in ((12, 24), (8, 16, 24), (24,)):
                engine.swap_policy({"seq": AxisPolicy(explicit=sizes)})
            done.set()

        thread = threading.Thread(target=swap)
        thread.start()
        served = 0
        while not done.is_set():
            texts = [tiny.text_of(3 + (served + i) % 40) for i in range(5)]
            results = await engine.submit_many(texts)
            assert not any(isinstance(r, RowFailed) for r in results)
            served += len(results)
        thread.join()
        assert served > 0
        assert engines.value(engine, "recompiles_total") == 0
        assert at_rest(engine) == []


def test_an_engine_serves_exactly_one_model(text_dir: Path) -> None:
    two = ServeConfig.from_dict(
        {"models": [{"path": str(text_dir), "name": n} for n in ("a", "b")]}
    )
    with pytest.raises(ConfigError, match="one model"):
        Engine(two)


def test_i7_there_are_no_series_of_buckets_that_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether single rows have buckets is measured while the programs are built."""
    monkeypatch.setattr("shapeserve.warmup.programs._single_pays", lambda *_: False)
    with engines.started(engines.module_config("masked_tokens")) as engine:
        labels = {bucket.label for bucket in engine.grid.buckets}
        counted = {
            s.labels["bucket"]
            for s in engine.metrics.samples()
            if s.name == "shapeserve_bucket_area"
        }
        assert counted == labels
        assert not any(label.startswith("batch=1,") for label in labels)
