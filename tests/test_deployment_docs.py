"""The commands of docs/deployment.md are commands, with options and files that exist."""

import re
import shlex
import warnings
from pathlib import Path

import click
import pytest

from shapeserve.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "deployment.md").read_text()
ASIDES = {"docker", "curl", "command", "kubectl"}  # by other tests, or not to be had here


def commands() -> list[list[str]]:
    """Return the commands, without comments and assignments."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL))
    inline = re.findall(r"`((?:shapeserve|serve|ray) \w+ [^`]+)`", TEXT)
    lines = [part for line in blocks.splitlines() for part in line.split("&&")]
    words = [shlex.split(line, comments=True) for line in [*lines, *inline]]
    return [line for line in words if line and line[0] != "export"]


def group_of(program: str) -> click.Group:
    if program == "shapeserve":
        return main
    from ray.scripts.scripts import cli as ray
    from ray.serve.scripts import cli as serve

    return {"ray": ray, "serve": serve}[program]


@pytest.mark.parametrize("line", commands(), ids=" ".join)
def test_a_command_of_the_guide_is_one(line: list[str]) -> None:
    program, *arguments = line
    if program in ASIDES:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, when it is imported
        command = group_of(program).commands[arguments[0]]
    command.make_context(arguments[0], arguments[1:])  # reads the options, runs nothing


def test_the_files_that_the_guide_names_are_there() -> None:
    named = set(re.findall(r"(?<![\w/.])((?:deploy|tests)/[\w./-]+[\w])", TEXT))
    assert {"deploy/serve/cpu.yaml", "deploy/kubernetes/overlays/cpu"} <= named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_guide_has_a_row_for_every_serve_config_file() -> None:
    files = {path.name for path in (ROOT / "deploy" / "serve").glob("*.yaml")}
    assert set(re.findall(r"\(\.\./deploy/serve/([\w.-]+)\)", TEXT)) == files


def test_the_variables_of_the_guide_are_those_of_the_manifests() -> None:
    manifest = (ROOT / "deploy" / "kubernetes" / "base" / "rayservice.yaml").read_text()
    exported = set(re.findall(r"\b(RAY_SERVE_\w+)=", TEXT))
    assert len(exported) == 5
    assert [name for name in exported if f"name: {name}" not in manifest] == []
