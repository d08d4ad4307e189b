"""What every section of the configuration is made of: strict types, fields, errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

# Strict, because YAML reads `yes` as true and pydantic would read true as 1.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
Name = Annotated[str, Field(min_length=1)]

Axis = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_WORD = r"[A-Za-z_]\w*"
ImportPath = Annotated[str, Field(pattern=rf"^{_WORD}(\.{_WORD})*$")]
ImportName = Annotated[str, Field(pattern=rf"^{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*$")]
"""A module and, behind a colon, a name in it."""

Size = Annotated[Int, Field(ge=1)]
PerAxis = Size | Mapping[Axis, Size]
"""One number for every axis but ``batch``, or axis -> number."""


def problem(message: str, *at: str | int) -> PydanticCustomError:
    """Return a validation error whose place is ``at`` below the value being validated."""
    return PydanticCustomError("shapeserve", "{message}", {"message": message, "at": at})


def field(effect: str, unit: str, default: Any = ..., **constraints: Any) -> Any:
    """Declare a field whose description says effect, unit and default."""
    shown = default.model_dump() if isinstance(default, BaseModel) else default
    stated = "required" if default is ... else f"default: {'unset' if shown is None else shown}"
    return Field(default, description=f"{effect} (unit: {unit}; {stated})", **constraints)


class Frozen(BaseModel):
    """Immutable, and refuses keys that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        shown = [info.alias or name for name, info in cls.model_fields.items()]
        for key in data:
            if key not in shown and key not in cls.model_fields:
                raise problem(f"unknown key {key!r}; {suggest(key, shown)}", key)
        return data


def suggest(key: object, known: Sequence[str]) -> str:
    """Say which keys there are, and which of them was probably meant."""
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known keys: {', '.join(sorted(known))}"


def along(limit: PerAxis | None, axis: str) -> int | None:
    """Return what a limit says about one axis; None if it says nothing."""
    return limit.get(axis) if isinstance(limit, Mapping) else limit
