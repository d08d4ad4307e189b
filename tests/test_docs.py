"""What the documents claim, as far as a machine can check it."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py")))


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 150), ("ARCHITECTURE.md", 150), ("CONTRIBUTING.md", 60)]
)
def test_a_document_stays_short_enough_to_be_read(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_every_make_verb_that_is_documented_exists() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documented = {
        verb
        for name in ("README.md", "CONTRIBUTING.md")
        for verb in re.findall(
            r"(?:^|`)make ([a-z][a-z-]*)", (ROOT / name).read_text(), re.MULTILINE
        )
    }
    assert {"demo", "test", "check"} <= documented <= verbs


def test_every_test_that_is_documented_exists() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"`(test_\w+)`", path.read_text()):
            assert f"def {name}(" in TESTS, f"{path.name}: {name}"


@pytest.mark.parametrize("invariant", range(1, 9))
def test_every_invariant_has_a_test_that_names_it(invariant: int) -> None:
    assert f"**I{invariant}**" in (ROOT / "ARCHITECTURE.md").read_text()
    assert re.search(rf"def test_(?:i\d_)*i{invariant}_", TESTS)


def test_the_readme_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tiny  # imports torch, which nothing else here needs

    from shapeserve import ServeConfig

    model = {"path": str(tiny.write_model(tmp_path / "tiny")), "compile": {"tier": "eager"}}
    small = ServeConfig.from_dict({"models": [model]})

    def for_model_dir(*_: Any) -> ServeConfig:
        return small

    monkeypatch.setattr(ServeConfig, "for_model_dir", staticmethod(for_model_dir))
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
