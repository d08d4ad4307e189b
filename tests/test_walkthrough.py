"""docs/walkthrough.md, command by command: a service, Prometheus, an alert, tuning, a rollout."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_process import needs_prometheus

from shapeserve.metrics import CATALOGUE

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "walkthrough.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
PORTS = (6379, 8000, 8265, 9090)
LIMIT_S = 3600


def test_the_walkthrough_names_files_that_are_there() -> None:
    named = set(re.findall(r"(?<![\w/.])((?:deploy|benchmarks)/[\w./-]+\w)", "".join(BLOCKS)))
    assert "deploy/examples/walkthrough.yaml" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_walkthrough_asks_prometheus_for_what_there_is() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    queries = " ".join(re.findall(r"^ask '(.*)'$", "".join(BLOCKS), flags=re.MULTILINE))
    named = re.findall(r"model_axis:[\w:]+|\bshapeserve_\w+", queries)
    assert len(named) >= 4
    known = {d.name for d in CATALOGUE}
    assert [n for n in named if n not in known and f"record: {n}\n" not in rules] == []
    assert "alert: ShapeserveRecompiled\n" in rules


def test_the_walkthrough_serves_the_cpu_file_with_other_buckets_and_a_switch() -> None:
    import yaml

    ours = yaml.safe_load((ROOT / "deploy" / "examples" / "walkthrough.yaml").read_text())
    file = yaml.safe_load((ROOT / "deploy" / "serve" / "cpu.yaml").read_text())
    assert ours["applications"][1]["import_path"] == "drill:app"
    ours["http_options"]["host"] = file["http_options"]["host"]
    ours["applications"][1]["import_path"] = file["applications"][1]["import_path"]
    ours["applications"][1]["deployments"][0]["user_config"] = {"policies": {}}
    assert ours == file


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A directory with the files of the checkout, and this environment as its ``.venv``."""
    for name in ("benchmarks", "deploy", "shapeserve"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(
        f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    )
    yield tmp_path
    for pid in started_below(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree("/tmp/shapeserve-tsdb", ignore_errors=True)


def started_below(home: Path) -> list[int]:
    """Return the processes whose home is this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@needs_prometheus
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_an_alert_fires_and_ends_and_a_tuned_policy_is_rolled_out_without_a_failed_request(
    checkout: Path,
) -> None:
    for port in PORTS:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is taken"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(BLOCKS)],
        cwd=checkout,
        env={**os.environ, "HOME": str(checkout), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=(log := checkout / "walkthrough.log").open("wb"),
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S - 60,
    )
    said = log.read_text()
    assert done.returncode == 0, said[-6000:]
    assert re.search(r'ALERTS\{alertname="ShapeserveRecompiled".*reason="global_state"', said)
    before, after = re.findall(r'axis="seq", model="all-MiniLM-L6-v2"\} => ([\d.]+)', said)
    assert float(after) < float(before)
    assert re.search(r"^[\d:]+ [1-9]\d+ answered, 0 failed; .*\nok$", said, flags=re.MULTILINE)
