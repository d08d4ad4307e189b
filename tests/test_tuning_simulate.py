import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.engine import Engine
from shapeserve.errors import ConfigError
from shapeserve.metrics import REAL
from shapeserve.traces import Traffic
from shapeserve.tuning import ROUTINGS, Formula, Outcome, Routing, Served, simulate
from shapeserve.tuning.served import _SINGLE_PAYS_FROM

UNIT = Formula(0.0, 1.0, 0.0, "a second an element")


def model(**settings: Any) -> ModelConfig:
    """Buckets 4, 8, 16 along seq, batches 1, 2, 4, unless told otherwise."""
    settings = {"compile": {"tier": "eager"}, **settings}
    config = ServeConfig.from_dict({"models": [tiny.module_config("masked_tokens", **settings)]})
    return config.models[0]


def one_size(batches: Sequence[int] = (1,), **settings: Any) -> ModelConfig:
    """Rows of one element: only the batches differ."""
    policy = {"seq": {"explicit": [1]}, "batch": {"explicit": list(batches)}}
    return model(policy=policy, **settings)


def traffic(times_s: Sequence[float], *sizes: int, axes: tuple[str, ...] = ("seq",)) -> Traffic:
    table = np.array(sizes, np.int64).reshape(len(times_s), -1)
    named = axes != ("seq",)
    return Traffic(axes, table, np.ones(len(times_s)), np.array(times_s, float), named)


# --- the same decisions as the engine


