"""HTTP of the commands: to addresses that whoever types a command gives, never to others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

from shapeserve.errors import ConfigError

TIMEOUT_S = 60.0


def check_address(option: str, address: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ConfigError: it is none that HTTP could use.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{option} {address}: it must be an address such as http://127.0.0.1:9090"
        )
    return address.rstrip("/")


def as_path(name: str) -> str:
    """Return a name as it stands in the path of an address; a slash stays one."""
    return quote(name)


def fetch_text(url: str, *, timeout_s: float = 10.0) -> str | None:
    """Return what answers with 200 at an address that a cluster names; None if nothing does."""
    try:
        with urlopen(url, timeout=timeout_s) as response:
            return str(response.read().decode())
    except (OSError, HTTPException, ValueError):
        return None


def fetch_json(
    option: str,
    url: str,
    *,
    query: Mapping[str, str] | None = None,
    put: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, Any]:
    """Return status and JSON of what answers; the status may be an error's.

    Args:
        option: who gave the address, for errors.
        url: what to GET, or to PUT to.
        query: what stands behind its question mark.
        put: what to PUT, as JSON.
        headers: more of them.
        timeout_s: without a byte of the answer.

    Raises:
        ConfigError: nothing answers, or not with JSON.
    """
    body = None if put is None else json.dumps(put).encode()
    sent = {"content-type": "application/json", **(headers or {})}
    asked = f"{url}?{urlencode(query)}" if query else url
    request = Request(asked, body, sent, method="GET" if put is None else "PUT")
    try:
        with urlopen(request, timeout=timeout_s) as response:
            status, text = response.status, response.read()
    except HTTPError as error:
        with error:
            status, text = error.code, error.read()
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{option}: {url} cannot be reached: {reason}; check the address, "
            "and that the service is up"
        ) from error
    try:
        return status, json.loads(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {url} answered {status} with no JSON; check the address"
        ) from None
