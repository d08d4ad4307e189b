"""``shapeserve profile``: small models measured through the whole command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import yaml
from click.testing import CliRunner, Result

from shapeserve.buckets import Bucket, Grid
from shapeserve.cli import main
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.evaluate.timing import Timing
from shapeserve.policy import default_policy, grid_for
from shapeserve.profile.bench import BatchBench
from shapeserve.profile.choice import choose, costliest
from shapeserve.profile.session import Options, profile
from shapeserve.traces import read_shapes
from shapeserve.tuning import CostTable, Formula

QUICK = Timing(least=2, most=3, budget_s=0)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def nothing(*_: object) -> None:
    pass


def toy(**settings: Any) -> dict[str, Any]:
    compile_ = {"backend": "eager", **settings.pop("compile", {})}
    return tiny.module_config("masked_tokens", threads=1, compile=compile_, **settings)


def model(data: dict[str, Any]) -> ModelConfig:
    return ServeConfig.from_dict({"models": [data]}).models[0]


# --- which buckets


def grid() -> Grid:
    ends = {"seq": 256}
    policy = default_policy(ends, "cpu")
    return grid_for(("batch", "seq"), policy, device="cpu", max_batch_tokens=8192, max_sizes=ends)


def test_the_corners_of_the_grid_are_always_measured_and_fitted() -> None:
    fitted = choose(grid(), 8).fitted
    labels = {bucket.label for bucket in fitted}
    assert {"batch=1,seq=8", "batch=32,seq=256", "batch=1,seq=256", "batch=32,seq=8"} <= labels


@pytest.mark.parametrize("points", [4, 5, 8, 16, 1000])
def test_no_more_buckets_than_asked_for_are_chosen_and_none_twice(points: int) -> None:
    choice = choose(grid(), points)
    both = [*choice.fitted, *choice.held_out]
    assert len(set(both)) == len(both) == min(points, len(grid()))
    assert len(choice.fitted) >= 4
    assert bool(choice.held_out) == (points > 4)


def test_chosen_buckets_are_spread_over_the_whole_grid() -> None:
    """Every bucket is near a measured one: at most a factor of 2 along each axis, in the mean."""
    choice = choose(grid(), 16)
    for bucket in grid().buckets:
        near = min(
            max(max(a / b, b / a) for (_, a), (_, b) in zip(bucket.sizes, c.sizes, strict=True))
            for c in (*choice.fitted, *choice.held_out)
        )
        assert near <= 2.5


def test_the_costliest_buckets_are_those_of_the_most_seconds_not_of_the_longest_calls() -> None:
    buckets = [Bucket((("batch", 1), ("seq", size))) for size in (8, 64, 256)]
    cost = Formula(0.0, 1.0, 0.0, "test")
    even = {bucket.label: 1 / 3 for bucket in buckets}
    assert costliest(buckets, even, cost, 2) == [buckets[2], buckets[1]]
    busy = {"batch=1,seq=8": 0.9, "batch=1,seq=64": 0.09, "batch=1,seq=256": 0.01}
    assert costliest(buckets, busy, cost, 1) == [buckets[0]]


# --- the command


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The command, run once with everything on."""
    directory = tmp_path_factory.mktemp("profile")
    rows = directory / "rows.csv"
    rows.write_text("tokens,count\n3,100\n12,1\n")
    other = toy(name="other", compile={"tier": "eager"})
    config = directory / "service.yaml"
    policy = {"seq": {"explicit": [4, 8, 16]}, "batch": {"explicit": [2, 4, 8]}}
    config.write_text(yaml.safe_dump({"models": [toy(name="toy", policy=policy), other]}))
    out = directory / "costs.json"
    result = run(
        *("profile", config, "--model-name", "toy", "--out", out, "--points", "8"),
        *("--specialized", "1", "--lengths", rows, "--json", directory / "again.json"),
    )
    return result, out


def test_profile_writes_a_cost_table_that_tune_and_simulate_read(
    measured: tuple[Result, Path],
) -> None:
    result, out = measured
    assert result.exit_code == 0, result.output
    table = CostTable.read(out)
    assert table.axes == ("batch", "seq")
    assert len(table.points) == 8
    assert json.loads((out.parent / "again.json").read_text()) == json.loads(out.read_text())
    assert table.seconds({"batch": 4, "seq": 16}) > 0
    assert all(point.peak_bytes for point in table.points)


def test_profile_states_its_conditions_and_the_error_at_batches_it_had_not_fitted(
    measured: tuple[Result, Path],
) -> None:
    result, out = measured
    table = CostTable.read(out)
    stated = {"model": "toy", "dtype": "float32", "layout": "padded", "tier": "compiled"}
    assert stated.items() <= table.conditions.items()
    assert {"device", "torch", "shapeserve", "threads"} <= set(table.conditions)
    assert table.held_out is not None
    assert len(table.held_out.sizes) == 2
    fitted = [p for p in table.points if p.sizes not in table.held_out.sizes]
    unseen = [p for p in table.points if p.sizes in table.held_out.sizes]
    again = CostTable(table.conditions, table.axes, tuple(fitted)).check(unseen)
    assert again.worst_error == pytest.approx(table.held_out.worst_error)
    assert f"{table.held_out.worst_error:.1%} (worst)" in result.stdout
    assert table.fingerprint in result.stdout


