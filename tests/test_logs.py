"""Log lines: their form, where they go, and the id of the request that they are about."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import engines
import numpy as np
import orjson
import pytest
import tiny
from click.testing import CliRunner
from test_cli import FakeService
from test_frontend import Service

from shapeserve.cli import main
from shapeserve.config import ServeConfig
from shapeserve.errors import ConfigError, ModelError
from shapeserve.serve.launch import deploy_schema
from shapeserve.serve.logs import LineLogger, log_with_ray, logging_to, rays_as_ours

MODEL = {"name": "m", "path": "fake:x"}
log = logging.getLogger("shapeserve.test")


def config(**serving: Any) -> ServeConfig:
    return ServeConfig.from_dict({"models": [MODEL], "serve": serving})


def objects(text: str) -> list[dict[str, Any]]:
    """Every line of a log; fails if one is not a JSON object."""
    lines = [orjson.loads(line) for line in text.splitlines()]
    assert all(isinstance(line, dict) for line in lines)
    return lines


# --- what Ray is told -----------------------------------------------------------------------------


def test_by_default_ray_writes_text_without_a_line_for_every_request() -> None:
    assert deploy_schema(config())["logging_config"] == {
        "encoding": "TEXT",
        "log_level": "INFO",
        "enable_access_log": False,
    }


def test_the_keys_of_the_configuration_reach_ray(tmp_path: Path) -> None:
    told = config(log_format="json", log_level="DEBUG", access_log=True, log_dir=str(tmp_path))
    assert deploy_schema(told)["logging_config"] == {
        "encoding": "JSON",
        "log_level": "DEBUG",
        "enable_access_log": True,
        "logs_dir": str(tmp_path),
    }


@pytest.mark.parametrize(
    "serving", [{"log_format": "xml"}, {"log_level": "LOUD"}, {"access_log": "yes"}]
)
def test_other_words_are_refused(serving: dict[str, str]) -> None:
    (key,) = serving
    with pytest.raises(ConfigError, match=rf"serve\.{key}"):
        config(**serving)


def test_a_relative_log_dir_is_taken_from_the_config_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("models: [{path: package:json}]\nserve: {log_dir: logs}\n")
    assert ServeConfig.from_yaml(file).serve.log_dir == str(tmp_path / "logs")


@pytest.fixture
def _loggers() -> Iterator[None]:
    """Puts back what the functions under test change for the rest of a process."""
    loggers = [logging.getLogger(name) for name in ("shapeserve", "ray", "ray.serve")]
    before = [(x, x.parent, x.level, list(x.handlers), x.propagate) for x in loggers]
    yield
    for logger, parent, level, handlers, propagate in before:
        logger.parent, logger.handlers, logger.propagate = parent, handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("_loggers")
def test_our_lines_follow_rays_even_when_it_changes_level_and_files() -> None:
    log_with_ray()
    rays = logging.getLogger("ray.serve")
    for level, expected in ((logging.WARNING, "loud\n"), (logging.INFO, "quiet\nloud\n")):
        stream = io.StringIO()
        rays.handlers = [logging.StreamHandler(stream)]
        rays.setLevel(level)
        log.info("quiet")
        log.warning("loud")
        assert stream.getvalue() == expected


# --- the command ----------------------------------------------------------------------------------


def test_a_json_line_has_what_rays_have_and_stays_one_line() -> None:
    stream = io.StringIO()
    with logging_to(stream, config(log_format="json").serve):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it failed: %s", 'a "quote"\n')
    (line,) = objects(stream.getvalue())
    assert (line["levelname"], line["message"]) == ("ERROR", 'it failed: a "quote"\n')
    assert line["exc_text"].endswith("ValueError: two\nlines")
    assert {"asctime", "filename", "lineno", "process", "component_name"} <= line.keys()


def test_the_level_holds_for_the_command_and_ends_with_it() -> None:
    before = logging.getLogger("shapeserve").level
    stream = io.StringIO()
    with logging_to(stream, config(log_level="ERROR").serve):
        log.warning("quiet")
        log.error("loud")
    log.error("after")
    assert stream.getvalue() == "loud\n"
    assert logging.getLogger("shapeserve").level == before


@pytest.mark.usefixtures("_loggers")
def test_what_ray_logs_in_the_command_is_json_too() -> None:
    stream = io.StringIO()
    with logging_to(stream, config(log_format="json").serve):
        rays_as_ours()
        logging.getLogger("ray.serve").error("from Serve")
        logging.getLogger("ray.core").error("from Ray")
    assert [line["message"] for line in objects(stream.getvalue())] == ["from Serve", "from Ray"]


def test_printed_lines_become_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    file = LineLogger(log)
    with caplog.at_level(logging.INFO, "shapeserve"):
        for part in ("one, ", "two\n\nthr", "ee %d\n", "never ended"):
            file.write(part)
    assert [record.getMessage() for record in caplog.records] == ["one, two", "three %d"]
    assert not file.isatty()


def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception | None) -> Any:
    monkeypatch.setattr("shapeserve.cli.serve.start", lambda config: FakeService(config, failure))
    file = tmp_path / "service.yaml"
    file.write_text("models: [{path: package:json}]\nserve: {log_format: json}\n")
    return CliRunner().invoke(main, ["serve", str(file)])


def test_the_command_says_all_it_says_in_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = serve(monkeypatch, tmp_path, None)
    said = [line["message"] for line in objects(result.stderr)]
    assert said[0] == "starting on 127.0.0.1:8000, 1 replica(s)"
    assert [line for line in said if line.startswith(("warming up: verify 3/3", "ready after"))]
    assert said[-1] == "stopping: up to 10 s for what is in flight"
    assert result.exit_code == 0


@pytest.mark.parametrize(("error", "code"), [(ModelError("bad model"), 1), (ConfigError("x"), 2)])
def test_the_error_that_ends_the_command_is_json_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, code: int
) -> None:
    result = serve(monkeypatch, tmp_path, error)
    last = objects(result.stderr)[-1]
    assert (last["levelname"], last["message"], result.exit_code) == ("ERROR", str(error), code)


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_line_of_a_refusal_has_fields_and_the_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service()
    with caplog.at_level(logging.INFO, "shapeserve"):
        await service.embed("full", headers={"x-request-id": "id-1"})
        await service.embed("crash", headers={"x-request-id": "id-2"})
    service.frontend.close()
    full, crash = (vars(record) for record in caplog.records)
    assert (full["request_id"], crash["request_id"]) == ("id-1", "id-2")
    assert (full["levelname"], full["status"], full["code"]) == ("WARNING", 429, "queue_full")
    assert (crash["levelname"], crash["endpoint"], crash["model"]) == (
        *("ERROR", "embeddings"),
        "mini",
    )


def test_a_row_that_fails_on_the_device_is_logged_as_part_of_its_request() -> None:
    """Ray's handlers take the request id from the context of the line."""
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: dict[str, str] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen[record.getMessage()] = request.get()

    handler = Handler()
    logging.getLogger("shapeserve").addHandler(handler)
    raising = engines.module_config("raising", compile={"tier": "eager"})
    try:
        with engines.started(raising) as engine:
            request.set("id-3")
            bad = {"ids": np.array([tiny.POISON, 1], np.int64)}
            engine.run([bad], on_error="return")
    finally:
        logging.getLogger("shapeserve").removeHandler(handler)
    assert seen["a row failed on the device"] == "id-3"
