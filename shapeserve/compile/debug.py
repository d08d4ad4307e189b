"""Torch's own traces and logs, kept or printed on request."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._logging import _internal as torch_logging

from shapeserve.errors import ConfigError

log = logging.getLogger("shapeserve.compile")

# What TORCH_LOGS calls them; the trace for tlparse has everything else.
_ARTEFACTS = {"graph_breaks", "recompiles", "guards", "graph_code", "output_code"}


def log_all_recompiles() -> None:
    """Have torch print every recompile of this process, with the guard that failed."""
    if "TORCH_LOGS" in os.environ:
        log.warning("TORCH_LOGS is set and wins over log_recompiles; add recompiles to it")
    torch_logging.set_logs(recompiles=True)


@contextmanager
def keep_artefacts(directory: str | None, model: str) -> Iterator[None]:
    """Keep what torch logs meanwhile in ``directory/model``: its trace, and a text log.

    Args:
        directory: None keeps nothing.
        model: name of the sub-directory; what a path cannot hold becomes ``_``.

    Raises:
        ConfigError: the directory cannot be written.
    """
    if directory is None:
        yield
        return
    target = Path(directory) / re.sub(r"[^\w.-]", "_", model)
    try:
        target.mkdir(parents=True, exist_ok=True)
        text = logging.FileHandler(target / f"torch_logs.{os.getpid()}.txt")
    except OSError as error:
        raise ConfigError(
            f"compile.debug_dir: {target} cannot be written: {error.strerror}; give another one"
        ) from error
    text.setFormatter(logging.Formatter("%(asctime)s %(name)s\n%(message)s\n"))
    trace = torch_logging.LazyTraceHandler(str(target))  # as TORCH_TRACE makes it
    trace.setFormatter(torch_logging.TorchLogsFormatter(trace=True))
    log.info("torch's trace and logs of the warm-up of %s go to %s", model, target)
    torch_logging.trace_log.addHandler(trace)
    try:
        with _also_to(text):
            yield
    finally:
        torch_logging.trace_log.removeHandler(trace)
        trace.close()
        text.close()


@contextmanager
def _also_to(handler: logging.Handler) -> Iterator[None]:
    """Switch the artefacts' loggers on for ``handler``, and back to what they were."""
    names: set[str] = torch_logging.log_registry.get_artifact_log_qnames()  # type: ignore[no-untyped-call]
    loggers = [logging.getLogger(n) for n in names if n.rpartition(".__")[2] in _ARTEFACTS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        # One that is on already keeps printing; others must not begin to.
        logger.propagate = logger.propagate and logger.isEnabledFor(logging.DEBUG)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
