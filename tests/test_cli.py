import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from shapeserve.cli import main
from shapeserve.cli.warmup import WarmupDisplay
from shapeserve.config import ServeConfig
from shapeserve.errors import ModelError

EXAMPLE = Path(__file__).parent.parent / "deploy" / "examples" / "minilm.yaml"

MODULE = """
models:
- name: toy
  import: nowhere:factory
  inputs: {x: {dtype: float32, dims: [batch, seq]}}
  outputs: {y: {dtype: float32, dims: [batch]}}
  policy: {seq: {explicit: [8, 64]}, batch: {explicit: [1, 4]}}
  limits: {max_batch_tokens: 128}
  compile: {tier: eager}
  device: cpu
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(MODULE)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", [(), *((name,) for name in main.commands)], ids=str)
def test_help_has_examples(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:\n" in result.stdout


# --- config


def test_config_prints_what_loads_as_the_same_config(toy: Path, tmp_path: Path) -> None:
    result = run("config", toy)
    assert result.exit_code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert ServeConfig.from_yaml(printed) == ServeConfig.from_yaml(toy)
    assert yaml.safe_load(result.stdout)["models"][0]["limits"]["max_rows"] == 2048


def test_schema_describes_every_key() -> None:
    result = run("config", "--schema")
    schema = json.loads(result.stdout)
    assert {"models", "serve"} <= set(schema["properties"])
    for definition in schema["$defs"].values():
        for name, field in definition.get("properties", {}).items():
            assert "unit:" in field["description"], name
            assert "default:" in field["description"] or "required" in field["description"], name


def test_the_example_is_what_the_demo_serves() -> None:
    from shapeserve.demo import demo_config

    assert ServeConfig.from_yaml(EXAMPLE) == demo_config(8000)


# --- plan


def test_plan_prints_grid_variants_and_reason(toy: Path) -> None:
    result = run("plan", toy)
    assert result.exit_code == 0
    assert "toy on cpu: 3 buckets (batch x seq)" in result.stdout
    assert "3 at tier eager" in result.stdout
    assert "why: " in result.stdout
    cells = [line.split() for line in result.stdout.splitlines()]
    assert ["8", "8", "32"] in cells
    assert ["64", "64"] in cells  # batch=4,seq=64 is above max_batch_tokens


def test_plan_expects_waste_for_recorded_lengths(toy: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens,count\n4,3\n64,1\n100,1\n")
    result = run("plan", toy, "--lengths", lengths)
    assert result.exit_code == 0
    cells = [line.split() for line in result.stdout.splitlines()]
    assert ["8", "8", "32", "60.0%"] in cells
    assert ["pad_to_max", "51.1%"] in cells
    assert "fallback (over_max): 1 rows (20.0%)" in result.stdout
    assert "padding_batch: not predicted" in result.stdout


def test_plan_for_another_device_needs_none(toy: Path) -> None:
    text = toy.read_text().replace("tier: eager", "tier: auto")
    toy.write_text(text)
    assert "3 at tier compiled" in run("plan", toy, "--device", "cpu").stdout
    assert "3 at tier graph" in run("plan", toy, "--device", "cuda").stdout


def test_plan_json_goes_to_stdout_alone_or_beside_the_table(toy: Path, tmp_path: Path) -> None:
    alone = run("plan", toy, "--json", "-")
    (planned,) = json.loads(alone.stdout)["models"]
    assert planned["grid"]["buckets"] == ["batch=1,seq=8", "batch=1,seq=64", "batch=4,seq=8"]
    beside = run("plan", toy, "--json", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(alone.stdout)
    assert "toy on cpu" in beside.stdout


def test_config_and_plan_show_every_model_of_an_application() -> None:
    example = EXAMPLE.with_name("two-models.yaml")
    names = ["queries", "documents"]
    resolved = yaml.safe_load(run("config", example).stdout)
    assert [model["name"] for model in resolved["models"]] == names
    planned = json.loads(run("plan", example, "--device", "cuda", "--json", "-").stdout)["models"]
    assert [model["model"] for model in planned] == names
    assert [len(model["axes"]) for model in planned] == [2, 1]  # padded by its policy, packed
    table = run("plan", example, "--device", "cpu").stdout
    assert "queries on cpu: 16 buckets" in table
    assert "documents on cpu: 96 buckets" in table


def test_plan_of_packed_rows_lists_the_sizes_of_a_batch(minilm_dir: Path) -> None:
    result = run("plan", "--model", minilm_dir, "--device", "cuda")
    assert "all-MiniLM-L6-v2 on cuda: 27 buckets (tokens)" in result.stdout
    cells = [line.split() for line in result.stdout.splitlines()]
    assert any(row[:3] == ["16", "24", "32"] for row in cells)
    assert "graph memory: about" in result.stdout


def test_plan_of_a_model_directory(minilm_dir: Path) -> None:
    result = run("plan", "--model", minilm_dir, "--device", "cpu")
    assert "all-MiniLM-L6-v2 on cpu: 96 buckets" in result.stdout


# --- serve, with a service that starts nothing


class FakeService:
    """Becomes ready after two reports, then is interrupted."""

    url = "http://127.0.0.1:1"

    def __init__(self, config: ServeConfig, failure: Exception | None = None) -> None:
        self.config = config
        self.failure = failure
        self.calls: list[str] = []

    def wait_ready(self, on_progress: Callable[[int, int, str], None]) -> None:
        self.calls.append("wait_ready")
        on_progress(0, 0, "load")
        if self.failure is not None:
            raise self.failure
        on_progress(3, 3, "verify")

    def wait(self, on_change: Callable[[int], None]) -> None:
        self.calls.append("wait")
        on_change(0)
        raise KeyboardInterrupt

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeService]:
    services: list[FakeService] = []

    def start(config: ServeConfig) -> FakeService:
        services.append(FakeService(config))
        return services[-1]

    monkeypatch.setattr("shapeserve.cli.serve.start", start)
    return services


def test_serve_says_where_and_stops_cleanly_on_ctrl_c(
    toy: Path, started: list[FakeService]
) -> None:
    result = run("serve", toy)
    assert result.exit_code == 0
    assert result.stdout.startswith("http://127.0.0.1:1/v1/embeddings")
    assert "warming up: load" in result.stderr
    assert "ready after" in result.stderr
    assert "0 of 1 replica(s) ready" in result.stderr
    assert started[0].calls == ["wait_ready", "wait", "shutdown"]


LISTED = {"host", "port", "grpc_port", "replicas", "proxy", "drain_s"}


def test_serve_options_win_over_the_file(toy: Path, started: list[FakeService]) -> None:
    options = "--host 0.0.0.0 --port 9 --grpc-port 8 --replicas 2 --device auto --drain-s 3"
    result = run("serve", toy, *options.split(), "--proxy", "default")
    assert result.exit_code == 0
    assert "grpc://" in result.stdout
    config = started[0].config
    assert config.serve.model_dump(include=LISTED) == {
        "host": "0.0.0.0",
        "port": 9,
        "grpc_port": 8,
        "replicas": 2,
        "proxy": "default",
        "drain_s": 3.0,
    }
    assert config.models[0].device == "auto"
    assert config.models[0].limits.max_batch_tokens == 128


def test_serve_names_a_model_directory(minilm_dir: Path, started: list[FakeService]) -> None:
    assert run("serve", "--model", minilm_dir, "--name", "mini").exit_code == 0
    assert started[0].config.models[0].name == "mini"


def test_a_model_that_fails_to_start_ends_the_service_with_1(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: list[FakeService] = []

    def start(config: ServeConfig) -> FakeService:
        services.append(FakeService(config, ModelError("padding changes the answers")))
        return services[-1]

    monkeypatch.setattr("shapeserve.cli.serve.start", start)
    result = run("serve", toy)
    assert result.exit_code == 1
    assert "Error: padding changes the answers" in result.stderr
    assert services[0].calls[-1] == "shutdown"


# --- errors


BAD_CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "no source": (("plan",), "give either CONFIG.yaml or --model DIR"),
    "two sources": (("plan", "TOY", "--model", "d"), "give either CONFIG.yaml or --model DIR"),
    "no file": (("config", "none.yaml"), "none.yaml: cannot be read"),
    "no directory": (("plan", "--model", "none"), "'none' is not a directory"),
    "neither": (("config",), "give either CONFIG.yaml or --schema"),
    "unknown option": (("plan", "TOY", "--nope"), "No such option"),
    "name without model": (("serve", "TOY", "--name", "n"), "--name goes with --model"),
    "port": (("serve", "TOY", "--port", "70000"), "serve.port: got 70000"),
    "lengths": (("plan", "TOY", "--lengths", "none.csv"), "none.csv: cannot be read"),
    "json": (("plan", "TOY", "--json", "no/such/dir.json"), "cannot be written"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_input_exits_with_2_and_one_message(
    toy: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*(str(toy) if a == "TOY" else a for a in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_config_error_names_file_and_line(toy: Path) -> None:
    toy.write_text(MODULE.replace("[8, 64]", "[64, 8]"))
    result = run("config", toy)
    assert result.exit_code == 2
    assert f"{toy}:7: models[0].policy.seq" in result.stderr


def test_the_installed_command_exits_like_the_function(toy: Path) -> None:
    def shapeserve(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from shapeserve.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert shapeserve("config", str(toy)).returncode == 0
    bad = shapeserve("config", os.devnull)
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert "Traceback" not in bad.stderr


# --- progress


def shown(*reports: tuple[int, int, str], terminal: bool = False) -> str:
    out = io.StringIO()
    with WarmupDisplay(Console(file=out, force_terminal=terminal, width=80)) as display:
        for report in reports:
            display(*report)
    return out.getvalue()


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    reports: list[tuple[int, int, str]] = [(0, 0, "load"), (0, 0, "load"), (0, 8, "compile")]
    reports += [(i, 8, f"verify batch=1,seq={i}") for i in range(9)]
    assert shown(*reports).splitlines() == [
        "warming up: load",
        "warming up: compile 0/8",
        *(f"warming up: verify {i}/8" for i in (0, 2, 4, 6, 8)),
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    text = shown((3, 8, "verify"), terminal=True)
    assert "3/8" in text
    assert "verify" in text


def test_plan_of_images_shows_the_waste_of_each_axis(toy: Path, tmp_path: Path) -> None:
    text = toy.read_text().replace("[batch, seq]", "[batch, 3, height, width]")
    shapes = '"height,width": {shapes: [[4, 6], [6, 4]]}'
    toy.write_text(text.replace("seq: {explicit: [8, 64]}", shapes))
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,height,width\n0,4,6\n1,4,5\n")
    result = run("plan", toy, "--lengths", trace)
    assert result.exit_code == 0
    cells = [line.split() for line in result.stdout.splitlines()]
    assert ["4", "x", "6", "24", "96", "100.0%"] in cells
    assert ["policy", "padding_height", "padding_width"] in cells
    assert ["this", "grid", "0.0%", "8.3%"] in cells
