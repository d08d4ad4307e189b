"""The module direction of ARCHITECTURE.md, and what importing a module may cost."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shapeserve

ROOT = Path(shapeserve.__file__).parent
ARCHITECTURE = ROOT.parent / "ARCHITECTURE.md"
# Facades: they re-export from below and nothing may import from them.
FACADES = {"__init__", "__main__"}


def documented_order() -> list[str]:
    """Module names in the order of ARCHITECTURE.md's table (first column, in backquotes)."""
    table = ARCHITECTURE.read_text().split("## Modules", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)/?` \|", table, flags=re.MULTILINE)


def component(path: Path) -> str:
    """``shapeserve/config/load.py`` -> ``config``; ``shapeserve/errors.py`` -> ``errors``."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a file, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from shapeserve import plan` names a module by its alias.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


SOURCES = sorted(ROOT.rglob("*.py"))
COMPONENTS = sorted({component(path) for path in SOURCES} - FACADES)


def test_every_module_is_in_the_table_once_and_every_row_exists() -> None:
    assert sorted(documented_order()) == COMPONENTS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_rows_above_it(path: Path) -> None:
    order = documented_order()
    here = component(path)
    if here in FACADES:
        return
    allowed = set(order[: order.index(here) + 1])
    wrong = [
        f"{path}:{line}: {name}"
        for line, name in imports_of(path)
        if name.startswith("shapeserve.") and name.split(".")[1] not in allowed | {"__version__"}
    ]
    assert wrong == []


def test_only_serve_imports_ray() -> None:
    users = {
        component(path)
        for path in SOURCES
        for _, name in imports_of(path)
        if name.split(".")[0] == "ray"
    }
    assert users <= {"serve"}


# What a person types into a command, or writes into a configuration, is no client's.
COMMANDS = {ROOT / "cli" / "fetch.py", ROOT / "explain" / "order.py"}


def test_i8_nothing_unpickles_evaluates_or_fetches() -> None:
    modules = {"pickle", "marshal", "shelve", "urllib", "requests", "httpx", "subprocess"}
    imported = [
        f"{path}:{line}: {name}"
        for path in SOURCES
        for line, name in imports_of(path)
        if name.split(".")[0] in modules and path not in COMMANDS
    ]
    called = [
        f"{path}:{node.lineno}: {node.func.id}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"eval", "exec", "compile", "__import__"}
    ]
    assert imported + called == []


def loaded_by(statement: str) -> set[str]:
    """Which of torch, ray and transformers a fresh interpreter holds after ``statement``."""
    code = (
        f"import sys; {statement}; print(*({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    assert loaded_by("import shapeserve") == set()
    assert loaded_by("from shapeserve import ServeConfig") == set()


def test_the_decision_modules_load_neither_torch_nor_ray() -> None:
    order = documented_order()
    names = order[: order.index("dispatch") + 1]
    assert loaded_by("; ".join(f"import shapeserve.{name}" for name in names)) == set()


@pytest.mark.parametrize(
    "name", ["batcher", "lanes", "models.spec", "protocols", "traces", "plan", "tuning", "cli"]
)
def test_what_needs_no_device_loads_neither_torch_nor_ray(name: str) -> None:
    assert loaded_by(f"import shapeserve.{name}") == set()


def test_the_engine_runs_without_ray() -> None:
    assert "ray" not in loaded_by("from shapeserve import Engine")


def test_public_names_are_sorted_and_resolve() -> None:
    assert shapeserve.__all__ == sorted(shapeserve.__all__)
    assert [name for name in shapeserve.__all__ if getattr(shapeserve, name) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        shapeserve.Engin  # noqa: B018
