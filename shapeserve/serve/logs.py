"""Where log lines go and what they look like: in Ray's processes, and in the command that starts.

Ray Serve writes the lines of replicas and proxies, ours among them; here is what it is told, and
the same form for the lines of the process that starts it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import orjson

from shapeserve.config import HttpConfig

OURS = "shapeserve"
RAYS = "ray.serve"


def ray_logging(serving: HttpConfig) -> dict[str, Any]:
    """Return the ``logging_config`` of a Serve config file."""
    place = {} if serving.log_dir is None else {"logs_dir": serving.log_dir}
    return {
        "encoding": serving.log_format.upper(),
        "log_level": serving.log_level,
        "enable_access_log": serving.access_log,
        **place,
    }


def log_with_ray() -> None:
    """Send our log lines where Ray Serve's go: its files, its format, the request id in them.

    Whatever it changes there later, level and form included, is then changed for ours too.
    """
    ours = logging.getLogger(OURS)
    ours.parent = logging.getLogger(RAYS)
    ours.setLevel(logging.NOTSET)


@contextmanager
def logging_to(stream: TextIO, serving: HttpConfig) -> Iterator[None]:
    """Write our lines of this process, which is none of Ray's, to its stderr.

    Args:
        stream: its stderr.
        serving: in which form, and the least that is written.
    """
    handler = logging.StreamHandler(stream)
    if serving.log_format == "json":
        handler.setFormatter(JsonFormatter())
    ours = logging.getLogger(OURS)
    before = ours.handlers, ours.propagate, ours.level
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(serving.log_level)
    try:
        yield
    finally:
        ours.handlers, ours.propagate, level = before
        ours.setLevel(level)


def rays_as_ours() -> None:
    """Write what Ray logs in this process as our lines are written; it must have been started."""
    for name in ("ray", RAYS):
        rays = logging.getLogger(name)
        rays.handlers, rays.propagate = list(logging.getLogger(OURS).handlers), False


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names that Ray gives the same things."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "component_name": "command",
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class LineLogger:
    """A file of which every line becomes a line of the log; for what is printed to people."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that end in ``text``."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            self._logger.info("%s", line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: a line is logged as soon as it ends."""

    def isatty(self) -> bool:
        """Say that nobody looks at it."""
        return False
