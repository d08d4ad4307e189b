from pathlib import Path

import numpy as np
import pytest

from shapeserve.config import parse_policy, predicted_waste
from shapeserve.errors import ConfigError
from shapeserve.policy import generate_axis
from shapeserve.traces import Traffic, read_traffic
from shapeserve.tuning import ANALYTIC, Formula, Request, Rules, fit, propose, waste
from shapeserve.tuning.fit import waste_by_axis
from shapeserve.tuning.propose import guarded

TRACES = Path(__file__).parent.parent / "benchmarks" / "data" / "traces"
ONE_AXIS = sorted(
    path.name.removesuffix(".csv.gz")
    for path in TRACES.glob("*.csv.gz")
    if len(read_traffic(path).axes) == 1
)
END = 8192


def trace(name: str) -> Traffic:
    return read_traffic(TRACES / f"{name}.csv.gz")


def lengths(*sizes: int) -> Traffic:
    times_s = np.arange(float(len(sizes)))
    return Traffic(("seq",), np.array(sizes)[:, None], np.ones(len(sizes)), times_s)


# --- what is promised for recorded traffic


@pytest.mark.parametrize("name", ONE_AXIS)
def test_eight_buckets_of_one_half_serve_the_other_nearly_as_well_as_its_own(name: str) -> None:
    proposal = propose(trace(name), Request(shapes=8, max_length=END))
    _, second = trace(name).clipped({"seq": END}).halves()
    best = fit(second, Rules({"seq": END}), [8], expect_longer=False)[8]
    unseen = proposal.proposed.second_half
    assert proposal.proposed.shapes <= 8
    assert proposal.optimum_second_half == waste(second, best.buckets)
    assert unseen - proposal.optimum_second_half <= 0.015
    assert unseen < proposal.compared["pow2"].second_half
    if name == "azure_conv_h1":
        assert unseen <= proposal.compared["pow2"].second_half / 2


@pytest.mark.parametrize("name", [n for n in ONE_AXIS if n.startswith(("azure", "mooncake"))])
def test_as_many_buckets_as_powers_of_two_waste_at_most_half(name: str) -> None:
    proposal = propose(trace(name), Request(shapes=14, max_length=END))
    assert proposal.compared["pow2"].shapes == 14
    assert proposal.proposed.second_half <= proposal.compared["pow2"].second_half / 2


@pytest.mark.parametrize("name", ["coco_val2017", "taco_phone_photos"])
def test_eight_shapes_of_images_waste_a_third_of_powers_of_two(name: str) -> None:
    proposal = propose(trace(name), Request(shapes=8))
    assert 0 <= proposal.gap < 0.1
    assert proposal.proposed.shapes <= 8
    unseen = proposal.proposed.second_half
    assert unseen < proposal.compared["pow2"].second_half / 3
    assert unseen - proposal.optimum_second_half < 0.015


# --- the proposal


def test_only_the_first_half_is_fitted() -> None:
    one = propose(lengths(*[5, 20] * 50, *[7, 30] * 50, 64), Request(shapes=3, max_length=64))
    other = propose(lengths(*[5, 20] * 50, *[9, 11] * 50, 64), Request(shapes=3, max_length=64))
    assert one.proposed.buckets == other.proposed.buckets == {"seq": (5, 20, 64)}
    assert one.proposed.first_half == other.proposed.first_half
    assert one.proposed.second_half != other.proposed.second_half


def test_longer_rows_are_clipped_and_not_dropped() -> None:
    proposal = propose(lengths(4, 100, 4, 100), Request(shapes=2, max_length=8))
    assert proposal.rows == 4
    assert proposal.proposed.buckets == {"seq": (4, 8)}
    assert proposal.proposed.second_half == 0


def test_the_maximum_is_a_bucket_although_no_row_is_so_long() -> None:
    proposal = propose(lengths(4, 4, 4, 4), Request(shapes=2, max_length=64))
    assert proposal.proposed.buckets["seq"][-1] == 64
    assert proposal.compared["pow2"].buckets == {"seq": (1, 2, 4, 8, 16, 32, 64)}
    assert proposal.compared["multiple_64"].buckets == {"seq": (64,)}


def test_powers_of_two_and_multiples_of_64_end_at_the_maximum() -> None:
    compared = propose(lengths(4, 4, 4, 4), Request(shapes=2, max_length=200)).compared
    assert compared["pow2"].buckets["seq"][-2:] == (128, 200)
    assert compared["multiple_64"].buckets["seq"] == (64, 128, 192, 200)


def test_the_number_of_buckets_stops_where_more_do_not_pay() -> None:
    rng = np.random.default_rng(0)
    three = rng.choice([16, 64, 256], 4000).tolist()
    assert propose(lengths(*three), Request(max_length=256)).proposed.shapes == 3
    spread = rng.integers(1, 257, 4000).tolist()
    proposal = propose(lengths(*spread), Request(max_length=256))
    # k even buckets waste 1 / (k + 1): the eleventh takes away 1 / (12 * 13) of it all, 0.6 %.
    assert 8 <= proposal.proposed.shapes <= 16
    assert min(proposal.curve) == 1
    assert proposal.curve[1] > proposal.curve[8]


