"""``shapeserve evaluate``: small modules measured through the whole command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluate_modules
import pytest
import tiny
import yaml
from browser import BROWSER, drawn, open_page
from click.testing import CliRunner, Result

from shapeserve.cli import main
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.evaluate.account import account
from shapeserve.evaluate.request import Served
from shapeserve.evaluate.result import Arm, Evaluation, Row, Scope
from shapeserve.evaluate.session import Options, evaluate
from shapeserve.evaluate.timing import Timing
from shapeserve.traces import read_shapes

QUICK = Timing(least=2, most=3, budget_s=0)
VALUES = {
    "inputs": {"values": {"dtype": "float32", "dims": ["batch", "seq", 4]}},
    "outputs": {"doubled": {"dtype": "float32", "dims": ["batch", "seq", 4]}},
    "policy": {"seq": {"explicit": [4, 8]}, "batch": {"explicit": [2, 4]}},
    "threads": 1,
}


def odd(name: str, **settings: Any) -> ModelConfig:
    """One of the modules made for these tests."""
    compile_ = {"backend": "eager", **settings.pop("compile", {})}
    data = {"import": f"evaluate_modules:{name}", **VALUES, "compile": compile_, **settings}
    return ServeConfig.from_dict({"models": [data]}).models[0]


def measured(
    config: ModelConfig, grid: str, report: Callable[..., None] | None = None
) -> Evaluation:
    return evaluate(config, Options(grid, timing=QUICK), report or (lambda *_: None))


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    return tiny.module_config("masked_tokens", threads=1, compile={"backend": "eager"})


@pytest.fixture(scope="module")
def outcome(toy: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The command, run once on two buckets with all its outputs."""
    directory = tmp_path_factory.mktemp("evaluate")
    config, rows = directory / "toy.yaml", directory / "rows.csv"
    config.write_text(yaml.safe_dump({"models": [toy]}))
    rows.write_text("tokens,count\n3,90\n4,5\n13,5\n")
    arguments = ["evaluate", config, "--grid", "2x4,4x16", "--lengths", rows]
    arguments += ["--report", directory / "report.html", "--json", directory / "result.json"]
    return CliRunner().invoke(main, [str(argument) for argument in arguments]), directory


@pytest.fixture(scope="module")
def data(outcome: tuple[Result, Path]) -> dict[str, Any]:
    result, directory = outcome
    assert result.exit_code == 0, result.output
    (model,) = json.loads((directory / "result.json").read_text())["models"]
    return dict(model)


def test_every_bucket_is_run_in_every_way(data: dict[str, Any]) -> None:
    assert data["buckets"] == ["batch=2,seq=4", "batch=4,seq=16"]
    ways = [(row["scope"], row["arm"]) for row in data["rows"] if row["bucket"] == "batch=2,seq=4"]
    assert ways == [
        ("module", "eager"),
        ("module", "compiled"),
        ("module", "specialized"),
        ("request", "eager"),
        ("request", "compiled"),
    ]


def test_every_steady_state_number_has_its_first_call_beside_it(data: dict[str, Any]) -> None:
    for row in data["rows"]:
        assert row["error"] is None
        latency = row["latency"]
        assert min(latency["first_s"], latency["median_s"], latency["p99_s"]) > 0
        assert latency["calls"] >= QUICK.least
    by_way = {(row["scope"], row["arm"]): row["latency"] for row in data["rows"]}
    program = data["start"]["programs"]["program for two rows and more"]
    assert by_way["module", "compiled"]["first_s"] == program["seconds"]
    assert by_way["request", "compiled"]["first_s"] > data["start"]["seconds"]


def test_compiles_are_counted_and_none_happens_while_calls_are_timed(data: dict[str, Any]) -> None:
    for row in data["rows"]:
        if row["arm"] in ("compiled", "specialized"):
            programs = 2 if row["scope"] == "request" else 1  # a start makes that for one row too
            assert (row["compile"]["graphs"], row["compile"]["graph_breaks"]) == (programs, 0)
            assert row["recompiles"] == 0


def test_answers_are_compared_with_float64_and_every_row_counts(data: dict[str, Any]) -> None:
    for row in data["rows"]:
        found = row["numerics"]
        assert found["reference"] == "float64"
        assert found["rows"] == int(row["bucket"].split("=")[1].split(",")[0])
        assert 0 < found["error"] < found["tolerance"]


def test_the_profile_names_operators_and_memory(data: dict[str, Any]) -> None:
    profiles = [row["kernels"] for row in data["rows"] if row["scope"] == "module"]
    for profile in profiles:
        assert profile["platform"] == "cpu"
        assert profile["kernels"] > 0
        assert profile["peak_bytes"] > 0
        assert any("scaled_dot_product" in name for name, *_ in profile["longest"])