def test_profile_measures_every_variant_of_the_start(measured: tuple[Result, Path]) -> None:
    result, out = measured
    costs = CostTable.read(out).variants
    assert costs is not None
    assert len(costs.points) == 9
    assert costs.min_batch == 2
    assert all(p.verify_s > 0 and p.graph_bytes is None for p in costs.points)
    assert [*costs.compile_s] == ["program for two rows and more"]
    assert costs.fixed_s > sum(costs.compile_s.values())
    assert f"verified: {len(costs.points)} variants" in result.stdout


def test_the_bucket_that_recorded_rows_keep_busiest_is_specialised(
    measured: tuple[Result, Path],
) -> None:
    costs = CostTable.read(measured[1]).variants
    assert costs is not None
    (special,) = costs.specialized
    assert dict(special.sizes)["seq"] == 4
    assert special.compile_s > 0 < special.specialized_s
    assert special.shared_s > 0


def test_a_table_with_everything_survives_its_file(
    measured: tuple[Result, Path], tmp_path: Path
) -> None:
    table = CostTable.read(measured[1])
    table.write(tmp_path / "again.json")
    assert CostTable.read(tmp_path / "again.json") == table


def test_batches_are_timed_as_they_serve_not_by_an_eager_stand_in() -> None:
    with engines.started(engines.module_config("masked_tokens")) as engine:
        bench = BatchBench(engine.runner, engine.probe, QUICK)
        loads = engine.on_device(lambda: bench.loads(engine.grid.buckets[-1:]))
        ran: list[str] = []
        execute = engine.runner.execute

        def watched(*args: Any, **keywords: Any) -> Any:
            done = execute(*args, **keywords)
            ran.append(f"{done.mode} {done.bucket}")
            return done

        engine.runner.execute = watched  # type: ignore[method-assign]
        while engine.on_device(lambda: bench.round(loads)):
            pass
        label = engine.grid.buckets[-1].label
        assert ran == [f"compiled {label}"] * 3  # the first is not counted
        assert engines.value(engine, "recompiles_total") == 0


def test_packed_batches_are_measured_with_short_rows_and_with_long_ones(tmp_path: Path) -> None:
    data = {
        "path": str(tiny.write_model(tmp_path / "tiny")),
        "layout": "packed",
        "compile": {"tier": "eager"},
        "threads": 1,
        "policy": {"tokens": {"explicit": [8, 16, 32, 64]}},
        "limits": {"max_batch_tokens": 64},
    }
    table = profile(model(data), Options(points=8, timing=QUICK), nothing)
    assert table.axes == ("tokens",)
    assert table.conditions["layout"] == "packed"
    assert table.variants is not None
    assert table.variants.min_batch == 1
    assert table.held_out is not None
    assert len(table.held_out.sizes) == 2  # one bucket, with short rows and with long ones
    by_size: dict[int, list[float]] = {}
    for point in table.points:
        assert point.pairs is not None
        by_size.setdefault(dict(point.sizes)["tokens"], []).append(point.pairs)
    assert set(by_size) == {8, 16, 32, 64}
    assert by_size[64] == [24**2 + 24**2 + 16**2, 16 * 4**2]
    few, many = (table.seconds({"tokens": 64}, pairs) for pairs in by_size[64])
    assert {few, many} == {p.seconds for p in table.points if p.sizes == (("tokens", 64),)}


BAD = {
    "no out": (("service.yaml",), "Missing option '--out'"),
    "neither": (("--out", "c.json"), "give either CONFIG.yaml or --model DIR"),
    "few points": (("service.yaml", "--out", "c.json", "--points", "3"), "3 is not in the range"),
    "lengths alone": (
        ("service.yaml", "--out", "c.json", "--lengths", "rows.csv"),
        "add --specialized N",
    ),
    "which": (("service.yaml", "--out", "c.json"), "--model-name not given: 2 models match"),
    "out": (
        ("service.yaml", "--model-name", "a", "--out", "none/c.json"),
        "--out none/c.json: cannot be written",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_of_profile_exits_with_2_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = [toy(name="a"), toy(name="b")]
    (tmp_path / "service.yaml").write_text(yaml.safe_dump({"models": models}))
    result = run("profile", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_help_of_profile_has_examples() -> None:
    assert "Examples:\n" in run("profile", "--help").stdout


def test_recorded_rows_along_other_axes_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("t_s,height,width\n0,4,4\n")
    options = Options(points=4, specialized=1, recorded=read_shapes(rows), timing=QUICK)
    with pytest.raises(ConfigError, match="height, width"):
        profile(model(toy()), options, nothing)
