import json
import math
from pathlib import Path

import pytest

from shapeserve.errors import ConfigError
from shapeserve.tuning import ANALYTIC, CostPoint, CostTable, Formula
from shapeserve.tuning.cost import row_seconds

TRUE = Formula(2e-3, 1e-5, 4e-9, "true")
CONDITIONS = {"model": "tiny", "device": "cpu", "torch": "2.13"}


def table(noise: float = 0.0, axes: tuple[str, str] = ("batch", "seq")) -> CostTable:
    points = []
    for i, batch in enumerate((1, 4, 16)):
        for j, size in enumerate((16, 64, 256)):
            sizes = {axes[0]: batch, axes[1]: size}
            off = 1 + noise * (-1) ** (i + j)
            points.append(
                CostPoint(tuple(sizes.items()), TRUE.seconds(sizes) * off, 1000 + 8 * batch * size)
            )
    return CostTable(CONDITIONS, axes, tuple(points))


def test_an_analytic_cost_is_launch_plus_elements_plus_pairs() -> None:
    cost = Formula(1.0, 0.1, 0.01, "test")
    assert cost.seconds({"batch": 2, "seq": 3}) == pytest.approx(1 + 0.6 + 0.01 * 2 * 9)
    assert cost.seconds({"batch": 2, "height": 3, "width": 2}) == pytest.approx(1 + 1.2 + 0.01 * 72)
    assert cost.seconds({"tokens": 12}) == pytest.approx(1 + 1.2)
    assert cost.seconds({"tokens": 12}, pairs=50) == pytest.approx(1 + 1.2 + 0.5)
    assert cost.overhead_elements == 10
    assert Formula(1.0, 0.0, 0.0, "launches only").overhead_elements == math.inf
    assert Formula(0.0, 0.0, 1.0, "pairs only").overhead_elements == 0


def test_the_analytic_costs_are_near_what_was_measured() -> None:
    cpu, cuda = ANALYTIC["cpu"], ANALYTIC["cuda"]
    for batch, seq, measured_s in ((8, 16, 0.016), (32, 16, 0.051), (32, 40, 0.127)):
        assert cpu.seconds({"batch": batch, "seq": seq}) == pytest.approx(measured_s, rel=0.1)
    for batch, seq, measured_s in ((2, 16, 0.21e-3), (32, 128, 0.57e-3)):
        assert cuda.seconds({"batch": batch, "seq": seq}) == pytest.approx(measured_s, rel=0.1)
    assert all(cost.source.startswith("analytic") for cost in ANALYTIC.values())


def test_a_row_shares_the_launch_of_the_largest_batch_that_it_can_be_in() -> None:
    cost = Formula(1.0, 0.0, 0.0, "test")
    assert row_seconds(cost, 16, 8192) == 1 / 32
    assert row_seconds(cost, 1000, 8192) == 1 / 8
    assert row_seconds(cost, 1500, 8192) == 1 / 4  # 5 would fit, batches are powers of two
    assert row_seconds(cost, 9000, 8192) == 1


def test_the_fit_finds_the_formula_behind_exact_points() -> None:
    formula = table().formula
    assert formula.launch_s == pytest.approx(TRUE.launch_s)
    assert formula.linear_s == pytest.approx(TRUE.linear_s)
    assert formula.quadratic_s == pytest.approx(TRUE.quadratic_s)
    assert table().errors == pytest.approx((0.0, 0.0), abs=1e-9)
    between = {"batch": 3, "seq": 100}
    assert table().seconds(between) == pytest.approx(TRUE.seconds(between))


def test_factors_are_never_negative() -> None:
    falling = [CostPoint((("batch", 1), ("seq", n)), 1.0 / n) for n in (1, 2, 4, 8)]
    formula = CostTable({}, ("batch", "seq"), tuple(falling)).formula
    assert min(formula.launch_s, formula.linear_s, formula.quadratic_s) >= 0


def test_a_measured_batch_costs_what_was_measured_and_one_between_lies_between() -> None:
    noisy = table(noise=0.1)
    for point in noisy.points:
        assert noisy.seconds(dict(point.sizes)) == pytest.approx(point.seconds)
    between = {"batch": 2, "seq": 32}
    assert noisy.seconds(between) == pytest.approx(TRUE.seconds(between), rel=0.1)
    assert 0.03 < noisy.errors[0] <= noisy.errors[1] < 0.2
    assert "9 batches, fitted within" in noisy.source


def test_memory_is_interpolated_and_unknown_where_it_was_not_measured() -> None:
    assert table().peak_bytes({"batch": 2, "seq": 50}) == pytest.approx(1000 + 800, rel=0.01)
    point = CostPoint((("batch", 1), ("seq", 8)), 0.1)
    assert CostTable({}, ("batch", "seq"), (point,)).peak_bytes({"batch": 1, "seq": 8}) is None


