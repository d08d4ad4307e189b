"""Limits on what is proposed, and proposals by latency and for packed rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeserve.cli import main
from shapeserve.config import parse_policy
from shapeserve.errors import ConfigError
from shapeserve.policy import packed_grid
from shapeserve.traces import Traffic
from shapeserve.tuning import (
    CostPoint,
    CostTable,
    Footprint,
    Formula,
    Limits,
    Outcome,
    Proposal,
    Request,
    Served,
    fit,
    propose,
    simulate,
    waste,
)
from shapeserve.tuning.packed import PackedTask
from shapeserve.tuning.stand_in import grid_of
from shapeserve.tuning.variants import SpecializedPoint, VariantCosts, VariantPoint

MIB = 2**20
COST = Formula(1e-3, 1e-5, 0.0, "test")
HUGE = Limits(10**9, 1e18, 1e9)


def sizes(batch: int, seq: int) -> tuple[tuple[str, int], ...]:
    return (("batch", batch), ("seq", seq))


def variant_costs(**changed: Any) -> VariantCosts:
    """20 s for a start, 0.1 s and 1 ms an element to verify; 10 MiB, 1 MiB for each more graph."""
    points = (
        VariantPoint(sizes(8, 128), 0.1 + 1.024, 0.5, 10 * MIB),
        VariantPoint(sizes(2, 64), 0.1 + 0.128, 0.5, 2 * MIB),
        VariantPoint(sizes(2, 8), 0.1 + 0.016, 0.5, 0),
    )
    made = VariantCosts(20.0, {"program for two rows and more": 18.0}, 2, points)
    return replace(made, **changed)


def table(variants: VariantCosts | None, axes: tuple[str, ...] = ("batch", "seq")) -> CostTable:
    points = tuple(
        CostPoint(((axes[0], n), *((axis, n) for axis in axes[1:])), COST.seconds({"x": n * n}))
        for n in (2, 8, 32)
    )
    return CostTable({"model": "toy"}, axes, points, variants=variants)


def trace(*lengths: int, every_s: float = 0.01) -> Traffic:
    times_s = every_s * np.arange(float(len(lengths)))
    return Traffic(("seq",), np.array(lengths)[:, None], np.ones(len(lengths)), times_s)


def mixed(rows: int = 400, seed: int = 0, every_s: float = 0.01) -> Traffic:
    lengths = np.random.default_rng(seed).geometric(0.05, rows).clip(1, 128)
    return trace(*lengths.tolist(), every_s=every_s)


# --- what variants take


def test_a_start_is_what_is_fixed_and_every_variant() -> None:
    costs = variant_costs()
    one = {"batch": 4, "seq": 32}
    assert costs.warmup_s([one]) == pytest.approx(20 + 0.1 + 0.128 + 0.5, rel=1e-6)
    assert costs.warmup_s([one] * 10) == pytest.approx(20 + 10 * 0.728, rel=1e-6)
    no_graphs = tuple(replace(p, capture_s=None, graph_bytes=None) for p in costs.points)
    assert variant_costs(points=no_graphs).warmup_s([one]) == pytest.approx(20.228, rel=1e-6)


def test_a_start_with_the_measured_buckets_takes_what_was_measured() -> None:
    odd = (VariantPoint(sizes(8, 128), 5.0), VariantPoint(sizes(2, 64), 0.1))
    costs = variant_costs(points=(*odd, VariantPoint(sizes(2, 8), 1.0)))
    buckets = [dict(point.sizes) for point in costs.points]
    assert costs.warmup_s(buckets) == pytest.approx(20 + 6.1)


def test_graphs_take_what_the_largest_needs_and_a_little_for_each_other() -> None:
    costs = variant_costs()
    largest, small = {"batch": 8, "seq": 128}, {"batch": 2, "seq": 8}
    assert costs.graph_bytes([largest]) == 10 * MIB
    assert costs.graph_bytes([small, largest, small]) == (10 + 1 + 1) * MIB
    half = {"batch": 4, "seq": 128}
    assert costs.graph_bytes([half]) == 5 * MIB
    alone = variant_costs(points=costs.points[:1])
    assert alone.graph_bytes([largest, small]) == 20 * MIB  # nothing is known of sharing
    none = tuple(replace(p, capture_s=None, graph_bytes=None) for p in costs.points)
    assert variant_costs(points=none).graph_bytes([largest]) is None


# --- limits


@given(
    most=st.integers(1, 60),
    shapes=st.sampled_from([None, 1, 3, 12]),
    batches=st.sampled_from([None, (1,), (2, 4), (1, 8)]),
    device=st.sampled_from(["cpu", "cuda"]),
    seed=st.integers(0, 3),
)
@settings(max_examples=15)
def test_no_proposal_has_more_variants_than_are_allowed(
    most: int, shapes: int | None, batches: Any, device: Any, seed: int
) -> None:
    request = Request(
        shapes, max_length=128, limits=Limits(most), batches=batches, device=device, cost=COST
    )
    rows = mixed(150, seed=seed)
    least = grid_of({"seq": (128,)}, device, max_batch_tokens=8192, batches=batches)
    if len(least) > most:
        with pytest.raises(ConfigError, match=rf"\(--max-variants {most}\)"):
            propose(rows, request)
        return
    proposal = propose(rows, request)
    made = proposal.proposed.buckets
    grid = grid_of(made, device, max_batch_tokens=8192, batches=batches)
    assert proposal.footprint is not None
    assert len(grid) == proposal.footprint.variants <= most


@given(mib=st.floats(5, 80), warmup_s=st.floats(20.5, 90), shapes=st.sampled_from([None, 2, 16]))
@settings(max_examples=15)
def test_no_proposal_takes_more_memory_or_seconds_than_are_allowed(
    mib: float, warmup_s: float, shapes: int | None
) -> None:
    limits = Limits(None, mib * MIB, warmup_s)
    costs = table(variant_costs())
    request = Request(shapes, max_length=128, limits=limits, cost=costs)
    least = grid_of({"seq": (128,)}, "cpu", max_batch_tokens=8192, min_batch=2)
    if limits.broken(Footprint.of(least, costs.variants)):
        with pytest.raises(ConfigError, match="even 1 row shapes would be"):
            propose(mixed(150), request)
        return
    found = propose(mixed(150), request).footprint
    assert found is not None
    assert found.graph_bytes is not None
    assert found.warmup_s is not None
    assert found.graph_bytes <= mib * MIB
    assert found.warmup_s <= warmup_s


def same(one: Proposal, other: Proposal) -> bool:
    return replace(one, slo_s=None).to_dict() == replace(other, slo_s=None).to_dict()


@pytest.mark.parametrize("objective", ["padding", "seconds", "p99"])
@pytest.mark.parametrize("shapes", [None, 5])
def test_limits_that_nothing_reaches_change_nothing(objective: Any, shapes: int | None) -> None:
    request = Request(shapes, max_length=128, objective=objective, cost=table(variant_costs()))
    rows = mixed(200)
    free = propose(rows, request)
    assert same(propose(rows, replace(request, limits=HUGE)), free)
    exact = free.footprint
    assert exact is not None
    tight = Limits(exact.variants, exact.graph_bytes, exact.warmup_s)
    assert same(propose(rows, replace(request, limits=tight)), free)


def test_limits_that_nothing_reaches_change_no_shapes_of_two_axes() -> None:
    sizes_ = np.random.default_rng(0).integers(8, 65, (200, 2))
    images = Traffic(("height", "width"), sizes_, np.ones(200), np.arange(200.0), True)
    request = Request(6, align=8)
    free = propose(images, request)
    assert same(propose(images, replace(request, limits=Limits(10**6))), free)
    fewer = propose(images, replace(request, limits=Limits(12)))
    assert fewer.footprint is not None
    assert fewer.footprint.variants <= 12
    assert fewer.proposed.shapes < free.proposed.shapes


def test_as_many_row_shapes_as_the_limit_allows_are_proposed() -> None:
    rows = mixed()
    for most in (12, 18, 30):
        found = propose(rows, Request(12, max_length=128, cost=COST, limits=Limits(most)))
        assert found.proposed.shapes == most // 6  # batches of 1, 2, 4, 8, 16 and 32 rows
        assert found.limited_from == 12
    fewer = Request(12, max_length=128, cost=COST, limits=Limits(12), batches=(4,))
    assert propose(rows, fewer).proposed.shapes == 12
    assert propose(rows, fewer).limited_from is None


def test_variants_of_one_row_are_not_counted_where_one_row_is_padded_to_two() -> None:
    request = Request(1, max_length=128, cost=table(variant_costs()))
    found = propose(mixed(), request).footprint
    assert found is not None
    assert found.variants == 5
    single = Request(1, max_length=128, cost=table(variant_costs(min_batch=1)))
    found = propose(mixed(), single).footprint
    assert found is not None
    assert found.variants == 6


@pytest.mark.parametrize(
    ("limits", "costs", "message"),
    [
        (Limits(graph_bytes=MIB), None, r"--max-graph-mb needs .* `shapeserve profile"),
        (Limits(warmup_s=5.0), None, r"--max-warmup-s needs .* `shapeserve profile"),
        (
            Limits(graph_bytes=MIB),
            variant_costs(points=(VariantPoint(sizes(2, 8), 0.1),)),
            r"--max-graph-mb: the costs are of a service without CUDA graphs",
        ),
        (Limits(warmup_s=5.0), variant_costs(), r"even 1 row shapes .* \(--max-warmup-s 5\)"),
        (Limits(graph_bytes=MIB), variant_costs(), r"even 1 .* \(--max-graph-mb 1\)"),
        (Limits(3), variant_costs(), r"even 1 row shapes would be 5 variants .* with --batch"),
    ],
)
def test_limits_that_cannot_be_kept_or_known_say_why(
    limits: Limits, costs: VariantCosts | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        propose(mixed(), Request(4, max_length=128, limits=limits, cost=table(costs)))


def test_sizes_that_must_be_buckets_are_kept_within_limits() -> None:
    request = Request(8, max_length=128, include=(24, 48), cost=COST, limits=Limits(18))
    proposal = propose(mixed(), request)
    assert proposal.proposed.buckets["seq"] == (24, 48, 128)
    with pytest.raises(ConfigError, match="even 3 row shapes would be 18 variants"):
        propose(mixed(), replace(request, limits=Limits(17)))


# --- latency

SLOW = Formula(2e-3, 1e-4, 0.0, "test")


def by_latency(**changed: Any) -> Request:
    return replace(Request(max_length=128, objective="p99", cost=SLOW), **changed)


def p99_s(rows: Traffic, buckets: Any, batches: Any = None) -> float:
    served = Served.for_buckets(buckets, "cpu", SLOW, max_batch_tokens=8192, batches=batches)
    return simulate(served, rows).latency_s(99)


def test_the_latency_is_what_the_simulator_says_of_rows_that_were_not_fitted() -> None:
    rows = mixed(200)
    proposal = propose(rows, by_latency())
    first, second = rows.halves()
    assert proposal.proposed.p99_s == p99_s(second, proposal.proposed.buckets)
    assert proposal.p99_first_half_s == p99_s(first, proposal.proposed.buckets)
    assert proposal.compared["pad_to_max"].p99_s == p99_s(second, {"seq": (128,)})
    assert proposal.compared["pad_to_max"].p99_s > proposal.proposed.p99_s
    assert proposal.proposed.load is not None
    assert 0 < proposal.proposed.load < 1


def test_no_number_of_row_shapes_that_was_tried_has_a_clearly_lower_latency() -> None:
    rows = mixed(200)
    best = propose(rows, by_latency()).p99_first_half_s
    assert best is not None
    for shapes in (1, 2, 4, 8, 16):
        other = propose(rows, Request(shapes, max_length=128, objective="seconds", cost=SLOW))
        assert best <= p99_s(rows.halves()[0], other.proposed.buckets) * 1.01


def test_a_bound_on_the_latency_asks_for_no_more_row_shapes_than_it_needs() -> None:
    rows = mixed(200)
    least = propose(rows, by_latency())
    one = propose(rows, by_latency(shapes=1))
    assert one.p99_first_half_s is not None
    assert propose(rows, by_latency(slo_s=one.p99_first_half_s)).proposed.shapes == 1
    middle = (one.p99_first_half_s + (least.p99_first_half_s or 0)) / 2
    found = propose(rows, by_latency(slo_s=middle))
    assert 1 < found.proposed.shapes <= least.proposed.shapes
    assert (found.p99_first_half_s or 1) <= middle


def test_a_bound_that_cannot_be_kept_gives_the_least_latency_and_says_so() -> None:
    rows = mixed(200)
    found = propose(rows, by_latency(slo_s=1e-6))
    assert not found.keeps_slo
    assert found.proposed.buckets == propose(rows, by_latency()).proposed.buckets
    assert propose(rows, by_latency(slo_s=100.0)).keeps_slo


def test_latency_within_limits() -> None:
    found = propose(mixed(200), by_latency(limits=Limits(12)))
    assert found.footprint is not None
    assert found.footprint.variants <= 12


def test_batch_sizes_are_chosen_where_fewer_leave_room_for_row_shapes() -> None:
    """Rows come one at a time: batches are of one row, and row shapes are what the limit is for."""
    rows = mixed(300, every_s=1.0)
    fixed = propose(rows, by_latency(limits=Limits(6)))
    assert fixed.batches is None
    assert fixed.proposed.shapes == 1
    chosen = propose(rows, by_latency(limits=Limits(6), batches="auto"))
    assert chosen.batches is not None
    assert chosen.proposed.shapes > 1
    assert (chosen.p99_first_half_s or 9) < (fixed.p99_first_half_s or 0)
    assert parse_policy(chosen.policy())["batch"].explicit == chosen.batches


def test_batch_sizes_that_are_needed_are_kept() -> None:
    burst = trace(*[16] * 200, every_s=0.0)
    chosen = propose(burst, by_latency(batches="auto", max_length=16))
    # A launch costs as much as 20 elements: full batches are what the last row waits least for.
    assert chosen.batches is None


def test_a_faster_trace_has_a_higher_latency() -> None:
    rows = mixed(200)
    slow, fast = (propose(rows, by_latency(shapes=4, speed=speed)) for speed in (1.0, 8.0))
    assert (fast.proposed.load or 0) > (slow.proposed.load or 9)
    assert (fast.proposed.p99_s or 0) > (slow.proposed.p99_s or 9)


def test_latency_of_a_histogram_is_refused() -> None:
    histogram = Traffic(("seq",), np.array([[4], [9]]), np.array([9.0, 9.0]))
    with pytest.raises(ConfigError, match=r"latency follows from them; give a trace"):
        propose(histogram, by_latency())


# --- specialising

SPECIAL = (
    SpecializedPoint(sizes(1, 16), 10.0, 0.5e-3, 1e-3),  # twice as fast
    SpecializedPoint(sizes(32, 128), 10.0, 2e-3, 1e-3),  # slower
)


def test_a_bucket_is_specialised_if_it_earns_its_compile_within_the_horizon() -> None:
    rows = trace(*[16] * 200, every_s=1.0)  # one batch of one row a second
    costs = table(variant_costs(specialized=SPECIAL, min_batch=1))
    one_s = costs.seconds({"batch": 1, "seq": 16})
    pays_from_s = 10.0 / (one_s / 2)
    for factor, pays in ((0.98, False), (1.02, True)):
        horizon_s = pays_from_s * factor
        request = Request(1, max_length=16, cost=costs, horizon_s=horizon_s)
        (found,) = propose(rows, request).specialized
        assert found.bucket == "batch=1,seq=16"
        # 100 batches of the second half within the 99 seconds between them.
        assert found.calls == pytest.approx(horizon_s * 100 / 99, rel=0.01)
        assert found.shape.dynamic_s == one_s
        assert found.pays is (found.net_s >= 0) is pays


def test_a_bucket_that_specialising_makes_slower_never_pays() -> None:
    at_once = np.repeat(np.arange(10.0), 32)
    rows = Traffic(("seq",), np.full((320, 1), 128), np.ones(320), at_once)
    costs = table(variant_costs(specialized=SPECIAL))
    (found,) = propose(rows, Request(1, max_length=128, cost=costs, horizon_s=1e12)).specialized
    assert found.bucket == "batch=32,seq=128"
    assert found.shape.break_even is None
    assert not found.pays


def test_specialising_that_was_not_measured_is_refused() -> None:
    for cost in (None, COST, table(None), table(variant_costs())):
        with pytest.raises(ConfigError, match=r"profile CONFIG\.yaml --specialized 3"):
            propose(mixed(50), Request(1, cost=cost, horizon_s=60.0))


# --- packed rows


def packed(**changed: Any) -> Request:
    return replace(
        Request(max_length=128, layout="packed", cost=SLOW, max_batch_tokens=512), **changed
    )


def tails(rows: Traffic, tokens: Any) -> Outcome:
    served = Served.for_tokens(tokens, 128, "cpu", SLOW, max_batch_tokens=512)
    return simulate(served, rows)


def test_packed_sizes_are_fitted_to_the_batches_that_the_traffic_forms() -> None:
    """Ten rows of 7 come at once, then the device rests: every batch holds 70 tokens."""
    times_s = np.repeat(np.arange(40.0), 10)
    rows = Traffic(("seq",), np.full((400, 1), 7), np.ones(400), times_s)
    proposal = propose(rows, packed(shapes=3))
    assert proposal.axes == ("seq",)
    # One batch that is a little larger than all of them is allowed for.
    assert proposal.proposed.buckets == {"tokens": (70, 71, 512)}
    assert proposal.proposed.second_half == 0


def test_what_packed_sizes_do_is_simulated() -> None:
    rows = mixed(400, every_s=0.004)
    proposal = propose(rows, packed(shapes=8))
    second = rows.halves()[1]
    outcome = tails(second, proposal.proposed.buckets["tokens"])
    assert proposal.proposed.second_half == pytest.approx(outcome.waste["padding_tokens"])
    assert proposal.proposed.device_s == pytest.approx(outcome.device_s)
    assert proposal.proposed.p99_s == outcome.latency_s(99)
    assert proposal.proposed.shapes <= 8
    assert proposal.proposed.second_half < proposal.compared["pow2"].second_half
    default = proposal.compared["default"].buckets["tokens"]
    assert len(default) == len(packed_grid({}, 512, {"seq": 128}))


def test_what_packed_sizes_for_the_second_half_would_do_is_simulated_too() -> None:
    rows, request = mixed(400, every_s=0.004), packed(shapes=4)
    task = PackedTask.of(rows, request)
    known = fit(task.second, task.rules, [4], expect_longer=False)[4].buckets
    outcome = tails(rows.halves()[1], known["tokens"])
    expected = outcome.waste["padding_tokens"]
    assert propose(rows, request).optimum_second_half == pytest.approx(expected)
    assert waste(task.second, known) != pytest.approx(expected)  # batches of other sizes


def test_large_packed_batches_are_compared_with_what_a_policy_may_be() -> None:
    proposal = propose(mixed(), packed(shapes=4, max_batch_tokens=65_536))
    assert proposal.proposed.buckets["tokens"][-1] == 65_536
    assert set(proposal.compared) == {"default", "pow2", "pad_to_max"}  # 1,024 multiples of 64


def test_a_packed_policy_is_what_a_configuration_takes() -> None:
    proposal = propose(mixed(), packed())
    policy = parse_policy(proposal.policy())
    grid = packed_grid(policy, 512, {"seq": 128})
    assert len(grid) == proposal.proposed.shapes
    assert proposal.footprint is not None
    assert proposal.footprint.variants == len(grid)


def test_packed_sizes_keep_limits_and_latency() -> None:
    found = propose(mixed(), packed(limits=Limits(3)))
    assert found.proposed.shapes <= 3
    played = propose(mixed(), packed(objective="p99", limits=Limits(4)))
    assert played.proposed.shapes <= 4
    assert played.p99_first_half_s is not None


def test_packed_rows_of_a_histogram_or_of_images_are_refused_with_the_reason() -> None:
    histogram = Traffic(("seq",), np.array([[4], [9]]), np.array([9.0, 9.0]))
    with pytest.raises(ConfigError, match="how many rows wait when the device is free"):
        propose(histogram, packed())
    images = Traffic(("height", "width"), np.full((8, 2), 9), np.ones(8), np.arange(8.0), True)
    with pytest.raises(ConfigError, match="packed rows have one axis, the trace has height, width"):
        propose(images, packed())
    with pytest.raises(ConfigError, match="--batch: a packed batch is a number of tokens"):
        propose(mixed(), packed(batches=(1, 2)))


def test_costs_along_other_axes_are_refused() -> None:
    of_tokens = CostTable({}, ("tokens",), (CostPoint((("tokens", 64),), 1.0),))
    with pytest.raises(ConfigError, match="of packed rows: tune with --layout packed"):
        propose(mixed(), Request(2, cost=of_tokens))
    with pytest.raises(ConfigError, match=r"measured along batch, seq, the batches .* tokens"):
        propose(mixed(), packed(cost=table(None)))
    frames = table(None, axes=("batch", "frames"))
    with pytest.raises(ConfigError, match=r"batch, frames, .* name the axis with --axis"):
        propose(mixed(), Request(2, cost=frames))


# --- the command


@pytest.fixture
def arrivals(tmp_path: Path) -> Path:
    rows = mixed(200)
    lines = zip((rows.times_s if rows.times_s is not None else []), rows.sizes[:, 0], strict=True)
    path = tmp_path / "trace.csv"
    path.write_text("t_s,len\n" + "".join(f"{t_s:.3f},{length}\n" for t_s, length in lines))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_tune_says_what_the_variants_take(arrivals: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    table(variant_costs()).write(costs)
    arguments = ("tune", "--trace", arrivals, "--max-length", "128", "--costs", costs)
    result = run(*arguments, "--max-variants", "20", "--max-graph-mb", "60", "--max-warmup-s", "90")
    assert result.exit_code == 0, result.output
    assert "variants: 20" in result.stdout
    assert "no more are within the limits" in result.stdout
    assert "MiB of graphs" in result.stdout
    assert "a start from an empty compile cache" in result.stdout.replace("\n", " ")


def test_tune_by_latency_shows_it_and_exits_with_1_if_the_bound_is_missed(
    arrivals: Path, tmp_path: Path
) -> None:
    out = tmp_path / "policy.yaml"
    arguments = ("tune", "--trace", arrivals, "--objective", "p99", "-k", "4", "--batch", "auto")
    result = run(*arguments, "--slo-ms", "1000", "--out", out)
    assert result.exit_code == 0, result.output
    assert "p99 ms" in result.stdout
    assert "simulated at the rate of the trace" in result.stdout.replace("\n", " ")
    missed = run(*arguments, "--slo-ms", "0.001", "--json", tmp_path / "missed.json")
    assert missed.exit_code == 1
    assert "--slo-ms 0.001: p99 of the proposal is" in missed.stderr
    details = json.loads((tmp_path / "missed.json").read_text())["details"]
    assert details["slo_s"] == pytest.approx(1e-6)
    assert details["p99_s_second_half"]["proposed"] > 0


def test_tune_says_which_buckets_earn_a_program_of_their_own(
    arrivals: Path, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    table(variant_costs(specialized=SPECIAL)).write(costs)
    arguments = ("tune", "--trace", arrivals, "-k", "2", "--costs", costs, "--speed", "2")
    result = run(*arguments, "--horizon-s", "3600", "--json", tmp_path / "tune.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "tune.json").read_text())["details"]["specialize"]
    paying = sum(each["pays"] for each in found)
    assert f"a program of its own pays for {paying} of {len(found)} buckets" in result.stdout
    assert {"break_even_calls", "net_gain_s", "calls", "compile_s"} <= set(found[0])


def test_tune_for_packed_rows_writes_a_policy_of_tokens(arrivals: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy.yaml"
    arguments = ("tune", "--trace", arrivals, "--layout", "packed", "-k", "5", "--speed", "20")
    result = run(*arguments, "--max-batch-tokens", "1024", "--out", out, "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert "tokens: " in result.stdout
    assert "tails of packed batches, simulated" in result.stdout
    assert out.read_text().splitlines()[-2] == "tokens:"
    data = json.loads(run(*arguments, "--json", "-").stdout)
    assert data["buckets"][-1] == 8192
    assert set(data["waste"]) == {"proposed", "pow2", "multiple_64", "pad_to_max"}


def test_the_device_is_that_of_the_costs(arrivals: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    made = table(None)
    replace(made, conditions={"device_kind": "cuda", "layout": "padded"}).write(costs)
    plain = ("tune", "--trace", arrivals, "-k", "2", "--json", "-")
    arguments = (*plain, "--costs", costs)

    def variants(*arguments: str | Path) -> int:
        found: int = json.loads(run(*arguments).stdout)["details"]["footprint"]["variants"]
        return found

    # Eight batch sizes by default on CUDA, six on the CPU.
    assert variants(*arguments) == variants(*plain, "--device", "cuda") > variants(*plain)
    other = run(*arguments, "--device", "cpu")
    assert other.exit_code == 2
    assert "measured for device_kind 'cuda', here it is 'cpu'" in other.stderr


BAD = {
    "slo of padding": (("--slo-ms", "5"), "use it with --objective p99"),
    "auto of padding": (("--batch", "auto"), "--batch auto chooses by latency"),
    "speed of padding": (("--speed", "2"), "--speed matters only where the trace is played"),
    "batch": (("--batch", "4,1"), "ascending numbers of rows; write 1,4,16"),
    "batch of words": (("--batch", "many"), "neither auto nor ascending numbers"),
    "unused batch": (("--batch", "1,9999"), "remove 9999"),
    "graphs unknown": (("--max-graph-mb", "5"), "shapeserve profile"),
    "warm-up unknown": (("--max-warmup-s", "5"), "shapeserve profile"),
    "special unknown": (("--horizon-s", "60"), "shapeserve profile CONFIG.yaml --specialized 3"),
    "too few": (("--max-variants", "2"), "even 1 row shapes would be 6 variants"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bounds_that_make_no_sense_exit_with_2_and_one_message(
    arguments: tuple[str, ...], message: str, arrivals: Path
) -> None:
    result = run("tune", "--trace", arrivals, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
