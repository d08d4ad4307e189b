"""``shapeserve explain``: every obstacle is found where it is, and a remedy removes it."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import remedy_modules
import tiny
import torch
import yaml
from click.testing import CliRunner, Result

from shapeserve.cli import main
from shapeserve.config import ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.explain import Explanation, explain
from shapeserve.explain.recompiles import read_recompiles
from shapeserve.metrics import GraphBreakReason

MODULES = Path(remedy_modules.__file__)


def explained(name: str, batches: tuple[int, ...] = (2, 4), **compile_: Any) -> Explanation:
    data = remedy_modules.config(name, batches, **compile_)
    return explain(ServeConfig.from_dict({"models": [data]}).models[0])


def line_of(text: str) -> int:
    """The line of the modules' file that holds ``text``."""
    lines = inspect.getsource(remedy_modules).splitlines()
    (found,) = (i for i, line in enumerate(lines, 1) if text in line)
    return found


def run(tmp_path: Path, name: str, *options: str, **compile_: Any) -> Result:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump({"models": [remedy_modules.config(name, **compile_)]}))
    return CliRunner().invoke(main, ["explain", str(path), *options])


def test_a_model_without_obstacles_is_clean_and_exits_with_0(tmp_path: Path) -> None:
    result = run(tmp_path, "clean", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "nothing found against a capture" in result.stdout
    (found,) = json.loads((tmp_path / "out.json").read_text())["models"]
    assert found["clean"]
    assert found["faults"] == []
    (program,) = found["programs"]
    assert program["sizes"] == {"batch": 3, "seq": 40}
    (graph,) = program["graphs"]
    assert graph["runs"] == 1
    assert 0 < graph["ops"] < graph["nodes"] * 3
    assert graph["top_ops"]["aten.permute.default"] == 2  # of the two linear layers
    assert [axis["state"] for axis in program["axes"]] == ["dynamic", "dynamic"]
    assert program["guards"]["TENSOR_MATCH"] >= 2
    assert 2 <= program["checked_guards"] < sum(program["guards"].values())
    assert program["recompiles"] == []


def test_a_program_for_one_row_is_specialised_along_batch_and_that_is_no_fault() -> None:
    found = explained("clean", batches=(1,))
    (program,) = found.programs
    assert program.name == "single"
    assert {axis.name: axis.state for axis in program.axes} == {"batch": "one", "seq": "dynamic"}
    assert found.faults == ()


def test_a_data_dependent_branch_is_found_at_its_line_with_a_remedy() -> None:
    found = explained("branching")
    (broken,) = found.breaks
    assert broken.place is not None
    assert (broken.place.file, broken.place.line) == (str(MODULES), line_of("if bool((x.abs()"))
    assert broken.place.code == "if bool((x.abs() > 1e6).any()):"
    assert broken.kind is GraphBreakReason.DATA_DEPENDENT
    assert "torch.where" in broken.remedy
    assert "compile.eager_islands: [middle]" in broken.remedy
    assert [blocker.kind for blocker in found.blockers] == ["data_dependent"]
    assert found.programs[0].splits >= 2
    assert found.split_us is not None
    assert found.faults == ("graph breaks: 1", "reasons against a capture: 1")
    # A configured tier that captures nothing needs no capture.
    assert replace(found, wants_capture=False).faults == ("graph breaks: 1",)


def test_an_eager_island_makes_a_break_wanted_and_says_why_it_cannot_be_captured(
    tmp_path: Path,
) -> None:
    options = {"eager_islands": ["middle"], "tier": "compiled"}
    result = run(tmp_path, "branching", "--json", "-", **options)
    assert result.exit_code == 0, result.output  # this tier captures nothing
    (found,) = json.loads(result.stdout)["models"]
    assert found["before"] == {
        "graphs": 4,
        "breaks": 1,
        "opaque_ops": 0,
        "unfused_ops": 0,
        "capture": False,
    }
    assert found["after"]["breaks"] == 0
    (broken,) = found["programs"][0]["breaks"]
    assert broken["island"] == "middle"
    (reason,) = found["capture"]["reasons"]
    assert reason["kind"] == "cpu_sync"
    assert reason["place"] == f"{MODULES}:{line_of('if bool((x.abs()')}"


def test_an_island_that_does_not_wait_for_the_device_can_be_captured() -> None:
    found = explained("printing", eager_islands=["middle"])
    assert found.faults == ()
    assert found.before is not None
    assert (found.before.breaks, found.before.capture) == (1, False)


def test_a_print_is_a_side_effect_whose_remedy_is_to_take_it_out(tmp_path: Path) -> None:
    result = run(tmp_path, "printing")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    line = line_of('print("side effect")')
    assert f"{MODULES}:{line} (side_effect)" in shown
    assert "remedy: take the call out of forward" in shown
    assert "graph_break: Failed to trace builtin operator" in shown
    assert "fault graph breaks: 1" in shown


def test_an_operator_without_fake_is_opaque_and_its_splits_have_a_cost() -> None:
    found = explained("opaque")
    (op,) = found.custom_ops
    assert (op.name, op.calls, op.fake, op.splits) == ("remedy::opaque", 1, False, 1)
    assert op.us_per_call is not None
    assert op.us_per_call == found.split_us
    (broken,) = found.breaks
    assert broken.kind is GraphBreakReason.OPAQUE_OP
    assert 'register_fake("remedy::opaque")' in broken.remedy
    assert "opaque operators: 1" in found.faults


def test_a_fake_from_custom_ops_makes_it_one_graph_and_it_is_served_as_one() -> None:
    assert "remedy_fakes" not in sys.modules, "imported earlier: there is no before any more"
    found = explained("declared", custom_ops=["remedy_fakes"])
    assert found.faults == ()
    (op,) = found.custom_ops
    assert (op.fake, op.splits, op.us_per_call) == (True, 0, None)
    assert len(found.programs[0].graphs) == 1
    assert found.before is not None
    assert (found.before.breaks, found.before.opaque_ops) == (1, 1)
    assert (found.summary.breaks, found.summary.opaque_ops) == (0, 0)
    data = remedy_modules.config("declared", custom_ops=["remedy_fakes"], backend="eager")
    with engines.started(ServeConfig.from_dict({"models": [data]})) as engine:
        engine.run([{"ids": np.arange(1, 8)}])
        assert engines.value(engine, "graph_breaks_total") == 0
        assert engines.value(engine, "compiles_total", stage="aot_autograd") == 1


def test_a_decomposed_operator_fuses() -> None:
    found = explained("composite", decompositions=["remedy_modules:table"])
    (op,) = found.custom_ops
    assert (op.name, op.decomposed) == ("remedy::smooth", True)
    assert found.decompositions == ("remedy::smooth",)
    assert found.before is not None
    assert (found.before.unfused_ops, found.summary.unfused_ops) == (1, 0)


def test_an_axis_that_the_code_specialises_is_named_with_the_line_and_the_recompile(
    tmp_path: Path,
) -> None:
    result = run(tmp_path, "tied")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    where = f"{MODULES}:{line_of('== self.length')}"
    assert f"axis seq: specialised at 40: the code holds for seq=40 only ({where}" in shown
    assert "axis batch: dynamic" in shown
    assert "size mismatch at index 1. expected 40" in shown
    assert "fault specialised axes: 1" in shown


def test_a_guard_on_sizes_is_written_in_axis_names() -> None:
    (program,) = explained("guarded").programs
    seq = program.axes[1]
    assert (seq.name, seq.state) == ("seq", "dynamic")
    (constraint,) = seq.constraints
    assert constraint.guard == "seq > 4"
    assert constraint.place is not None
    assert constraint.place.line == line_of("ids.shape[1] > 4")


def test_a_break_in_a_loop_says_that_the_function_runs_eager() -> None:
    (broken,) = explained("looped").breaks
    assert broken.eager_frame
    assert "[gates.0, gates.1]" in broken.remedy


def test_host_randomness_and_copies_to_the_host_forbid_a_capture() -> None:
    dicing = explained("dicing").blockers
    assert "Python's random" in next(b.what for b in dicing if b.kind == "host_random")
    (fetching,) = explained("fetching").blockers
    assert fetching.kind == "cpu_sync"
    assert fetching.what.startswith("Tensor.cpu ")
    assert fetching.place == f"{MODULES}:{line_of('x.cpu()')}"


@pytest.mark.slow
def test_a_text_directory_is_explained(tmp_path: Path) -> None:
    model = {
        "path": str(tiny.write_model(tmp_path / "tiny")),
        "policy": {"batch": {"explicit": [2, 4]}},  # one program, for the sake of time
    }
    found = explain(ServeConfig.from_dict({"models": [model]}).models[0])
    assert found.faults == ()
    (program,) = found.programs
    assert len(program.graphs) == 1
    assert "seq <= 48" in [c.guard for axis in program.axes for c in axis.constraints]


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "island": ({"eager_islands": ["nope"]}, 2, "compile.eager_islands: nope is no sub-module of"),
    "pattern": ({"eager_islands": ["a b"]}, 2, "models[0].compile.eager_islands[0]"),
    "ops": ({"custom_ops": ["no_such_module"]}, 1, "compile.custom_ops: no_such_module"),
    "table": ({"decompositions": ["remedy_modules:CALLS"]}, 1, "must be a mapping from operator"),
    "name": ({"decompositions": ["remedy_modules:none"]}, 1, "import remedy_modules:none"),
    "backend": (
        {"decompositions": ["remedy_modules:table"], "backend": "eager"},
        2,
        "decompositions are for backend inductor, backend is eager",
    ),
}


