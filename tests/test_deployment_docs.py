"""docs/deployment.md names files and variables that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "deployment.md").read_text()


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
