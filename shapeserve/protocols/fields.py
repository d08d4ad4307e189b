"""What the JSON protocols share: checks of fields that name the field, the item, the bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import orjson

from shapeserve.errors import InvalidRequest

OVER_MAX: Final = ("fallback", "split", "truncate", "reject")
MAX_NAMED: Final = 10
"""Bad items that one message names."""
MISSING: Final = type("Missing", (), {})()
"""Stands for a field that is not there, where messages tell it from null."""
_INT64, _MAX_DIGITS = 2.0**63, 1e30


def check_known(fields: Mapping[str, Any], known: Set[str]) -> None:
    """Refuse fields that the endpoint does not have, and a ``user`` that is no string."""
    unknown = sorted(fields.keys() - known)
    if unknown:
        names = ", ".join(repr(name[:40]) for name in unknown[:MAX_NAMED])
        raise InvalidRequest(
            f"unknown field {names}; allowed are {', '.join(sorted(known))}.",
            param=unknown[0][:40],
            code="unknown_field",
        )
    user = fields.get("user")
    if user is not None and not isinstance(user, str):
        raise InvalidRequest(f"`user` is {kind(user)}; it must be a string.", param="user")


def non_empty(name: str, value: Any, wanted: str) -> list[Any]:
    """Return ``value`` if it is a list that is not empty; else name what is ``wanted``."""
    if isinstance(value, list) and value:
        return value
    given = "an empty list" if value == [] else kind(value)
    raise InvalidRequest(f"`{name}` is {given}; it must be {wanted}, and not empty.", param=name)


def check_rows(name: str, rows: int, max_rows: int) -> None:
    """Refuse more rows than one request may carry."""
    if rows > max_rows:
        raise InvalidRequest(
            f"`{name}` has {rows} items, the limit is {max_rows} a request; send several "
            "requests or raise `limits.max_rows`.",
            param=name,
            code="too_many_rows",
        )


def check_items(
    name: str, items: list[Any], wanted: str, problem: Callable[[Any], str | None]
) -> None:
    """Raise one 400 that names the first ten items with a problem."""
    bad = [(i, what) for i, item in enumerate(items) if (what := problem(item))]
    if not bad:
        return
    # What is wrong with an item of a list begins with its own index.
    named = "; ".join(
        f"{name}[{i}]{'' if what.startswith('[') else ' '}{what}" for i, what in bad[:MAX_NAMED]
    )
    more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
    raise InvalidRequest(
        f"{named}{more}: every item must be {wanted}; leave those out or mend them.",
        param=f"{name}[{bad[0][0]}]",
    )


def bad_text(item: Any) -> str | None:
    """Say what is wrong with a text, None if nothing is; whether it is empty is seen later."""
    return None if isinstance(item, str) else f"is {kind(item)}"


def boolean(fields: Mapping[str, Any], name: str) -> bool:
    """Return a switch that is off if it is left out."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise InvalidRequest(f"`{name}` is {shown(value)}; it must be true or false.", param=name)
    return bool(value)


def over_max(fields: Mapping[str, Any], allowed: tuple[str, ...] = OVER_MAX) -> str | None:
    """Return the caller's choice for a text longer than the largest bucket, None if no choice.

    ``truncate`` is the short form that other embedding servers have: true is
    ``over_max: truncate``, false leaves the configured policy.
    """
    truncate, choice = boolean(fields, "truncate"), fields.get("over_max")
    if choice is not None and choice not in allowed:
        raise InvalidRequest(
            f"`over_max` is {shown(choice)}; it must be one of {', '.join(allowed)}.",
            param="over_max",
        )
    if not truncate:
        return choice if choice is None else str(choice)
    if choice not in (None, "truncate"):
        raise InvalidRequest(
            f"`truncate` is true and `over_max` is {choice!r}; send only one of them.",
            param="over_max",
        )
    return "truncate"


def kind(value: Any) -> str:
    """Name the JSON type of a value, for messages."""
    if value is None or value is MISSING:
        return "missing" if value is MISSING else "null"
    if isinstance(value, bool):
        return "a boolean"
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")


def shown(value: Any) -> str:
    """Show a scalar, name the type of anything that could be long."""
    if isinstance(value, float):
        # Whole numbers beyond 64 bits come as floats.
        return f"{value:.0f}" if _INT64 <= abs(value) < _MAX_DIGITS else repr(value)
    if isinstance(value, (bool, int)):
        return orjson.dumps(value).decode()
    return repr(value[:40]) if isinstance(value, str) else kind(value)