@pytest.mark.parametrize(("compile_", "code", "message"), BAD.values(), ids=BAD.keys())
def test_a_remedy_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, compile_: dict[str, Any], code: int, message: str
) -> None:
    result = run(tmp_path, "clean", **compile_)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


# --- what must not be called clean, and what must not be called a fault


def test_a_hidden_size_that_equals_a_traced_one_is_not_taken_for_the_axis() -> None:
    (program,) = explained("wide_as_traced").programs
    assert program.sizes["seq"] == 39  # torch would tie 40 to the width of the layer
    assert program.recompiles == ()
    assert [axis.state for axis in program.axes] == ["dynamic", "dynamic"]


def test_a_module_that_changes_with_each_call_is_a_fault_of_its_attributes(tmp_path: Path) -> None:
    result = run(tmp_path, "counting")
    assert result.exit_code == 1
    assert "calls" in result.stdout
    assert "not from what earlier calls left in the module" in result.stdout
    assert "other sizes" not in result.stdout


def test_a_specialised_axis_has_a_remedy(tmp_path: Path) -> None:
    assert "remedy: work on the axis with tensor operators" in run(tmp_path, "tied").stdout


def test_a_number_that_python_made_is_no_copy_to_the_host() -> None:
    assert explained("scaled").blockers == ()


