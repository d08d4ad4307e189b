"""Runs the steps of the Dockerfile without Docker: in directories, with chroot. Needs root.

What differs from a real build: the base image is whatever directory is given (no registry is
asked), there are no layers, the network is this machine's, and only the instructions that the
Dockerfile uses are known; any other is an error.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dockerfile_parse import DockerfileParser

Step = tuple[str, str]  # instruction, value
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def read_steps(path: Path) -> list[Step]:
    """Return the instructions of a Dockerfile, continued lines joined, without comments."""
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    return [(s["instruction"], s["value"]) for s in structure if s["instruction"] != "COMMENT"]


def last_stage(steps: Sequence[Step]) -> dict[str, str]:
    """Return instruction -> value of the image that comes out; of several, the last."""
    first = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    return dict(steps[first:])


def variables(value: str) -> dict[str, str]:
    """Return what an ENV or ARG sets."""
    pairs = (word.partition("=") for word in shlex.split(value))
    return {name: text for name, _, text in pairs}


def substituted(value: str, known: Mapping[str, str]) -> str:
    """Return a value with ``$NAME`` and ``${NAME}`` replaced, as Docker does outside of RUN."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), value)


def is_sent(path: str, rules: Sequence[str]) -> bool:
    """Return whether .dockerignore lets a file into the build."""
    sent = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        names = {pattern, pattern.removeprefix("**/")} | {pattern.removesuffix("/**") + "/*"}
        parents = [path, *(str(parent) for parent in Path(path).parents)]
        if any(fnmatch.fnmatch(part, name) for part in parents for name in names):
            sent = rule.startswith("!")
    return sent


def sent_files(root: Path) -> list[str]:
    """Return the files of the repository that a build gets to see."""
    rules = [r for r in (root / ".dockerignore").read_text().split() if not r.startswith("#")]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=root,
        text=True,
        capture_output=True,
        check=True,
    )
    return [path for path in listed.stdout.splitlines() if is_sent(path, rules)]


def copied(source: str, sent: Sequence[str]) -> list[str]:
    """Return the files that COPY takes for one source: itself, or all below it."""
    found = [path for path in sent if path == source or path.startswith(source + "/")]
    if not found:
        raise FileNotFoundError(f"COPY {source}: nothing of that name is sent to the build")
    return found


class Builder:
    """Executes the steps, stage by stage.

    Args:
        context: the repository.
        base: a root directory with a Linux system, in place of the base image.
        work: where the stages are made.
        arguments: values of ARGs, as ``--build-arg`` gives them.
        shared: path of this machine -> where the steps see it, such as a directory of wheels.
        environment: further variables of the steps.
    """

    def __init__(
        self,
        context: Path,
        base: Path,
        work: Path,
        *,
        arguments: Mapping[str, str],
        shared: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self._context, self._base, self._work = context, base, work
        self._arguments, self._shared = dict(arguments), dict(shared)
        self._environment = dict(environment)
        self._stages: dict[str, tuple[Path, dict[str, str]]] = {}
        self.root = base
        self.env: dict[str, str] = {}
        self.user = "0:0"
        self.directory = "/"
        self.done: list[Step] = []

    def build(self, steps: Sequence[Step]) -> None:
        """Execute all steps; afterwards ``root`` is the image."""
        for name, value in steps:
            getattr(self, f"_{name.lower()}")(value)
            self.done.append((name, value))

    def run(self, command: Sequence[str], *, read_only: bool = False) -> subprocess.Popen[str]:
        """Start a command as the image does: its user, its directory, its variables."""
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-euc", self._mounts(read_only), "sh", *command],
            env={"PATH": DEFAULT_PATH, **self._environment, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _mounts(self, read_only: bool) -> str:
        """Return a shell script that makes the root and becomes the command in ``$@``."""
        root = shlex.quote(str(self.root))
        lines = [f"mount --rbind {root} {root}"]
        if read_only:
            lines += [f"mount -o remount,bind,ro {root}", f"mount -t tmpfs tmpfs {root}/tmp"]
        lines += [f"mount --rbind /{name} {root}/{name}" for name in ("proc", "dev")]
        lines += [f"mount --bind {path} {root}{place}" for path, place in self._shared.items()]
        enter = 'cd "$0" && exec "$@"'
        lines.append(
            f"exec chroot --userspec={self.user} {root} sh -c {shlex.quote(enter)} "
            f'{shlex.quote(self.directory)} "$@"'
        )
        return "\n".join(lines)

    # --- instructions -------------------------------------------------------------------------

    def _from(self, value: str) -> None:
        name, _, alias = substituted(value, self._arguments).partition(" AS ")
        root, env = self._stages.get(name, (self._base, {}))
        self.root = self._work / (alias or "image")
        subprocess.run(["cp", "-a", "--reflink=auto", root, self.root], check=True)
        self.env, self.user, self.directory = dict(env), "0:0", "/"
        for path, inner in self._shared.items():  # places to mount on
            place = self.root / inner.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if Path(path).is_dir():
                place.mkdir(exist_ok=True)
            else:
                place.touch()
        if alias:
            self._stages[alias] = (self.root, self.env)

    def _arg(self, value: str) -> None:
        for name, text in variables(value).items():
            self._arguments.setdefault(name, text)

    def _env(self, value: str) -> None:
        known = {"PATH": DEFAULT_PATH, **self.env}
        self.env.update(variables(substituted(value, known)))

    def _run(self, value: str) -> None:
        exported = [f"export {n}={shlex.quote(t)}\n" for n, t in self._arguments.items()]
        started = self.run(["sh", "-ec", "".join(exported) + value])
        said, _ = started.communicate()
        if started.returncode:
            raise RuntimeError(f"RUN {value}\nended with {started.returncode}:\n{said}")

    def _copy(self, value: str) -> None:
        *sources, target = shlex.split(value)
        into = self.root / (Path(self.directory) / target).relative_to("/")
        if sources[0].startswith("--from="):
            stage, _ = self._stages[sources.pop(0).removeprefix("--from=")]
            for source in sources:
                subprocess.run(["cp", "-a", stage / source.removeprefix("/"), into], check=True)
            return
        sent = sent_files(self._context)
        for source in sources:
            for path in copied(source, sent):
                inner = Path(path).relative_to(source) if path != source else Path(path).name
                place = into / inner
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._context / path, place)

    def _workdir(self, value: str) -> None:
        self.directory = value
        (self.root / value.removeprefix("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, value: str) -> None:
        self.user = value

    def _expose(self, value: str) -> None:
        pass

    def _healthcheck(self, value: str) -> None:
        """Started by the test, as CMD is."""

    _cmd = _healthcheck
