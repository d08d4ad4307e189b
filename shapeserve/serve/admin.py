"""Who may ask for the routes of the administrator: whoever sends the token."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

TOKEN_VARIABLE = "SHAPESERVE_ADMIN_TOKEN"


class Guard:
    """Compares the token of a request with the one of this process.

    Args:
        token: without one, nobody is let in.
    """

    __slots__ = ("_token",)  # and no repr with it

    def __init__(self, token: str = "") -> None:
        self._token = token.strip().encode()  # a secret read from a file ends in a newline

    @classmethod
    def from_environment(cls) -> Guard:
        """Return the guard of the token in the environment, which is read this once."""
        return cls(os.environ.get(TOKEN_VARIABLE, ""))

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers (lower-case names) is the administrator's."""
        if not self._token:
            return False
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Takes the same time wherever the two differ, so that nobody finds it letter by letter.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return same and scheme.lower() == "bearer"
