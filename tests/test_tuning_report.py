"""``shapeserve tune --report``: what it computes, and the file in a browser."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import BROWSER, Opened, drawn, open_page
from click.testing import CliRunner, Result

from shapeserve.cli import main
from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning import (
    ANALYTIC,
    CostPoint,
    CostTable,
    Formula,
    Request,
    Scored,
    Served,
    propose,
    simulate,
)
from shapeserve.tuning.charts import bars, corners, log_density
from shapeserve.tuning.fit import waste
from shapeserve.tuning.loads import SHARES, under_load
from shapeserve.tuning.report import render
from shapeserve.tuning.study import Study, by_number, study
from shapeserve.tuning.task import PaddedTask

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
ROWS = 600


def texts(rows: int = ROWS, seed: int = 0) -> Traffic:
    """Poisson arrivals, ten rows a second, most of them short."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.05, (rows, 1)), 128)
    times_s = np.cumsum(rng.exponential(0.1, rows))
    return Traffic(("seq",), lengths, np.ones(rows), times_s - times_s[0])


def images(rows: int = ROWS) -> Traffic:
    rng = np.random.default_rng(1)
    sizes = rng.choice([[240, 320], [320, 240], [200, 200], [77, 310]], rows)
    return Traffic(("height", "width"), sizes, np.ones(rows), np.arange(rows) / 10.0, named=True)


def studied(traffic: Traffic, request: Request | None = None) -> Study:
    request = request or Request(shapes=4)
    return study("trace.csv", "a planted note", traffic, request, propose(traffic, request))


def served(*sizes: int) -> Served:
    return Served.for_buckets({"seq": sizes}, "cpu", ANALYTIC["cpu"], max_batch_tokens=8192)


# --- what is computed


def numbers_of(request: Request, steps: list[tuple[int, int]] | None = None) -> dict[int, Scored]:
    proposal = propose(texts(), request)
    told = [] if steps is None else steps
    task = PaddedTask.of(texts(), request)
    return by_number(task, proposal, lambda *step: told.append(step))


def test_each_number_of_shapes_does_what_a_proposal_of_so_many_does() -> None:
    steps: list[tuple[int, int]] = []
    found = numbers_of(Request(shapes=5), steps)
    assert [*found] == [*range(1, 33)]
    assert steps[-1] == (64, 64)
    for number in (1, 5, 17):
        assert found[number] == propose(texts(), Request(shapes=number)).proposed
    firsts = [scored.first_half for scored in found.values()]
    assert firsts == sorted(firsts, reverse=True)


def test_no_latency_is_simulated_for_every_number() -> None:
    found = numbers_of(Request(shapes=2, objective="p99"))
    assert [*found] == [*range(1, 33)]
    assert {scored.p99_s for scored in found.values()} == {None}


def test_a_larger_number_that_was_asked_for_is_there_too() -> None:
    assert [*numbers_of(Request(shapes=40))][-2:] == [32, 40]


def test_numbers_too_small_for_the_forced_sizes_are_left_out() -> None:
    assert min(numbers_of(Request(include=(8, 24)))) == 3


def test_buckets_of_a_proposal_are_served_without_refusals_or_fallbacks() -> None:
    for traffic in (texts(), images()):
        buckets = propose(traffic, Request(shapes=2)).proposed.buckets
        cost = Formula(0.001, 1e-7, 0.0, "test")
        one = Served.for_buckets(buckets, "cpu", cost, max_batch_tokens=320 * 320)
        outcome = simulate(one, traffic)
        assert (outcome.answered, outcome.fallbacks) == (ROWS, {})
        rows = {k: n for k, n in outcome.elements.items() if k != "padding_batch"}
        assert 1 - rows["real"] / sum(rows.values()) == pytest.approx(waste(traffic, buckets))


def test_latency_rises_with_the_load_and_a_policy_that_falls_behind_has_no_point() -> None:
    policies = {"good": served(8, 16, 32, 64, 128), "bad": served(128)}
    loads = under_load(texts(), policies)
    assert loads is not None
    assert loads.recorded_per_s == pytest.approx(10.0, rel=0.15)
    good, bad = loads.points["good"], loads.points["bad"]
    assert len(good) > len(bad) > 0
    rates = [point.rows_per_s for point in good]
    assert rates == sorted(rates)
    assert rates[1] / rates[0] == pytest.approx(sorted(SHARES)[1] / sorted(SHARES)[0])
    assert good[-1].p50_s > good[0].p50_s
    assert all(point.p50_s <= point.p99_s and point.kept_up > 0.98 for point in good + bad)
    assert loads.common == bad[-1].rows_per_s
    at = {point.rows_per_s: point for point in good}
    assert at[loads.common].p50_s < bad[-1].p50_s


def test_no_load_is_begun_after_the_budget_and_the_report_says_so() -> None:
    ticks = itertools.count(0.0, 8.0)
    loads = under_load(texts(), {"default": served(64, 128)}, clock=lambda: next(ticks))
    assert loads is not None
    assert (len(loads.points["default"]), loads.left_out) == (2, len(SHARES) - 2)
    whole = studied(texts())
    found = Study(**{**vars(whole), "loads": loads})
    assert f"no time for {len(SHARES) - 2} further loads" in render(found)


def test_rows_that_all_come_at_once_have_no_load() -> None:
    traffic = Traffic(("seq",), np.full((9, 1), 5), np.ones(9), np.zeros(9))
    assert under_load(traffic, {"one": served(5)}) is None