def engine_counts(
    engine: Engine, samples: Sequence[Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Queue everything while the device is held, release it; executed elements and batches."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        released.wait()

    job = engine._device.call(hold)
    held.wait()
    answers = engine.admit_when_free(engine.prepare(samples))
    released.set()
    job.result()
    answers()
    elements: dict[str, float] = {}
    batches: dict[str, float] = {}
    for sample in engine.metrics.samples():
        if sample.name == "shapeserve_tokens_total" and sample.value:
            kind = sample.labels["kind"]
            elements[kind] = elements.get(kind, 0) + sample.value
        if sample.name == "shapeserve_batches_total" and sample.value:
            label = sample.labels["bucket"]
            batches[label] = batches.get(label, 0) + sample.value
    return elements, batches


def simulated_counts(outcome: Outcome) -> tuple[dict[str, int], dict[str, int]]:
    return {kind: n for kind, n in outcome.elements.items() if n}, dict(outcome.batches)


@pytest.mark.parametrize("overhead", [0.0, 30.0], ids=["no overhead", "dear launches"])
@pytest.mark.parametrize("over_max", ["fallback", "truncate", "split"])
def test_batches_and_padding_are_those_of_the_engine(over_max: str, overhead: float) -> None:
    settings = {"rare_shapes": {"seq": {"over_max": over_max, "guard_min": 4}}}
    config = engines.module_config("masked_tokens", compile={"tier": "eager"}, **settings)
    lengths = np.random.default_rng(3).integers(1, 33, 60).tolist()
    with engines.started(config) as engine:
        engine._batcher.set_overhead(overhead)
        counts = engine_counts(engine, [{"ids": np.ones(n, np.int64)} for n in lengths])
    served = Served.from_config(model(**settings), "cpu", UNIT, overhead_elements=overhead)
    outcome = simulate(served, traffic([0.0] * 60, *lengths))
    assert simulated_counts(outcome) == counts
    assert sum(outcome.batches.values()) > 5


def test_two_axes_are_padded_as_in_the_engine() -> None:
    sizes = np.random.default_rng(4).integers(1, 9, (40, 2))
    config = engines.module_config("masked_conv", compile={"tier": "eager"})
    with engines.started(config) as engine:
        engine._batcher.set_overhead(10.0)
        samples = [{"pixels": np.ones((3, h, w), np.float32)} for h, w in sizes]
        counts = engine_counts(engine, samples)
    served = Served.from_config(config.models[0], "cpu", UNIT, overhead_elements=10.0)
    # The trace may name the axes in another order than the model.
    rows = traffic([0.0] * 40, *sizes[:, ::-1].flatten(), axes=("width", "height"))
    assert simulated_counts(simulate(served, rows)) == counts


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_texts_are_split_and_packed_as_in_the_engine(tmp_path: Path, layout: str) -> None:
    directory = tiny.write_model(tmp_path / "tiny")
    policy = {"tokens": {"explicit": [16, 48, 96]}} if layout == "packed" else {}
    config = engines.text_config(
        directory,
        layout=layout,
        policy=policy,
        compile={"tier": "eager"},
        rare_shapes={"seq": {"over_max": "split"}},
        limits={"max_batch_tokens": 96},
    )
    lengths = np.random.default_rng(5).integers(3, 49, 40).tolist()
    with engines.started(config) as engine:
        engine._batcher.set_overhead(20.0)
        counts = engine_counts(engine, [tiny.text_of(n) for n in lengths])
    served = Served.from_config(config.models[0], "cpu", UNIT, overhead_elements=20.0)
    assert simulated_counts(simulate(served, traffic([0.0] * 40, *lengths))) == counts


def test_a_row_without_a_program_of_its_own_is_padded_to_two_as_in_the_engine() -> None:
    from shapeserve.compile import variants

    assert variants._SINGLE_PAYS_FROM == _SINGLE_PAYS_FROM
    config = model(compile={"backend": "eager"})
    dear_launch = Formula(1.0, 1e-6, 0.0, "test")
    times = traffic([0.0, 9.0], 3, 20)
    outcome = simulate(Served.from_config(config, "cuda", dear_launch), times)
    assert outcome.batches == {"batch=2,seq=4": 1, "none": 1}
    assert outcome.elements == {REAL: 23, "padding_seq": 1 + 4, "padding_batch": 4 + 24}
    for device, cost in (("cuda", UNIT), ("cpu", dear_launch)):
        alone = simulate(Served.from_config(config, device, cost), times)
        assert alone.batches == {"batch=1,seq=4": 1, "none": 1}


# --- time


def test_a_queue_with_a_known_answer_waits_as_long_as_theory_says() -> None:
    """M/D/1: Poisson arrivals, one server, a constant time; the mean wait is r d / (2 (1 - r))."""
    rng = np.random.default_rng(0)
    busy, rows, groups = 0.6, 40_000, 20
    times_s = np.cumsum(rng.exponential(1 / busy, rows))
    served = Served.from_config(
        one_size(limits={"max_queue_rows": rows}), "cpu", Formula(1.0, 0.0, 0.0, "a second a batch")
    )
    outcome = simulate(served, traffic(times_s.tolist(), *[1] * rows))
    waits_s = (outcome.latencies_s - 1.0).clip(0)
    expected_s = busy / (2 * (1 - busy))
    # Waits of neighbours resemble each other: the error of the mean is that of groups in order.
    finish_s = np.maximum.accumulate(times_s - np.arange(rows)) + np.arange(1, rows + 1)
    in_order_s = finish_s - times_s - 1.0
    assert np.allclose(np.sort(in_order_s), waits_s, atol=1e-6)
    means = [part.mean() for part in np.array_split(in_order_s, groups)]
    error_s = np.std(means, ddof=1) / groups**0.5
    assert abs(waits_s.mean() - expected_s) < 3 * error_s < 0.15 * expected_s
    assert outcome.utilisation == pytest.approx(busy, abs=0.01)


def test_a_batch_is_formed_when_the_device_is_free() -> None:
    served = Served.from_config(one_size((1, 2, 4)), "cpu", Formula(1.0, 0.0, 0.0, "test"))
    outcome = simulate(served, traffic([0.0, 0.1, 0.2, 5.0], 1, 1, 1, 1))
    assert outcome.batches == {"batch=1,seq=1": 2, "batch=2,seq=1": 1}
    assert outcome.latencies_s == pytest.approx([1.0, 1.0, 1.8, 1.9])
    assert outcome.device_s == 3.0
    assert outcome.span_s == 6.0


def test_a_gpu_launches_ahead_only_what_could_not_grow() -> None:
    config = one_size((1, 2))
    ahead = Served.from_config(config, "cuda", Formula(1.0, 0.0, 0.0, "test"), min_batch=1)
    # At 0 two run and two are launched ahead, because a batch of two cannot grow; the fifth waits
    # for the device, and the sixth, which comes meanwhile, joins it.
    outcome = simulate(ahead, traffic([0.0] * 5 + [1.5], *[1] * 6))
    assert outcome.batches == {"batch=2,seq=1": 3}
    assert outcome.queue_s == pytest.approx([0, 0, 0, 0, 0.5, 2.0])
    assert outcome.latencies_s == pytest.approx([1, 1, 1.5, 2, 2, 3])


def test_rows_are_held_back_as_long_as_the_configuration_says() -> None:
    held = one_size((1, 2), batching={"batch_wait_timeout_s": 0.3})
    served = Served.from_config(held, "cpu", Formula(1.0, 0.0, 0.0, "test"))
    outcome = simulate(served, traffic([0.0, 0.1, 7.7], 1, 1, 1))
    assert outcome.batches == {"batch=1,seq=1": 1, "batch=2,seq=1": 1}
    assert outcome.latencies_s == pytest.approx([1.0, 1.1, 1.3])


def test_a_trace_can_be_played_faster() -> None:
    served = Served.from_config(one_size(), "cpu", Formula(1.0, 0.0, 0.0, "test"))
    assert simulate(served, traffic([0.0, 20.0], 1, 1)).span_s == 21.0
    assert simulate(served, traffic([0.0, 20.0], 1, 1), speed=10.0).span_s == 3.0


# --- what is counted


def test_every_row_is_answered_or_refused_and_areas_add_up() -> None:
    rng = np.random.default_rng(1)
    config = model(limits={"max_queue_rows": 8}, rare_shapes={"seq": {"over_max": "split"}})
    lengths = rng.integers(1, 60, 400)
    rows = traffic(np.cumsum(rng.exponential(9.0, 400)).tolist(), *lengths)
    outcome = simulate(Served.from_config(config, "cpu", UNIT), rows)
    assert outcome.answered + sum(outcome.refused.values()) == 400
    assert outcome.refused["queue_full"] > 0
    assert outcome.device_s == sum(outcome.elements.values())  # a second an element
    assert outcome.elements[REAL] <= lengths.sum()
    assert outcome.most_load <= 8 + 4


def test_rows_beyond_the_hard_limit_are_refused_and_fallbacks_have_a_reason() -> None:
    served = Served.from_config(model(), "cpu", UNIT)
    outcome = simulate(served, traffic([0.0, 1.0, 2.0], 5, 20, 99))
    assert outcome.refused == {"too_long": 1}
    assert outcome.fallbacks == {"over_max": 1}
    assert outcome.to_dict()["waste"]["all"] == pytest.approx(1 - 25 / (8 + 24))


def test_packed_rows_cost_the_pairs_that_attend(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "tiny")
    policy = {"tokens": {"explicit": [32]}}
    config = engines.text_config(directory, policy=policy, limits={"max_batch_tokens": 32})
    pairs = Formula(0.0, 0.0, 1.0, "a second a pair")
    outcome = simulate(Served.from_config(config.models[0], "cpu", pairs), traffic([0, 0], 5, 6))
    assert outcome.device_s == 25 + 36


# --- fleets


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_fleet_answers_every_row_once(routing: Routing) -> None:
    rng = np.random.default_rng(2)
    served = Served.from_config(model(), "cpu", UNIT)
    rows = traffic(np.cumsum(rng.exponential(0.2, 3000)).tolist(), *rng.integers(1, 17, 3000))
    outcome = simulate(served, rows, replicas=200, routing=routing)
    assert outcome.answered == 3000
    assert outcome.device_s == sum(outcome.elements.values())
    again = simulate(served, rows, replicas=200, routing=routing)
    assert again.to_dict() == outcome.to_dict()


def test_200_replicas_chosen_at_random_wait_like_as_many_queues_and_two_choices_wait_less() -> None:
    """Poisson arrivals dealt at random are Poisson arrivals of every replica: 200 times M/D/1."""
    rng = np.random.default_rng(5)
    busy, replicas, rows = 0.6, 200, 30_000
    times_s = np.cumsum(rng.exponential(1 / (busy * replicas), rows))
    served = Served.from_config(one_size(), "cpu", Formula(1.0, 0.0, 0.0, "a second a batch"))
    trace = traffic(times_s.tolist(), *[1] * rows)
    found = {name: simulate(served, trace, replicas=replicas, routing=name) for name in ROUTINGS}
    waits_s = {name: float(outcome.latencies_s.mean()) - 1.0 for name, outcome in found.items()}
    assert waits_s["random"] == pytest.approx(busy / (2 * (1 - busy)), rel=0.05)
    assert waits_s["p2c"] < waits_s["random"] / 2
    assert found["p2c"].most_load < found["random"].most_load
    # Rows of one shape stay with a replica until it has a batch more to do than another one.
    assert found["affinity"].most_load <= found["random"].most_load
    assert all(outcome.answered == rows for outcome in found.values())


def test_two_choices_wait_less_than_one_and_affinity_fills_batches() -> None:
    rng = np.random.default_rng(3)
    policy = {"seq": {"explicit": [4, 8, 12, 16]}, "batch": {"explicit": [1, 2, 4, 8]}}
    served = Served.from_config(model(policy=policy), "cpu", Formula(4.0, 1.0, 0.0, "test"))
    rows = traffic(np.cumsum(rng.exponential(0.75, 6000)).tolist(), *rng.integers(1, 17, 6000))
    found = {name: simulate(served, rows, replicas=20, routing=name) for name in ROUTINGS}
    assert found["p2c"].latency_s(99) < found["random"].latency_s(99)
    batches = {name: sum(outcome.batches.values()) for name, outcome in found.items()}
    assert batches["affinity"] < 0.9 * batches["p2c"]


def test_one_replica_more_shortens_the_queue() -> None:
    rows = traffic([0.0] * 8, *[1] * 8)
    served = Served.from_config(one_size(), "cpu", Formula(1.0, 0.0, 0.0, "test"))
    assert simulate(served, rows).latency_s(100) == 8.0
    assert simulate(served, rows, replicas=4).latency_s(100) < 8.0


def test_what_cannot_be_played_is_refused() -> None:
    served = Served.from_config(model(), "cpu", UNIT)
    histogram = Traffic(("seq",), np.array([[4]]), np.array([2.0]))
    with pytest.raises(ConfigError, match="a histogram has no times"):
        simulate(served, histogram)
    with pytest.raises(ConfigError, match="axes height, width, masked_tokens has seq"):
        simulate(served, traffic([0.0], 4, 4, axes=("height", "width")))


def test_steps_are_told_until_the_last_row() -> None:
    told: list[tuple[int, int]] = []
    served = Served.from_config(one_size(), "cpu", Formula(1.0, 0.0, 0.0, "test"))
    rows = traffic(np.arange(2500.0).tolist(), *[1] * 2500)
    simulate(served, rows, on_step=lambda *step: told.append(step))
    assert told == [(1000, 2500), (2000, 2500), (2500, 2500)]
