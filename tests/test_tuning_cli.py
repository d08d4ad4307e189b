import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from shapeserve.cli import main
from shapeserve.config import ServeConfig, parse_policy
from shapeserve.models.describe import describe
from shapeserve.tuning import CostPoint, CostTable

TRACES = Path(__file__).parent.parent / "benchmarks" / "data" / "traces"
TEXTS = TRACES / "enc_rag_mix.csv.gz"
IMAGES = TRACES / "taco_phone_photos.csv.gz"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", ["tune", "simulate"])
def test_help_of_the_tuner_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Examples:\n" in result.stdout


def test_tune_compares_the_proposal_with_what_people_use() -> None:
    result = run("tune", "--trace", TEXTS, "-k", "8", "--max-length", "512")
    assert result.exit_code == 0
    words = (
        "today's default",
        "powers of two",
        "multiples of 64",
        "pad to the longest",
        "proposed",
    )
    assert all(word in result.stdout for word in words)
    assert "19366 rows, seq; halves by row order" in result.stdout
    assert "analytic: MiniLM on two CPU cores" in result.stdout.replace("\n", " ")


def test_tune_json_has_the_stable_keys_and_goes_to_stdout_alone() -> None:
    result = run("tune", "--trace", TEXTS, "-k", "8", "--max-length", "512", "--json", "-")
    data = json.loads(result.stdout)
    assert data["rows"] == 19366
    assert len(data["buckets"]) <= 8
    assert data["buckets"][-1] == 512
    assert set(data["waste"]) == {"proposed", "pow2", "multiple_64", "pad_to_max"}
    for halves in data["waste"].values():
        assert set(halves) == {"first_half", "second_half"}
        assert all(0 <= share < 1 for share in halves.values())
    assert data["details"]["shapes"]["pow2"] == 10
    assert data["details"]["unseen_waste_by_shapes"] == {}


def test_tune_without_k_says_how_it_chose(tmp_path: Path) -> None:
    target = tmp_path / "tune.json"
    result = run("tune", "--trace", TEXTS, "--max-length", "512", "--json", target)
    assert "no larger number took away" in result.stdout
    details = json.loads(target.read_text())["details"]
    assert len(details["unseen_waste_by_shapes"]) == 32
    assert 8 < details["shapes"]["proposed"] < 32


def test_a_policy_file_is_the_policy_block_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    result = run(
        "tune",
        "--trace",
        TEXTS,
        "-k",
        "6",
        "--max-length",
        "256",
        "--align",
        "8",
        "--include",
        "24",
        "--out",
        path,
    )
    assert result.exit_code == 0
    policy = yaml.safe_load(path.read_text())
    sizes = policy["seq"]["explicit"]
    assert 24 in sizes
    assert all(size % 8 == 0 for size in sizes)
    model = {
        "import": "nowhere:factory",
        "inputs": {"x": {"dtype": "float32", "dims": ["batch", "seq"]}},
        "outputs": {"y": {"dtype": "float32", "dims": ["batch"]}},
        "limits": {"max_length": 256},
        "policy": policy,
    }
    config = ServeConfig.from_dict({"models": [model]})
    assert config.models[0].policy == parse_policy(policy)
    assert "enc_rag_mix.csv.gz (19366 rows)" in path.read_text()


def test_two_axes_get_shapes_and_the_gap_of_the_search(tmp_path: Path) -> None:
    target = tmp_path / "tune.json"
    result = run("tune", "--trace", IMAGES, "-k", "8", "--json", target)
    assert "two axes are searched: no better one saves more than" in result.stdout
    assert "device-s" not in result.stdout
    buckets = json.loads(target.read_text())["buckets"]
    assert len(buckets) <= 8
    assert [5312, 6000] in buckets


def test_a_policy_of_shapes_is_the_policy_block_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    assert run("tune", "--trace", IMAGES, "-k", "5", "--align", "16", "--out", path).exit_code == 0
    policy = yaml.safe_load(path.read_text())
    assert parse_policy(policy)["height,width"].shapes is not None
    model = {
        "import": "nowhere:factory",
        "inputs": {"x": {"dtype": "float32", "dims": ["batch", "height", "width"]}},
        "outputs": {"y": {"dtype": "float32", "dims": ["batch"]}},
        "policy": policy,
        "limits": {"max_queue_tokens": 10**9},
    }
    config = ServeConfig.from_dict({"models": [model]})
    assert describe(config.models[0]).max_length == {"height": 5312, "width": 6000}