def test_the_curve_of_lengths_holds_all_rows() -> None:
    lengths, counts = np.array([1, 2, 3, 40, 500]), np.array([10.0, 20.0, 5.0, 1.0, 4.0])
    edges, density = log_density(lengths, counts)
    assert edges == sorted(set(edges))
    shares = np.array(density) * np.diff(np.log2(edges))
    assert shares.sum() == pytest.approx(100)
    assert shares[0] == pytest.approx(25)


def test_bars_of_the_buckets_add_up_to_the_waste() -> None:
    buckets = {"seq": (*range(2, 128, 2), 128)}
    made = bars(texts(), buckets)
    assert len(made) == 41
    assert made[-1].label.endswith(" others")
    real, padding = sum(bar.real for bar in made), sum(bar.padding for bar in made)
    assert real == pytest.approx(100)
    assert padding / (real + padding) == pytest.approx(waste(texts(), buckets))
    assert sum(bar.rows for bar in made) == ROWS
    assert {label for label, *_ in bars(images(), {"height": (240, 320), "width": (320,)})} == {
        "240x320",
        "320x320",
    }


def test_corners_stand_at_all_combinations_of_sizes() -> None:
    x, y = corners(images(), {"height": (240, 320), "width": (100, 320)})
    assert list(zip(x[1::4], y[1::4], strict=True)) == [
        (100, 240),
        (320, 240),
        (100, 320),
        (320, 320),
    ]


# --- what is written


def test_a_report_of_a_histogram_has_no_latencies_and_says_why() -> None:
    traffic = Traffic(("seq",), np.array([[3], [9], [30]]), np.array([50.0, 20.0, 9.0]))
    text = render(studied(traffic))
    assert "No latencies: the traffic has no times." in text
    assert "<li>a planted note</li>" in text
    assert "p50 ms" not in text
    assert "a histogram has no order" in text


def test_a_report_without_costs_has_neither_seconds_nor_latencies_and_says_why() -> None:
    text = render(studied(images()))
    assert "Costs are not known for these axes without --costs" in text
    assert "device-s" not in text
    assert text.count('class="plotly-graph-div"') == 4


def test_a_name_of_a_trace_is_never_markup() -> None:
    evil = "</script><script>alert(1)</script>"
    whole = studied(images())
    text = render(Study(**{**vars(whole), "source": evil}))
    assert evil not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text


def test_a_proposal_that_no_policy_may_have_is_refused() -> None:
    traffic = Traffic(("seq",), np.arange(1, 1101)[:, None], np.ones(1100), np.arange(1100.0))
    with pytest.raises(ConfigError, match="more than"):
        studied(traffic, Request(shapes=520))


def test_a_report_of_packed_rows_is_about_their_batches() -> None:
    whole = studied(texts(), Request(shapes=3, layout="packed", max_batch_tokens=512))
    assert whole.judged.axes == ("tokens",)
    assert {3, 8, 32} <= set(whole.by_number)
    text = render(whole)
    assert whole.loads is not None
    assert all(whole.loads.points.values())
    assert "Batches by tokens, and where buckets end" in text
    assert "packed rows; least padding; sizes: at most 3" in text
    assert "tokens: " in text
    assert text.count('class="plotly-graph-div"') == 6


# --- the command


def tune(trace: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["tune", "--trace", str(trace), *map(str, arguments)])


def csv(traffic: Traffic, path: Path) -> Path:
    assert traffic.times_s is not None
    names = traffic.axes if traffic.named else ("len",)
    rows = zip(traffic.times_s, traffic.sizes.tolist(), strict=True)
    lines = [f"{t_s:.3f},{','.join(map(str, sizes))}" for t_s, sizes in rows]
    path.write_text("\n".join([",".join(("t_s", *names)), *lines]) + "\n")
    return path


def opened(traffic: Traffic, directory: Path, *arguments: str | Path) -> tuple[Opened, str]:
    report = directory / "report.html"
    result = tune(csv(traffic, directory / "trace.csv"), *arguments, "--report", report)
    assert result.exit_code == 0, result.output
    return open_page(report), report.read_text()


@in_a_browser
def test_a_browser_draws_every_chart_of_a_trace_of_lengths(tmp_path: Path) -> None:
    found, text = opened(texts(), tmp_path, "-k", "6")
    assert len(found.charts) == 6
    assert all(drawn(chart) > 1 for chart in found.charts)
    assert found.complaints == []
    for title in ("Rows by seq", "Today", "Proposed", "Padding against", "seconds of", "latency"):
        assert any(title in chart for chart in found.charts), title
    assert "analytic: MiniLM on two CPU cores" in text
    assert "600 rows, seq; halves by row order" in text


@in_a_browser
def test_a_browser_draws_every_chart_of_a_trace_of_images_with_costs(tmp_path: Path) -> None:
    points = tuple(
        CostPoint((("batch", 1), ("height", n), ("width", n)), 1e-7 * n * n) for n in (64, 320)
    )
    costs = tmp_path / "costs.json"
    CostTable({"model": "toy"}, ("batch", "height", "width"), points).write(costs)
    found, text = opened(images(), tmp_path, "-k", "3", "--costs", costs)
    assert len(found.charts) == 6
    assert all(drawn(chart) > 1 for chart in found.charts)
    assert found.complaints == []
    assert any("Rows by height and width" in chart for chart in found.charts)
    assert "measured: 2 batches" in text


def test_a_missing_plotly_is_said_before_the_trace_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = tune(tmp_path / "none.csv", "--report", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "pip install 'shapeserve[tune]'" in result.stderr


def test_a_report_that_cannot_be_written_exits_with_2(tmp_path: Path) -> None:
    trace = csv(texts(60), tmp_path / "trace.csv")
    result = tune(trace, "-k", "2", "--report", tmp_path / "nowhere" / "report.html")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
