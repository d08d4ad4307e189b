"""What several commands share: the configuration, JSON output, progress."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.models.describe import describe

config_argument = click.argument("config_path", metavar="[CONFIG.yaml]", required=False)
model_option = click.option(
    "--model",
    metavar="DIR",
    help="Model directory instead of a configuration; or package:NAME, one in a Python package.",
)
json_option = click.option(
    "--json",
    "json_target",
    metavar="PATH|-",
    help="Write the result as JSON to PATH; - prints it instead of the table.",
)


class FiniteRange(click.FloatRange):
    """A number within bounds; ``nan`` and ``inf`` are within any for click."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def debug_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the switches that keep or print what torch says while it compiles."""
    keep = click.option(
        "--compile-debug-dir",
        metavar="DIR",
        help="Keep torch's trace (for tlparse) and logs of the compiles in DIR.",
    )
    show = click.option(
        "--log-recompiles",
        is_flag=True,
        help="Have torch print every recompile with the guard that failed.",
    )
    return keep(show(command))


def with_debug(config: ServeConfig, debug_dir: str | None, log_recompiles: bool) -> ServeConfig:
    """Return ``config`` with these switches on for every model."""
    changed: dict[str, Any] = {"log_recompiles": True} if log_recompiles else {}
    if debug_dir is not None:
        changed["debug_dir"] = str(Path(debug_dir).resolve())
    models = tuple(
        m.model_copy(update={"compile": m.compile.model_copy(update=changed)})
        for m in config.models
    )
    return config.model_copy(update={"models": models})


def load_config(config_path: str | None, model: str | None, name: str | None = None) -> ServeConfig:
    """Read the configuration that a command was given in one of its two ways.

    Raises:
        ConfigError: it is wrong, or ``name`` is given without ``model``.
        click.UsageError: neither or both ways were used.
    """
    if (config_path is None) == (model is None):
        raise click.UsageError("give either CONFIG.yaml or --model DIR")
    if model is not None:
        return ServeConfig.for_model_dir(model, name)
    if name is not None:
        raise click.UsageError("--name goes with --model; in CONFIG.yaml it is models[].name")
    return ServeConfig.from_yaml(str(config_path))


def choose_model(config: ServeConfig, name: str | None, option: str) -> ModelConfig:
    """Return the model of this name, or the only one.

    Raises:
        ConfigError: there is no such model, or several and no name.
    """
    named = {describe(model).name: model for model in config.models}
    chosen = [model for own, model in named.items() if name in (None, own)]
    if len(chosen) != 1:
        raise ConfigError(
            f"{option} {name or 'not given'}: {len(chosen)} models match; choose one of "
            f"{', '.join(named)}"
        )
    return chosen[0]


def check_target(option: str, target: str | None) -> None:
    """Refuse a file that cannot be written, before the minutes that its content takes.

    Raises:
        ConfigError: its directory does not exist or is not writable, it is a directory, or it is
            ``-``, which only JSON can be written to.
    """
    if target is None or (target == "-" and option == "--json"):
        return
    if target == "-":
        raise ConfigError(f"{option} -: only --json can be printed; give a path")
    path = Path(target)
    directory = path.parent
    if path.is_dir() or not directory.is_dir() or not os.access(directory, os.W_OK):
        what = "it is a directory" if path.is_dir() else f"no writable directory {directory}"
        raise ConfigError(f"{option} {target}: cannot be written: {what}; give another path")


def check_apart(reads: Mapping[str, str | None], writes: Mapping[str, str | None]) -> None:
    """Refuse to write over what was read, such as recorded traffic, or twice to one file.

    Args:
        reads: option -> file that the command reads; None if it was not given.
        writes: option -> file that it writes.

    Raises:
        ConfigError: it names both options.
    """
    taken = {Path(path).resolve(): option for option, path in reads.items() if path is not None}
    for option, target in writes.items():
        if target is None or target == "-" or not _is_plain(Path(target)):
            continue
        other = taken.setdefault(Path(target).resolve(), option)
        if other != option:
            raise ConfigError(f"{option} {target}: {other} is the same file; give another path")


def _is_plain(path: Path) -> bool:
    """Return whether writing replaces what is there: not so for a device such as /dev/stdout."""
    return path.is_file() or not path.exists()


def write_json(data: Any, target: str) -> None:
    """Write ``data`` to a file, or to stdout for ``-``.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(data, indent=2)
    if target == "-":
        click.echo(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--json {target}: cannot be written: {error.strerror}; give another path, or -"
        ) from error


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while something takes long, if that is a terminal.

    Yields what is told how many steps of how many are done.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