def test_a_histogram_says_that_it_has_no_order(data_dir: Path) -> None:
    result = run("tune", "--trace", data_dir / "q_xquad.csv.gz", "-k", "4", "--axis", "frames")
    assert "1190 rows, frames; a histogram has no order: halves at random" in result.stdout


def test_measured_costs_are_used_and_named(tmp_path: Path) -> None:
    points = tuple(CostPoint((("batch", 1), ("seq", n)), 0.01 * n * n) for n in (8, 64, 512))
    path = tmp_path / "costs.json"
    CostTable({"model": "toy"}, ("batch", "seq"), points).write(path)
    arguments = ("tune", "--trace", TEXTS, "-k", "6", "--objective", "seconds", "--json", "-")
    measured = json.loads(run(*arguments, "--costs", path).stdout)
    assert "measured: 3 batches" in measured["details"]["cost"]
    assert measured["buckets"] != json.loads(run(*arguments).stdout)["buckets"]


BAD = {
    "no trace": (("-k", "4"), "give either --trace FILE (or a directory) or --prometheus URL"),
    "two sources": (
        ("--trace", TEXTS, "--prometheus", "http://127.0.0.1:9"),
        "give either --trace FILE",
    ),
    "range of a trace": (("--trace", TEXTS, "--range", "1h"), "--range is for --prometheus"),
    "form of a trace": (
        ("--trace", TEXTS, "--prometheus-form", "ray"),
        "--prometheus-form is for --prometheus",
    ),
    "axis of Prometheus": (
        ("--prometheus", "http://127.0.0.1:9", "--axis", "seq"),
        "--axis is for --trace",
    ),
    "no address": (("--prometheus", "localhost:9090"), "must be an address such as http://"),
    "a file": (("--prometheus", "file:///etc/passwd"), "must be an address such as http://"),
    "nobody there": (
        ("--prometheus", "http://127.0.0.1:9"),
        "--prometheus: http://127.0.0.1:9/api/v1/query cannot be reached",
    ),
    "empty directory": (("--trace", Path(__file__).parent), "has no trace"),
    "no file": (("--trace", "none.csv"), "none.csv: cannot be read: No such file"),
    "k of 0": (("--trace", TEXTS, "-k", "0"), "0 is not in the range"),
    "k that no policy may have": (("--trace", TEXTS, "-k", "513"), "513 is not in the range"),
    "length beyond memory": (("--trace", TEXTS, "--max-length", "16777217"), "not in the range"),
    "align beyond numbers": (("--trace", TEXTS, "--align", "9" * 20), "not in the range"),
    "include beyond numbers": (("--trace", TEXTS, "--include", "9" * 20), "not in the range"),
    "speed nan": (
        ("--trace", TEXTS, "--objective", "p99", "--speed", "nan"),
        "'--speed': nan is no finite number",
    ),
    "bound nan": (("--trace", TEXTS, "--objective", "p99", "--slo-ms", "nan"), "no finite number"),
    "cost inf": (
        ("--trace", TEXTS, "--objective", "seconds", "--variant-cost-s", "inf"),
        "no finite number",
    ),
    "model of nothing": (("--trace", TEXTS, "--model", "m"), "add --apply or --apply-admin"),
    "interval of once": (("--trace", TEXTS, "--interval", "5m"), "--interval is for --watch"),
    "drift of once": (("--trace", TEXTS, "--drift", "0.15"), "--drift is for --watch"),
    "saving of once": (("--trace", TEXTS, "--min-saving", "0.1"), "--min-saving is for --watch"),
    "pause of once": (
        ("--trace", TEXTS, "--min-apply-interval", "1h"),
        "--min-apply-interval is for --watch",
    ),
    "policy as JSON is": (("--trace", TEXTS, "--out", "-"), "only --json can be printed"),
    "report as JSON is": (("--trace", TEXTS, "--report", "-"), "only --json can be printed"),
    "two results in a file": (
        ("--trace", TEXTS, "--out", "/tmp/one", "--json", "/tmp/../tmp/one"),
        "--json /tmp/../tmp/one: --out is the same file",
    ),
    "axis of two": (("--trace", IMAGES, "--axis", "seq"), "this trace has height, width"),
    "axis batch": (("--trace", TEXTS, "--axis", "batch"), "--axis batch: it names the row axis"),
    "include too long": (("--trace", TEXTS, "--include", "9999"), "seq ends at 512"),
    "include for images": (("--trace", IMAGES, "--include", "64"), "along one axis, the trace has"),
    "seconds of pixels": (
        ("--trace", IMAGES, "--objective", "seconds"),
        "analytic cost is for tokens",
    ),
    "variant cost of padding": (
        ("--trace", TEXTS, "--variant-cost-s", "1"),
        "use it with --objective",
    ),
    "no costs": (("--trace", TEXTS, "--costs", "none.json"), "none.json: cannot be read"),
    "out": (
        ("--trace", TEXTS, "-k", "2", "--out", "/none/p.yaml"),
        "--out /none/p.yaml: cannot be",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_of_tune_exits_with_2_and_one_message(
    arguments: tuple[str | Path, ...], message: str
) -> None:
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--out", "--json", "--report"])
def test_recorded_traffic_is_not_written_over(tmp_path: Path, option: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,len\n" + "0,5\n" * 4)
    result = run("tune", "--trace", path, option, tmp_path / "." / "t.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--trace is the same file" in result.stderr
    assert path.read_text().startswith("t_s,len")


def test_a_device_may_be_written_to_twice() -> None:
    result = run("tune", "--trace", TEXTS, "-k", "2", "--out", "/dev/null", "--json", "/dev/null")
    assert result.exit_code == 0, result.stderr


def test_a_longer_row_than_can_be_tuned_to_is_refused_before_memory_is_taken(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t_s,len\n" + "0,5\n" * 4 + "1,2000000000\n")
    result = run("tune", "--trace", path)
    assert result.exit_code == 2
    assert "seq ends at 2000000000; at most 16777216 can be tuned to" in result.stderr
    assert run("tune", "--trace", path, "--max-length", "100").exit_code == 0


def test_the_largest_end_of_images_is_a_policy(tmp_path: Path) -> None:
    result = run("tune", "--trace", IMAGES, "-k", "2", "--max-length", str(2**24))
    assert result.exit_code == 0, result.stderr
    assert "variants: 2" in result.stdout


def test_a_bad_row_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("t_s,len\n0,5\n1,zero\n")
    result = run("tune", "--trace", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "bad.csv:3: len='zero'" in result.stderr


# --- simulate

SERVICE = """
models:
- name: toy
  import: nowhere:factory
  inputs: {x: {dtype: int64, dims: [batch, seq]}}
  outputs: {y: {dtype: float32, dims: [batch]}}
  policy: {seq: {explicit: [8, 64]}, batch: {explicit: [1, 2, 4]}}
- name: other
  import: nowhere:factory
  inputs: {x: {dtype: int64, dims: [batch, height, width]}}
  outputs: {y: {dtype: float32, dims: [batch]}}
  limits: {max_length: 64}
serve: {replicas: 2}
"""


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    return path


@pytest.fixture
def arrivals(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("t_s,len\n" + "".join(f"{i // 4},{1 + i % 60}\n" for i in range(200)))
    return path


def test_simulate_says_what_will_happen(service: Path, arrivals: Path) -> None:
    result = run("simulate", service, "--model", "toy", "--trace", arrivals)
    assert result.exit_code == 0
    for word in ("toy on cpu, 6 buckets, p2c", "utilisation", "latency p99", "padding_seq"):
        assert word in result.stdout
    assert "batch=1,seq=8" in result.stdout
    assert "device time is analytic" in result.stdout.replace("\n", " ")


def test_simulate_json_counts_every_row_and_takes_replicas_from_the_configuration(
    service: Path, arrivals: Path
) -> None:
    arguments = ("simulate", service, "--model", "toy", "--trace", arrivals, "--json", "-")
    data = json.loads(run(*arguments).stdout)
    assert (data["rows"], data["answered"], data["replicas"]) == (200, 200, 2)
    assert data["elements"]["real"] == sum(1 + i % 60 for i in range(200))
    assert set(data["latency_s"]) == {"mean", "p50", "p90", "p99"}
    assert data["waste"]["all"] == pytest.approx(
        data["waste"]["padding_seq"] + data["waste"]["padding_batch"]
    )
    more = json.loads(
        run(*arguments, "--replicas", "5", "--routing", "affinity", "--speed", "10").stdout
    )
    assert more["replicas"] == 5
    assert more["span_s"] < data["span_s"] / 9


def test_a_tuned_policy_is_simulated_as_it_was_written(tmp_path: Path, service: Path) -> None:
    policy = tmp_path / "policy.yaml"
    run("tune", "--trace", TEXTS, "-k", "5", "--max-length", "64", "--out", policy)
    data = yaml.safe_load(service.read_text())
    data["models"] = [data["models"][0] | {"policy": yaml.safe_load(policy.read_text())}]
    service.write_text(yaml.safe_dump(data))
    result = run("simulate", service, "--trace", TEXTS, "--device", "cuda", "--json", "-")
    outcome = json.loads(result.stdout)
    sizes = data["models"][0]["policy"]["seq"]["explicit"]
    ran = {int(label.split("seq=")[1]) for label in outcome["batches"] if label != "none"}
    assert ran <= set(sizes)
    assert max(ran) == 64
    assert outcome["fallbacks"]["over_max"] > 0


def toy_costs(path: Path, **conditions: str) -> Path:
    """Costs of ``toy``, measured as it is configured unless said otherwise."""
    stated = {"model": "toy", "dtype": "float32", "layout": "padded", "device_kind": "cpu"}
    points = tuple(CostPoint((("batch", n), ("seq", 8 * n)), 0.01 * n) for n in (1, 2, 4))
    CostTable({**stated, **conditions}, ("batch", "seq"), points).write(path)
    return path


def test_simulate_takes_costs_of_the_model_in_use(
    service: Path, arrivals: Path, tmp_path: Path
) -> None:
    costs = toy_costs(tmp_path / "costs.json", torch="2.13", threads="7")
    arguments = ("simulate", service, "--model", "toy", "--trace", arrivals, "--json", "-")
    result = run(*arguments, "--costs", costs)
    assert "measured: 3 batches" in json.loads(result.stdout)["cost"]


@pytest.mark.parametrize(
    ("key", "value", "here"),
    [
        ("model", "another", "toy"),
        ("dtype", "bfloat16", "float32"),
        ("layout", "packed", "padded"),
        ("tier", "eager", "compiled"),
        ("device_kind", "cuda", "cpu"),
    ],
)
def test_simulate_refuses_costs_that_were_measured_for_something_else(
    key: str, value: str, here: str, service: Path, arrivals: Path, tmp_path: Path
) -> None:
    costs = toy_costs(tmp_path / "costs.json", **{key: value})
    arguments = ("simulate", service, "--model", "toy", "--trace", arrivals)
    result = run(*arguments, "--costs", costs)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"costs.json: measured for {key} {value!r}, here it is {here!r}" in result.stderr
    assert "shapeserve profile CONFIG.yaml" in result.stderr


def test_simulate_refuses_costs_along_other_axes(
    service: Path, arrivals: Path, tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    point = CostPoint((("batch", 1), ("frames", 8)), 0.01)
    CostTable({}, ("batch", "frames"), (point,)).write(costs)
    arguments = ("simulate", service, "--model", "toy", "--trace", arrivals)
    result = run(*arguments, "--costs", costs)
    assert result.exit_code == 2
    assert "measured along batch, frames, the batches here have batch, seq" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speed", "nan"), "no finite number"),
        (("--replicas", "10001"), "not in the range"),
        (("--json", "/none/x.json"), "no writable directory /none"),
    ],
)
def test_what_simulate_cannot_do_is_refused_at_once(
    service: Path, arrivals: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run("simulate", service, "--model", "toy", "--trace", arrivals, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(("command", "option"), [("simulate", "--trace"), ("plan", "--lengths")])
def test_a_result_is_not_written_over_what_it_is_of(
    service: Path, arrivals: Path, command: str, option: str
) -> None:
    for target, name in ((arrivals, option), (service, "CONFIG.yaml")):
        before = target.read_bytes()
        result = run(command, service, option, arrivals, "--json", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{name} is the same file" in result.stderr
        assert target.read_bytes() == before


def test_simulate_asks_which_of_several_models(service: Path, arrivals: Path) -> None:
    result = run("simulate", service, "--trace", arrivals)
    assert result.exit_code == 2
    assert "--model not given: 2 models match; choose one of toy, other" in result.stderr
    result = run("simulate", service, "--trace", arrivals, "--model", "other")
    assert result.exit_code == 2
    assert "the trace has the axes seq, other has height, width" in result.stderr


def test_a_histogram_cannot_be_simulated(service: Path, data_dir: Path) -> None:
    result = run("simulate", service, "--model", "toy", "--trace", data_dir / "q_xquad.csv.gz")
    assert result.exit_code == 2
    assert "a histogram has no times" in result.stderr