def test_noise_does_not_ask_for_more_buckets() -> None:
    """Ten rows in each part: what more buckets gain on one part is not there on the other."""
    sizes = np.random.default_rng(1).integers(100, 111, 40).tolist()
    assert propose(lengths(*sizes), Request(max_length=110)).proposed.shapes <= 4


def test_seconds_weigh_a_long_row_more_than_padding_does() -> None:
    traffic = lengths(*[*[20] * 20, *[400] * 50, *[500] * 50] * 2)
    quadratic = Formula(0.0, 1e-9, 1.0, "test")
    by_seconds = Request(shapes=2, objective="seconds", cost=quadratic)
    # 50 rows fewer of 500 instead of 400, against 20 rows more of 400 instead of 20
    assert propose(traffic, by_seconds).proposed.buckets["seq"] == (400, 500)
    assert propose(traffic, Request(shapes=2)).proposed.buckets["seq"] == (20, 500)


def test_a_variant_that_saves_less_than_it_costs_is_left_out() -> None:
    traffic = lengths(*[10, 100] * 100)
    linear = Formula(0.0, 1e-3, 0.0, "test")
    dear = Request(shapes=2, objective="seconds", cost=linear, variant_cost_s=5.0)
    assert propose(traffic, dear).proposed.buckets["seq"] == (100,)
    cheap = Request(shapes=2, objective="seconds", cost=linear, variant_cost_s=4.0)
    assert propose(traffic, cheap).proposed.buckets["seq"] == (10, 100)


def test_device_seconds_are_those_of_full_batches() -> None:
    traffic = lengths(*[8] * 8)
    cost = Formula(1.0, 0.01, 0.0, "test")
    proposal = propose(traffic, Request(shapes=1, cost=cost))
    # 4 rows of the second half, in batches of 32 rows of 8: 1 + 32 * 8 * 0.01 s each
    assert proposal.proposed.device_s == pytest.approx(4 * (1 + 2.56) / 32)
    assert propose(traffic, Request(shapes=1)).cost_source == ANALYTIC["cpu"].source


def test_rows_that_the_guard_would_send_to_the_fallback_are_counted() -> None:
    traffic = lengths(8, 30, 100, 128)
    assert guarded(traffic, {"seq": (128,)}) == 0.5  # 8 and 30 of 128: above 0.6
    assert guarded(traffic, {"seq": (32, 128)}) == 0.0  # 8 of 32 is below guard_min
    assert propose(traffic, Request(shapes=1)).guarded == 0.0


def test_the_policy_is_what_a_configuration_takes() -> None:
    proposal = propose(lengths(4, 9, 4, 9), Request(shapes=2))
    policy = parse_policy(proposal.policy())
    assert generate_axis(policy["seq"]) == proposal.proposed.buckets["seq"]


def test_the_policy_says_what_padding_the_unseen_half_has_along_each_axis() -> None:
    sizes = np.random.default_rng(3).integers(1, 64, (64, 2))
    traffic = Traffic(("height", "width"), sizes, np.ones(64), np.arange(64.0))
    proposal = propose(traffic, Request(shapes=3))
    predicted = predicted_waste(parse_policy(proposal.policy()))
    assert set(predicted) == {"height", "width"}
    assert min(predicted.values()) > 0
    assert sum(predicted.values()) == pytest.approx(proposal.proposed.second_half, abs=1e-4)
    one = Traffic(("height", "width"), np.array([[3, 4]]), np.ones(1))
    shares = waste_by_axis(one, {"height,width": ((8, 8),)})
    assert shares == {"height": 5 * 8 / 64, "width": 3 * 4 / 64}


def test_every_step_is_told() -> None:
    told: list[tuple[int, int]] = []
    propose(lengths(4, 9, 4, 9), Request(shapes=2), on_step=lambda *step: told.append(step))
    assert told == [(1, 2), (2, 2)]
    told.clear()
    propose(lengths(*[4, 9] * 9), Request(), on_step=lambda *step: told.append(step))
    assert told[-1][0] == told[-1][1] == len(told)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(shapes=2, include=(16,), max_length=8), r"bucket of 16 .* seq ends at 8"),
        (Request(shapes=1, include=(4,)), r"1 buckets are too few: 2 sizes"),
    ],
    ids=["beyond the end", "too few"],
)
def test_a_request_that_cannot_be_met_says_why(request_: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        propose(lengths(4, 9, 4, 9), request_)


def test_too_few_rows_and_seconds_of_pixels_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows; at least 4 are needed"):
        propose(lengths(4, 9, 4), Request(shapes=1))
    images = Traffic(("height", "width"), np.full((8, 2), 9), np.ones(8))
    with pytest.raises(ConfigError, match="analytic cost is for tokens"):
        propose(images, Request(shapes=1, objective="seconds"))