def test_recorded_rows_weigh_the_buckets_and_price_the_padding(data: dict[str, Any]) -> None:
    # 95 rows in calls of two, 5 in calls of four.
    assert data["traffic"]["shares"]["batch=2,seq=4"] == pytest.approx(47.5 / 48.75)
    assert data["amortization"]["padding"]["shapes"] == 3
    assert data["amortization"]["padding"]["waste"] > 0


def test_the_terminal_shows_tables_and_sentences(outcome: tuple[Result, Path]) -> None:
    text = outcome[0].stdout
    cells = [line.split() for line in text.splitlines()]
    assert [c[:3] for c in cells if c[:3] == ["batch=4,seq=16", "module", "specialized"]]
    assert "2 of 9 buckets measured" in text
    assert "Calls are weighed by the recorded rows." in text
    assert "evaluating: module" in outcome[0].stderr


# --- the report in a browser


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed to open the report")
def test_a_browser_draws_every_chart_of_the_report(outcome: tuple[Result, Path]) -> None:
    opened = open_page(outcome[1] / "report.html")
    assert len(opened.charts) == 6
    for chart in opened.charts:
        assert 'class="main-svg"' in chart
        assert drawn(chart) > 1
    assert opened.complaints == []


# --- what goes wrong


def test_a_failed_measurement_is_in_its_row_and_the_others_go_on() -> None:
    def report(done: int, total: int, what: str) -> None:
        evaluate_modules.FAILS["now"] = what == "module batch=2,seq=4"

    found = measured(odd("failing", compile={"tier": "eager"}), "2x4,4x8", report)
    assert {(row.bucket, row.scope) for row in found.errors} == {("batch=2,seq=4", Scope.MODULE)}
    (failed,) = found.errors
    assert failed.error == "RuntimeError: planted failure"
    assert failed.latency is None
    other = found.row("batch=4,seq=8", Arm.EAGER, Scope.MODULE)
    assert other is not None
    assert other.latency is not None


def test_a_request_that_fails_is_in_its_row() -> None:
    def report(done: int, total: int, what: str) -> None:
        evaluate_modules.FAILS["now"] = what == "requests batch=2,seq=4"

    found = measured(odd("failing", compile={"tier": "eager"}), "2x4,4x8", report)
    (failed,) = found.errors
    assert (failed.bucket, failed.scope) == ("batch=2,seq=4", Scope.REQUEST)
    assert "RowFailed" in str(failed.error)


def test_a_failed_measurement_ends_with_exit_code_1_after_the_report(
    toy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({"models": [toy]}))
    real = measured(odd("failing", compile={"tier": "eager"}), "2x4")
    failed = Row("batch=2,seq=4", Arm.COMPILED, Scope.MODULE, error="RuntimeError: planted")

    def fake(*_: Any) -> Evaluation:
        return replace(real, rows=(*real.rows, failed))

    monkeypatch.setattr("shapeserve.evaluate.session.evaluate", fake)
    target = tmp_path / "result.json"
    arguments = ["evaluate", str(tmp_path / "toy.yaml"), "--json", str(target)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "1 measurements failed: batch=2,seq=4 compiled module: RuntimeError" in result.stderr
    assert json.loads(target.read_text())["models"][0]["rows"][-1]["error"]


def test_a_bucket_that_is_not_there_ends_with_exit_code_2(
    toy: dict[str, Any], tmp_path: Path
) -> None:
    toy = {**toy, "compile": {"tier": "eager"}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({"models": [toy]}))
    result = CliRunner().invoke(main, ["evaluate", str(tmp_path / "toy.yaml"), "--grid", "3x3"])
    assert result.exit_code == 2
    assert "--grid 3x3: the grid has no such bucket (batch x seq)" in result.stderr


def test_a_bucket_that_is_not_there_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_: Any) -> None:
        raise AssertionError("the compiler is loaded")

    monkeypatch.setattr("shapeserve.evaluate.session.first_compile_s", too_late)
    with pytest.raises(ConfigError, match="no such bucket"):
        measured(odd("broken"), "3x3")


# --- other models


