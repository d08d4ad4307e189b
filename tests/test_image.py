"""The Dockerfile: what it names exists, and its steps make a service that runs as it says."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_container import Container
from image_steps import (
    Builder,
    copied,
    is_sent,
    last_stage,
    read_steps,
    sent_files,
    variables,
)
from service_process import eventually

from shapeserve.cli import main
from shapeserve.protocols import http

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "Dockerfile"
STEPS = read_steps(DOCKERFILE)
IMAGE = last_stage(STEPS)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ARGUMENTS = {
    name: value for step, text in STEPS if step == "ARG" for name, value in variables(text).items()
}


def package(requirement: str) -> str:
    """Return the name in a requirement, as constraints.txt spells it."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.partition("==") for line in lines if not line.startswith("#"))
    return {name.lower(): version for name, _, version in pairs}


def test_hadolint_finds_nothing() -> None:
    tool = shutil.which("hadolint", path=f"{Path(sys.executable).parent}") or "hadolint"
    done = subprocess.run(
        [tool, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sent = sent_files(ROOT)
    sources = [
        source
        for name, value in STEPS
        if name == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert {path for source in sources for path in copied(source, sent)} == set(sent)
    assert {"shapeserve/serve/builder.py", "pyproject.toml"} <= set(sent)
    with pytest.raises(FileNotFoundError):
        copied("tests", sent)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("shapeserve/serve/builder.py", True),
        ("pyproject.toml", True),
        ("tests/conftest.py", False),
        ("shapeserve/__pycache__/x.pyc", False),
        ("shapeserve/serve/__pycache__/x.pyc", False),
        (".git/config", False),
    ],
)
def test_dockerignore_sends_the_package_and_nothing_else(path: str, sent: bool) -> None:
    assert is_sent(path, (ROOT / ".dockerignore").read_text().split()) == sent


def test_every_package_of_the_image_has_its_version_in_constraints() -> None:
    """torch has it in the Dockerfile: its build is chosen by whoever builds."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["hf"], *extras["demo"], "hatchling"]
    names = {package(requirement) for requirement in wanted}
    assert names - pins().keys() == {"torch"}
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH  ?= {ARGUMENTS['TORCH']}\n" in makefile
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", ARGUMENTS["BASE"])
    assert set(ARGUMENTS["EXTRAS"].split(",")) <= extras.keys()


def test_packages_are_installed_before_the_source_is_copied() -> None:
    """Or every change of the source would install them all again."""
    install = [i for i, (n, v) in enumerate(STEPS) if n == "RUN" and "requirements.txt" in v]
    source = [i for i, (n, v) in enumerate(STEPS) if n == "COPY" and v.startswith("shapeserve")]
    assert max(install) < min(source)


def test_the_image_is_run_by_a_user_without_rights_given_by_number() -> None:
    user, _, group = IMAGE["USER"].partition(":")
    assert user.isdecimal()
    assert int(user) == int(group) > 0
    assert f"--uid {user} " in IMAGE["RUN"]


def test_the_command_is_one_of_ours_and_its_port_is_exposed() -> None:
    program, command, *_ = json.loads(IMAGE["CMD"])
    assert program in PROJECT["scripts"]
    assert command in main.commands
    assert f"http://127.0.0.1:{IMAGE['EXPOSE']}{http.LIVE}'" in IMAGE["HEALTHCHECK"]


# --- every step, executed -------------------------------------------------------------------------

MISSING = [t for t in ("debootstrap", "unshare", "nsenter", "ip") if not shutil.which(t)]
WHY = f"runs as root with debootstrap and util-linux; missing: {MISSING or 'root'}"
# What the overlays of deploy/kubernetes mount.
WRITABLE = ("/tmp", "/var/cache/shapeserve")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """The image on a bare Debian, which takes the way of bases that have no Python."""
    work = Path(tempfile.mkdtemp(prefix="image-", dir="/var/tmp"))
    base = work / "debian"
    mirror = "http://deb.debian.org/debian"
    debootstrap = ["debootstrap", "--variant=minbase", "bookworm", str(base), mirror]
    subprocess.run(debootstrap, check=True, capture_output=True)
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    shared = dict.fromkeys(("/etc/resolv.conf", "/etc/hosts", "/etc/xdg/pip"))
    shared |= {pip["PIP_FIND_LINKS"]: None} if "PIP_FIND_LINKS" in pip else {}
    places = {path: place or path for path, place in shared.items() if Path(path).exists()}
    if "PIP_CERT" in pip:  # not in its own place, where packages write
        places[pip["PIP_CERT"]] = pip["PIP_CERT"] = "/opt/ca.crt"
    # PyPI's torch, or the wheel that this machine has: download.pytorch.org may be out of reach.
    arguments = {"TORCH_INDEX": "https://pypi.org/simple", "EXTRAS": "hf,demo"}
    builder = Builder(ROOT, base, work, arguments=arguments, shared=places, environment=pip)
    try:
        builder.build(STEPS)
        yield builder
    finally:
        shutil.rmtree(work)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=WHY)
class TestBuilt:
    def test_every_step_was_executed(self, image: Builder) -> None:
        assert image.done == STEPS

    def test_a_login_shell_finds_the_programs_as_kuberay_needs(self, image: Builder) -> None:
        names = ["ray", "shapeserve", "shapeserve-haproxy"]
        found = image.run(["/bin/bash", "-lc", f"command -v {' '.join(names)} && id -u && id -g"])
        said, _ = found.communicate()
        assert said.split() == [*(f"/opt/venv/bin/{name}" for name in names), "10001", "10001"]

    def test_it_serves_from_a_read_only_root_without_rights_and_ends_with_sigterm(
        self, image: Builder, tmp_path: Path
    ) -> None:
        place = image.root / "etc/shapeserve/config.yaml"
        place.parent.mkdir()
        shutil.copy(ROOT / "deploy/examples/minilm.yaml", place)
        log = tmp_path / "log"
        container = Container(
            image,
            json.loads(IMAGE["CMD"]),
            writable=WRITABLE,
            environment={"HOME": "/tmp", "OMP_NUM_THREADS": "1"},
            log=log,
        )
        check = json.loads(IMAGE["HEALTHCHECK"].partition("CMD ")[2])
        try:
            eventually(lambda: container.call(*check).returncode == 0, 600)
            ready = [*check[:2], check[2].replace(http.LIVE, http.READY)]
            eventually(lambda: container.call(*ready).returncode == 0, 900)
            assert container.call("touch", "/opt/venv/x").returncode != 0
            asked = container.call("python3", "-c", ASK)
            assert (asked.stdout.strip(), asked.stderr) == ("384", "")
            assert container.terminate() == 0
        except AssertionError:
            sys.stderr.write(log.read_text()[-5000:])
            raise
        finally:
            container.stop()


ASK = """
import json, urllib.request
body = json.dumps({"model": "all-MiniLM-L6-v2", "input": "a text"}).encode()
request = urllib.request.Request("http://127.0.0.1:8000/v1/embeddings", body)
request.add_header("content-type", "application/json")
print(len(json.load(urllib.request.urlopen(request))["data"][0]["embedding"]))
"""
