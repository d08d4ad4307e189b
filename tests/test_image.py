"""The Dockerfile: what it names exists, and its steps make a service that runs as it says."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from image_steps import copied, is_sent, last_stage, read_steps, sent_files, variables

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
    import subprocess

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