def test_requests_to_a_bucket_that_was_not_captured_are_called_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where the tier says graph and the captures have failed."""

    def meant(served: Served) -> Arm:
        return Arm.CAPTURED if served.engine.runner.programs.compiles else Arm.EAGER

    monkeypatch.setattr(Served, "arm", property(meant))
    found = measured(odd("broken"), "2x4")
    ways = [row.arm for row in found.rows if row.scope is Scope.REQUEST]
    assert ways == [Arm.EAGER, Arm.COMPILED]
    assert account(found).serving is Arm.COMPILED


def test_an_eager_model_is_measured_and_nothing_is_earned_back() -> None:
    found = measured(odd("failing", compile={"tier": "eager"}), "2x4")
    assert [(row.arm, row.scope) for row in found.rows] == [
        (Arm.EAGER, Scope.MODULE),
        (Arm.EAGER, Scope.REQUEST),
    ]
    assert account(found).compiling == ()


def test_graph_breaks_are_counted_and_priced() -> None:
    found = measured(odd("broken"), "2x4")
    assert found.errors == ()
    (program,) = found.start.programs.values()
    # Torch counts one in a called function for its callers too.
    assert program.graphs >= 2
    assert program.graph_breaks >= 1
    row = found.row("batch=2,seq=4", Arm.SPECIALIZED, Scope.MODULE)
    assert row is not None
    assert row.compile is not None
    assert row.compile.graph_breaks >= 1
    breaks = account(found).breaks
    assert breaks is not None
    # More than the module's own: the casts around it are graphs too, once it is broken.
    assert breaks.breaks >= 1
    compiled = found.row("batch=2,seq=4", Arm.COMPILED, Scope.MODULE)
    assert compiled is not None
    assert compiled.kernels is not None
    assert compiled.kernels.graphs_run == breaks.breaks + 1


def test_the_reference_is_float32_where_float64_does_not_run() -> None:
    found = measured(odd("single_precision", compile={"tier": "eager"}), "2x4")
    numerics = [row.numerics for row in found.rows]
    assert {n.reference for n in numerics if n} == {"float32"}


def test_half_precision_is_compared_with_the_unrounded_model(toy: dict[str, Any]) -> None:
    config = {**toy, "dtype": "bfloat16", "compile": {"tier": "eager"}}
    found = measured(ServeConfig.from_dict({"models": [config]}).models[0], "2x4")
    (module, request) = (row.numerics for row in found.rows)
    assert module is not None
    assert request is not None
    assert module.reference == "float64"
    assert 1e-4 < module.error < module.tolerance == request.tolerance


def test_packed_rows_fill_a_bucket_and_run_there(tmp_path: Path) -> None:
    model = {
        "path": str(tiny.write_model(tmp_path / "tiny")),
        "layout": "packed",
        "threads": 1,
        "compile": {"tier": "eager"},
        "policy": {"tokens": {"explicit": [32, 64]}},
        "limits": {"max_length": 16, "hard_limit": 16},
    }
    config = ServeConfig.from_dict({"models": [model]}).models[0]
    lengths = tmp_path / "rows.csv"
    lengths.write_text("tokens,count\n4,9\n")
    recorded = read_shapes(lengths)
    found = evaluate(config, Options("64", recorded, QUICK), lambda *_: None)
    assert found.errors == ()
    assert {row.numerics.rows for row in found.rows if row.numerics} == {4}
    assert [row.note for row in found.rows] == [None] * 2
    assert found.traffic.shares == {"tokens=64": 1.0}


def test_the_compile_cache_of_an_evaluation_is_its_own(toy: dict[str, Any]) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    seen: set[str | None] = set()

    def report(*_: Any) -> None:
        seen.add(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))

    measured(odd("failing", compile={"tier": "eager"}), "2x4", report)
    assert before not in seen
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert not any(Path(str(path)).exists() for path in seen)


# --- generated code: minutes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_minilm_is_measured_with_its_generated_kernels(minilm_dir: Path) -> None:
    policy = {"seq": {"explicit": [16, 64]}, "batch": {"explicit": [1, 4]}}
    model = {"path": str(minilm_dir), "policy": policy, "limits": {"max_length": 64}, "threads": 1}
    config = ServeConfig.from_dict({"models": [model]}).models[0]
    found = measured(config, "4x16,4x64")
    assert found.errors == ()
    for bucket in found.buckets:
        for arm in (Arm.COMPILED, Arm.SPECIALIZED):
            row = found.row(bucket, arm, Scope.MODULE)
            assert row is not None
            assert row.kernels is not None
            assert row.compile is not None
            assert sum(row.kernels.generated.values()) > 0
            assert row.compile.generated_kernels
            assert row.numerics is not None
            assert row.numerics.error < 1e-5
        special = found.row(bucket, Arm.SPECIALIZED, Scope.MODULE)
        assert special is not None
        assert special.compile is not None
        assert special.compile.bytes_moved
    assert account(found).fusion