def test_a_guard_of_torch_itself_is_no_fault() -> None:
    """As torch 2.13 writes them."""
    ours = "0/0: size == 3    # if size > 3:  # model/parts.py:12 in forward"
    torchs = "0/0: Eq(s1, 1)    # F.conv2d(  # nn/modules/conv.py:560 in f (_ops.py:1 in conv)"
    found = read_recompiles([ours, torchs, ours])
    assert [(again.torchs, again.what.split("  ")[0]) for again in found] == [
        (False, ours.replace("    ", " ").replace("  ", " ")),
        (True, torchs.replace("    ", " ").replace("  ", " ")),
    ]


def test_a_process_without_torch_compile_explains_nothing() -> None:
    off = torch._dynamo.config.patch(disable=True)
    with off, pytest.raises(ConfigError, match="unset TORCHDYNAMO_DISABLE"):
        explained("clean")


def test_what_a_model_prints_is_not_in_the_json(tmp_path: Path) -> None:
    result = run(tmp_path, "printing", "--json", "-")
    assert json.loads(result.stdout)["models"]
    assert "side effect" in result.stderr


def test_the_models_behind_one_that_does_not_load_are_explained(tmp_path: Path) -> None:
    broken = {**remedy_modules.config("clean"), "name": "broken", "import": "remedy_modules:none"}
    path, target = tmp_path / "service.yaml", tmp_path / "out.json"
    path.write_text(yaml.safe_dump({"models": [broken, remedy_modules.config("clean")]}))
    result = CliRunner().invoke(main, ["explain", str(path), "--json", str(target)])
    assert result.exit_code == 1
    assert "remedy_modules:none" in result.stderr
    assert len(json.loads(target.read_text())["models"]) == 1


@pytest.mark.parametrize("target", ["missing/out.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shapeserve.explain.explain", None)
    result = run(tmp_path, "clean", "--json", target)
    assert result.exit_code == 2
    assert f"--json {target}: cannot be written" in result.stderr


@pytest.mark.slow
def test_the_example_of_the_documents_starts_with_its_remedies(tmp_path: Path) -> None:
    """Every block of docs/compile.md as it stands, in a process of its own."""
    page = (MODULES.parents[1] / "docs" / "compile.md").read_text()
    python = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    settings = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ranker.py").write_text(python[0])
    (tmp_path / "ranker_ops.py").write_text(python[1])
    config = settings[0] + settings[1]
    (tmp_path / "ranker.yaml").write_text(config)
    # Decompositions are for Inductor, which takes its time.
    lines = [line for line in config.splitlines() if "decompositions:" not in line]
    (tmp_path / "quick.yaml").write_text("\n".join([*lines, "    backend: eager"]))
    code = (
        "from shapeserve import Engine, ServeConfig\n"
        "engine = Engine(ServeConfig.from_yaml('quick.yaml')).start()\n"
        "print(engine.run([{'ids': [1, 2, 3]}])[0].mode)\n"
        "engine.close()"
    )
    paths = [str(MODULES.parents[1]), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for arguments, said in (
        (["-c", code], "compiled"),
        (["-m", "shapeserve.cli", "explain", "ranker.yaml"], "clean"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == said


def test_operators_that_only_the_model_defines_are_refused_as_a_start_would(tmp_path: Path) -> None:
    (tmp_path / "too_early.py").write_text(
        "import torch\ntorch.library.register_fake('remedy::late', torch.empty_like)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        result = run(tmp_path, "declared", custom_ops=["too_early"])
    finally:
        sys.path.remove(str(tmp_path))
    assert result.exit_code == 1
    assert "let it import what defines its operators" in result.stderr
