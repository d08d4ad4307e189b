"""Finds the route of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shapeserve.metrics import Endpoint
from shapeserve.serve.service import Handler, Route

_VARIABLE = re.compile(r"\\\{(\w+)\\\}")


@dataclass(frozen=True, slots=True)
class Match:
    """What a path and a method lead to.

    Attributes:
        handler: of the route; None if there is none.
        endpoint: metric label of the path; None for a path that nothing serves.
        variables: name in the route's path -> what stood there.
        allowed: methods that the path takes.
    """

    handler: Handler | None = None
    endpoint: Endpoint | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()


class Router:
    """Routes by path and method.

    A name in braces stands for anything but an empty string, slashes included, because names of
    models have them (``org/model``). Paths without a name are found first.

    Attributes:
        routes: all of them.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._plain: dict[str, list[Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], list[Route]]] = []
        by_path: dict[str, list[Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, []).append(route)
        # Of two patterns that match, the longer one says more: `/models/{m}/infer`.
        for path, same in sorted(by_path.items(), key=lambda item: -len(item[0])):
            if "{" in path:
                self._patterns.append((_pattern(path), same))
            else:
                self._plain[path] = same

    def match(self, method: str, path: str) -> Match:
        """Return what serves ``method path``."""
        routes, variables = self._find(path)
        if not routes:
            return Match()
        for route in routes:
            if route.method == method:
                return Match(route.handler, route.endpoint, variables)
        return Match(None, routes[0].endpoint, variables, tuple(r.method for r in routes))

    def _find(self, path: str) -> tuple[Sequence[Route], Mapping[str, str]]:
        if path in self._plain:
            return self._plain[path], {}
        for pattern, routes in self._patterns:
            if found := pattern.fullmatch(path):
                return routes, found.groupdict()
        return (), {}


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(_VARIABLE.sub(r"(?P<\1>.+)", re.escape(path)))
