"""The HTTP side driven by its own OpenAPI document: valid data, invalid data, no 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fake_engine import FakeEngine, FakeRanker, FakeSample
from schemathesis.checks import CHECKS
from schemathesis.config import SchemathesisConfig
from test_frontend import Service

from shapeserve.serve.admin import Guard

TOKEN = "a-token"
TIMEOUT, ENCODING = "x-request-timeout-seconds", "content-encoding"


class Unmoved(FakeEngine):
    """Takes no word for an order: schemathesis finds ``die`` in the sources and sends it."""

    async def submit_prepared(self, samples: list[Any], **options: Any) -> list[Any]:
        plain = [FakeSample("x " * len(sample.split())) for sample in samples]
        return await super().submit_prepared(plain, **options)


class UnmovedRanker(Unmoved, FakeRanker):
    """The same for a ranker."""


SERVICE = Service(
    guard=Guard(TOKEN),
    max_body_bytes=1_000_000,
    more={"mini": Unmoved, "other": Unmoved, "ranker": UnmovedRanker},
)


def load(max_examples: int) -> Any:
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "generation": {
                "max-examples": max_examples,
                "deterministic": True,
                "database": "none",
                # Headers of any other name are ignored, as they must be.
                "allow-extra-parameters": False,
            },
        }
    )
    return schemathesis.openapi.from_asgi("/openapi.json", SERVICE._asgi, config=config)


quick, thorough = load(10), load(400)


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    yield
    SERVICE.frontend.close()


def drive(case: Any) -> None:
    """Send one generated request and hold the response against the document."""
    # A body that is not compressed, and a deadline that nothing meets, are refused as they should
    # be; other tests send them.
    headers = {"authorization": f"Bearer {TOKEN}"}
    if case.headers.get(ENCODING) in ("gzip", "deflate"):
        headers[ENCODING] = "identity"
    if is_short(case.headers.get(TIMEOUT)):
        headers[TIMEOUT] = "60"
    # Who lacks the token is told 404 or 405, not 401: see test_admin.py.
    excluded = CHECKS.get_by_names(["ignored_auth", "missing_required_header"])
    if case.path.endswith("/infer") or has_float(case.body):
        # What JSON Schema cannot say: that a shape agrees with its data, and that 1.0 is refused
        # where a whole number is asked for.
        excluded.append(CHECKS.get_one("positive_data_acceptance"))
    case.call_and_validate(headers=headers, excluded_checks=excluded)


def has_float(value: object) -> bool:
    if isinstance(value, dict):
        return has_float(list(value.values()))
    return isinstance(value, float) or (isinstance(value, list) and any(map(has_float, value)))


def is_short(timeout: str | None) -> bool:
    try:
        return timeout is not None and 0 < float(timeout) < 1
    except ValueError:
        return False


@quick.parametrize()
def test_what_the_document_promises_is_kept(case: Any) -> None:
    drive(case)


@pytest.mark.slow
@thorough.parametrize()
def test_what_the_document_promises_is_kept_in_long_runs(case: Any) -> None:
    drive(case)