def test_packed_batches_are_measured_by_tokens() -> None:
    points = tuple(CostPoint((("tokens", n),), 1.0 + n) for n in (16, 256, 4096))
    packed = CostTable({}, ("tokens",), points)
    assert packed.seconds({"tokens": 1000}) == pytest.approx(1001, rel=0.01)


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table(noise=0.1).write(path)
    assert CostTable.read(path) == table(noise=0.1)


def test_the_fingerprint_follows_conditions_and_axes_but_not_the_numbers() -> None:
    assert table().fingerprint == table(noise=0.2).fingerprint
    assert table().fingerprint != table(axes=("batch", "frames")).fingerprint
    other = CostTable({**CONDITIONS, "torch": "2.14"}, table().axes, table().points)
    assert table().fingerprint != other.fingerprint


def test_a_table_without_the_later_parts_is_still_read() -> None:
    data = table().to_dict()
    assert set(data) == {"version", "fingerprint", "conditions", "axes", "points"}
    assert set(data["points"][0]) == {"sizes", "seconds", "bytes"}
    assert CostTable.from_dict(data).variants is None


def packed_points(noise: float = 0.0) -> list[CostPoint]:
    """Batches of rows of 16 and of 256 tokens."""
    points = []
    for i, tokens in enumerate((256, 1024, 4096)):
        for length in (16, 256):
            pairs = float(tokens * length)
            seconds = TRUE.seconds({"tokens": tokens}, pairs) * (1 + noise * (-1) ** i)
            points.append(CostPoint((("tokens", tokens),), seconds, None, pairs))
    return points


def test_packed_batches_of_short_and_long_rows_give_what_a_pair_costs() -> None:
    packed = CostTable({}, ("tokens",), tuple(packed_points()))
    assert packed.formula.quadratic_s == pytest.approx(TRUE.quadratic_s, rel=1e-6)
    for tokens, length in ((512, 64), (2048, 128), (4096, 16)):
        pairs = float(tokens * length)
        expected = TRUE.seconds({"tokens": tokens}, pairs)
        assert packed.seconds({"tokens": tokens}, pairs) == pytest.approx(expected, rel=1e-6)
    typical = packed.seconds({"tokens": 1024})
    least, most = (packed.seconds({"tokens": 1024}, 1024.0 * n) for n in (16, 256))
    assert least < typical < most


def test_a_measured_packed_batch_costs_what_was_measured() -> None:
    points = packed_points(noise=0.1)
    packed = CostTable({}, ("tokens",), tuple(points))
    for point in points:
        assert packed.seconds(dict(point.sizes), point.pairs) == pytest.approx(point.seconds)


def test_the_error_at_held_out_batches_is_that_of_a_table_without_them() -> None:
    noisy = table(noise=0.1)
    known = CostTable(CONDITIONS, noisy.axes, noisy.points[:6])
    found = known.check(noisy.points[6:])
    off = [abs(known.seconds(dict(p.sizes)) / p.seconds - 1) for p in noisy.points[6:]]
    assert found.worst_error == pytest.approx(max(off))
    assert found.sizes == tuple(p.sizes for p in noisy.points[6:])
    held = CostTable(CONDITIONS, noisy.axes, noisy.points, held_out=found)
    assert f"{found.worst_error:.1%} (worst) at 3 held out" in held.source
    assert CostTable.from_dict(held.to_dict()) == held


BAD = {
    "no json": (lambda d: "{", r"costs.json: cannot be read"),
    "no points": (lambda d: {**d, "points": []}, r"points"),
    "unknown key": (lambda d: {**d, "more": 1}, r"more"),
    "negative seconds": (
        lambda d: {**d, "points": [{"sizes": {"batch": 1, "seq": 1}, "seconds": -1.0}]},
        r"points\[0\].seconds: got -1.0",
    ),
    "variant without seconds": (
        lambda d: {
            **d,
            "variants": {
                "fixed_s": 1.0,
                "compile_s": {},
                "min_batch": 1,
                "points": [{"sizes": {"batch": 1, "seq": 1}, "verify_s": 0.0}],
            },
        },
        r"variants.points\[0\].verify_s: got 0.0",
    ),
    "other axes": (
        lambda d: {**d, "points": [{"sizes": {"tokens": 1}, "seconds": 1.0}]},
        r"tokens=1 was measured, but the table has the axes batch, seq",
    ),
    "edited": (
        lambda d: {**d, "conditions": {"model": "another"}},
        r"fingerprint '\w+' is not that of its conditions and axes, \w+; measure again",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_with_what_is_wrong(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "costs.json"
    data = change(table().to_dict())
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        CostTable.read(path)
