"""``python -m shapeserve.monitoring DIR`` writes the rules and the dashboard below DIR."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from shapeserve.errors import ConfigError
from shapeserve.monitoring.files import generated_files
from shapeserve.monitoring.targets import Targets

RUNBOOKS = "docs/runbooks.md"


def main(arguments: list[str] | None = None) -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shapeserve.monitoring", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument(
        "--runbooks",
        default=RUNBOOKS,
        help=f"where your copy of {RUNBOOKS} can be read; alerts link to it",
    )
    for target in fields(Targets):
        help_ = f"{target.metadata['help']} (%(default)g)".replace("%)", "%%)")
        name = "--" + target.name.replace("_", "-")
        parser.add_argument(name, type=type(target.default), default=target.default, help=help_)
    given = vars(parser.parse_args(arguments))
    directory, runbooks = given.pop("directory"), given.pop("runbooks")
    try:
        files = generated_files(Targets(**given), runbooks)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        print(
            f"error: DIR={directory}: {error.filename} cannot be written ({error.strerror}); "
            "give a directory that can",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
