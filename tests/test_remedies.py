"""Remedies in a service: islands, custom operators, decompositions; and the debug switches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import remedy_modules
import tiny
import torch
from test_cli import FakeService, run, started, toy  # noqa: F401 - fixtures

from shapeserve.compile.debug import keep_artefacts
from shapeserve.compile.decompose import decomposing, load_decompositions
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.engine import Engine
from shapeserve.engine.build import _capturable
from shapeserve.engine.modules import prepare
from shapeserve.errors import ConfigError, ModelError
from shapeserve.metrics import Tier
from shapeserve.models import load
from shapeserve.warmup.probe import relative_error

ROWS = [{"ids": np.arange(1, 1 + length)} for length in (3, 8, 20, 40)]


def config(name: str, **compile_: Any) -> ModelConfig:
    data = remedy_modules.config(name, **{"backend": "eager", **compile_})
    return ServeConfig.from_dict({"models": [data]}).models[0]


def assert_answers_are_the_eager_ones(engine: Engine) -> None:
    for row, result in zip(ROWS, engine.run(ROWS), strict=True):
        expected = engines.alone(engine, row, {"seq": len(row["ids"])})
        assert relative_error(list(result.outputs.values()), expected) < 1e-4
    assert engines.value(engine, "recompiles_total") == 0
    assert engines.value(engine, "eager_frames_total") == 0
    assert engines.value(engine, "variants", state="degraded") == 0


def test_an_eager_island_serves_compiled_around_it_and_its_breaks_are_counted_as_wanted() -> None:
    with Engine(config("branching", eager_islands=["middle"])).start() as engine:
        assert_answers_are_the_eager_ones(engine)
        wanted = engines.value(engine, "graph_breaks_total", reason="eager_island")
        assert wanted == engines.value(engine, "graph_breaks_total") > 0
        assert {v.tier for v in engine.runner.variants.all.values()} == {Tier.COMPILED}


def test_a_module_with_a_break_serves_without_an_island_and_its_reason_is_counted() -> None:
    with Engine(config("branching")).start() as engine:
        assert_answers_are_the_eager_ones(engine)
        assert engines.value(engine, "graph_breaks_total", reason="data_dependent") > 0
        assert engines.value(engine, "graph_breaks_total", reason="eager_island") == 0


@pytest.mark.parametrize("write", [tiny.write_model, tiny.write_classifier])
def test_islands_of_a_text_model_are_sub_modules_of_the_transformers_model(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    model = {"path": str(write(tmp_path / "tiny"))}
    inner = load(ServeConfig.from_dict({"models": [model]}).models[0], "cpu").inner
    assert inner.config.model_type == "bert"
    assert inner.get_submodule("encoder.layer.0" if hasattr(inner, "encoder") else "classifier")


@pytest.mark.parametrize(
    ("name", "strict", "tier"),
    [
        ("printing", False, Tier.GRAPH),
        ("branching", False, Tier.COMPILED),
        ("branching", True, None),
    ],
)
def test_islands_that_wait_for_the_device_are_not_captured(
    caplog: pytest.LogCaptureFixture, name: str, strict: bool, tier: Tier | None
) -> None:
    settings = config(name, eager_islands=["middle"], strict=strict)
    prepared = prepare(settings, lambda _: None)
    if tier is None:
        with pytest.raises(ModelError, match=r"_local_scalar_dense.* at .*remedy_modules.py:\d+"):
            _capturable(Tier.GRAPH, prepared, settings)
        return
    with torch.no_grad():
        assert _capturable(Tier.GRAPH, prepared, settings) is tier
    warned = "because an eager island waits for the device" in caplog.text
    assert warned == (tier is Tier.COMPILED)


def test_a_decomposition_reaches_the_compiler_under_a_cache_key_of_its_own() -> None:
    table = load_decompositions(["remedy_modules:table"])
    assert table == remedy_modules.TABLE
    seen: dict[str, Any] = {}

    def compile_fx(gm: object, inputs: object, *, decompositions: Any) -> None:
        seen.update(decompositions=decompositions, tag=torch.compiler.config.cache_key_tag)

    decomposing(compile_fx, table)(None, None)
    assert seen["decompositions"][torch.ops.remedy.smooth.default] in table.values()
    assert torch.ops.aten.gelu.default in seen["decompositions"]  # Inductor's own stay
    assert seen["tag"].startswith("decompose:")
    assert torch.compiler.config.cache_key_tag == ""
    other = {torch.ops.remedy.smooth.default: lambda x: x * 2}
    tag = seen["tag"]
    decomposing(compile_fx, other)(None, None)
    assert seen["tag"] != tag
    decomposing(compile_fx, table)(None, None)
    assert seen["tag"] == tag


@pytest.mark.slow
def test_a_decomposed_operator_is_not_called_also_after_a_start_without_its_decomposition() -> None:
    for decompositions, called in (([], True), (["remedy_modules:table"], False)):
        settings = config(
            "composite", backend="inductor", freeze="off", decompositions=decompositions
        )
        with Engine(settings).start() as engine:
            before = remedy_modules.CALLS["smooth"]
            engine.run(ROWS)
            assert (remedy_modules.CALLS["smooth"] > before) == called
            assert_answers_are_the_eager_ones(engine)


# --- what torch says


@pytest.fixture
def torch_logs() -> Iterator[None]:
    yield
    torch._logging.set_logs()


def test_the_debug_directory_holds_torchs_trace_and_a_text_log_of_the_warm_up(
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = (breaks.level, breaks.propagate, list(breaks.handlers))
    settings = config("branching", debug_dir=str(tmp_path / "debug"))
    with Engine(settings).start():
        pass
    assert (breaks.level, breaks.propagate, list(breaks.handlers)) == before
    (text,) = (tmp_path / "debug" / "branching").glob("torch_logs.*.txt")
    assert "remedy_modules.py" in text.read_text()
    assert "Graph break" in text.read_text()
    (trace,) = (tmp_path / "debug" / "branching").glob("dedicated_log_torch_trace_*.log")
    assert '"dynamo_graph_break_reason"' in trace.read_text()
    size = trace.stat().st_size
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
    assert trace.stat().st_size == size  # nothing after the warm-up


def test_a_name_that_is_no_file_name_makes_no_path(tmp_path: Path) -> None:
    with keep_artefacts(str(tmp_path), "org/../name"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["org_.._name"]


def test_a_debug_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ConfigError, match=r"compile.debug_dir: .* cannot be written"),
        keep_artefacts(str(tmp_path / "file"), "m"),
    ):
        pass


def test_a_relative_debug_directory_is_beside_the_config_file(tmp_path: Path) -> None:
    import yaml

    data = {"models": [remedy_modules.config("clean", debug_dir="kept")]}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(data))
    loaded = ServeConfig.from_yaml(tmp_path / "service.yaml").models[0]
    assert loaded.compile.debug_dir == str(tmp_path / "kept")


def test_log_recompiles_has_torch_print_the_guard_that_failed(torch_logs: None) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    recompiles = logging.getLogger("torch._dynamo.guards.__recompiles")
    recompiles.addHandler(handler)
    for on in (False, True):
        with Engine(config("clean", log_recompiles=on)).start():
            torch._dynamo.reset()
            program = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
            program(torch.zeros(3))
            program(torch.zeros(4))
        assert any("size mismatch" in text for text in seen) == on
    recompiles.removeHandler(handler)


def test_the_switches_of_serve_reach_every_model(
    toy: Path,  # noqa: F811
    started: list[FakeService],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("serve", toy, "--compile-debug-dir", "kept", "--log-recompiles").exit_code == 0
    settings = started[0].config.models[0].compile
    assert settings.debug_dir == str(tmp_path / "kept")
    assert settings.log_recompiles
    assert run("serve", toy).exit_code == 0
    assert started[1].config.models[0].compile.debug_dir is None
    assert not started[1].config.models[0].compile.log_recompiles
