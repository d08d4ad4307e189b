"""Every command in the documents is one; those that need no service say what the page shows."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml
from click.testing import CliRunner

from shapeserve.cli import main
from shapeserve.protocols import http

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("benchmarks/*.md"))
PROGRAMS = {"shapeserve", "python", "make", "serve", "ray", "curl", "prometheus"}
PATHS = {*http.PATHS, http.OIP_MODEL, http.COMPILE, http.POLICY}
# What the examples find beside them.
FILES = {
    "enc_rag_mix.csv.gz": "benchmarks/data/traces/enc_rag_mix.csv.gz",
    "costs.json": "benchmarks/data/costs/minilm-cpu-1-thread.json",
}


def blocks(page: Path) -> list[str]:
    """Return what the code blocks hold that have no language, or are for a shell."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [code.replace("\\\n", " ") for language, code in found if language in ("", "bash")]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command, without assignments, redirections and comments."""
    lines = [line.removeprefix("$ ") for code in blocks(page) for line in code.splitlines()]
    lines += re.findall(r"`((?:shapeserve|serve|ray|make) [a-z]+(?: [^`]*)?)`", page.read_text())
    for line in lines:
        for part in re.split(r" && | \| | > | & | &$|; ", line):
            if not re.match(rf"\s*(?:{'|'.join(PROGRAMS)}) (?!\d)", part):
                continue
            if "'{" in part:  # the body of a request, over several lines
                part = part.partition("-d ")[0]
            yield shlex.split(part.partition(" # ")[0])


EVERY = [
    pytest.param(page, words, id=f"{page.stem}: {' '.join(words)[:90]}")
    for page in PAGES
    for words in commands(page)
]


def test_there_are_commands_on_the_pages_that_should_have_some() -> None:
    seen = {p.values[0].name for p in EVERY}  # type: ignore[union-attr]
    assert {"README.md", "tuning.md", "walkthrough.md", "deployment.md", "monitoring.md"} <= seen
    assert len(EVERY) > 60


@pytest.mark.parametrize(("page", "words"), EVERY)
def test_a_command_names_options_paths_and_files_that_exist(page: Path, words: list[str]) -> None:
    program, *arguments = words
    check = {
        "make": is_verb,
        "curl": asks_for_a_path,
        "python": is_script,
        "prometheus": names_its_configuration,
    }.get(program, lambda given: has_options(program, given))
    check(arguments)


def is_verb(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = [word for word in arguments if "=" not in word and word.islower()]
    assert [v for v in verbs[:1] if not re.search(rf"^{v}:", makefile, re.MULTILINE)] == []


def asks_for_a_path(arguments: list[str]) -> None:
    (url,) = [word for word in arguments if re.match(r"(http://)?(localhost|127\.0\.0\.1):", word)]
    path = urlsplit(url if "//" in url else "//" + url).path
    patterns = [re.sub(r"\{\w+\}", "[^/]+", known) for known in PATHS]
    assert any(re.fullmatch(pattern, path) for pattern in patterns), path


def is_script(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        path = ROOT / arguments[1].replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        path = ROOT / arguments[0]
    assert path.is_file()
    beside = "".join(file.read_text() for file in path.parent.glob("*.py"))  # some share options
    options = [word for word in arguments if word.startswith("--") and word != "--help"]
    # An option is written as such, or made from the name of a field.
    unknown = [o for o in options if o not in beside and o[2:].replace("-", "_") not in beside]
    assert unknown == []
    files = [word for word in arguments if re.match(r"(deploy|benchmarks)/", word)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def names_its_configuration(arguments: list[str]) -> None:
    (file,) = [a.partition("=")[2] for a in arguments if a.startswith("--config.file=")]
    assert (ROOT / file).is_file()


def has_options(program: str, arguments: list[str]) -> None:
    command = group_of(program).commands[arguments[0]]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = [word.strip("[]").partition("=")[0] for word in arguments[1:]]
    options = {word for word in given if re.match(r"--?[a-z]", word)}
    assert options - known - {"--help"} == set()
    files = [w for w in arguments[1:] if re.match(r"(deploy|benchmarks|docs)/[\w./-]+\.\w+$", w)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def group_of(program: str) -> click.Group:
    if program == "shapeserve":
        return main
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, when it is imported
        from ray.scripts.scripts import cli as ray
        from ray.serve.scripts import cli as serve
    return {"ray": ray, "serve": serve}[program]


# --- what they print


def shown() -> list[tuple[list[str], list[str]]]:
    """Return the commands of docs/tuning.md that need no model, with what the page shows."""
    found = []
    for code in blocks(ROOT / "docs" / "tuning.md"):
        first, _, rest = code.partition("\n")
        if first.startswith(("$ shapeserve tune", "$ shapeserve simulate")):
            found.append((shlex.split(first[2:]), rest.splitlines()))
    return found


def policy_on_the_page() -> dict[str, Any]:
    """Return the policy that the guide tunes, and puts into the configuration that it simulates."""
    (policy,) = re.findall(
        r"```yaml\n(# models\[\]\.policy.*?)```",
        (ROOT / "docs" / "tuning.md").read_text(),
        flags=re.DOTALL,
    )
    return dict(yaml.safe_load(policy))


SHOWN = shown()
SLOW = {"p99", "packed"}  # they simulate each of many policies


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            words,
            said,
            id=" ".join(words[3:]),
            marks=[pytest.mark.slow] * bool(SLOW & set(words)),
        )
        for words, said in SHOWN
    ],
)
def test_a_command_of_the_tuning_guide_prints_what_the_guide_shows(
    words: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in FILES.items():
        shutil.copy(ROOT / source, tmp_path / name)
    service = yaml.safe_load((ROOT / "deploy" / "examples" / "minilm.yaml").read_text())
    service["models"][0]["policy"] = policy_on_the_page()
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(service))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    result = CliRunner().invoke(main, words[1:])
    printed = [line.rstrip() for line in result.output.splitlines()]
    missing = [line for line in said if line.strip() not in ("…", "") and line not in printed]
    assert missing == [], result.output


# --- what takes minutes


def run(command: str, **more: Any) -> str:
    """Run a line of a shell as a reader would, in the checkout; return what it printed."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=1200,
        **more,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("model", ["image_encoder", "audio_encoder"])
def test_the_examples_of_images_and_audio_run_as_their_page_says(model: str) -> None:
    text = "\n".join(blocks(ROOT / "docs" / "models.md"))
    (command,) = [line for line in text.splitlines() if f"{model}.yaml " in line]
    assert re.search(r"recompiles on requests +0\b", run(command))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_quick_start_of_the_readme_answers() -> None:
    code = "\n".join(blocks(ROOT / "README.md"))
    (serve,) = re.findall(r"^shapeserve serve .*$", code, flags=re.MULTILINE)
    (ask,) = re.findall(r"^curl .*\n? *-d .*$", code, flags=re.MULTILINE)
    said = run(
        f"{serve} & SERVICE=$!\n"
        "until curl -fs localhost:8000/v2/health/ready > /dev/null; do\n"
        "  kill -0 $SERVICE; sleep 1\n"
        f"done\n{ask}\nkill $SERVICE\nwait $SERVICE\n"
    )
    answer = json.loads(said[said.index('{"object"') :].splitlines()[0])
    assert [len(item["embedding"]) for item in answer["data"]] == [384, 384]
