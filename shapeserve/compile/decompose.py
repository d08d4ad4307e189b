"""User decompositions: what operators are made of, given to the compiler."""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from shapeserve.errors import ModelError
from shapeserve.models.imports import import_name

Table = Mapping[OpOverload, Callable[..., Any]]


def load_decompositions(names: Sequence[str]) -> dict[OpOverload, Callable[..., Any]]:
    """Import the tables that the config names, as one: operator -> function.

    Raises:
        ModelError: a name cannot be imported, or is no such table.
    """
    table: dict[OpOverload, Callable[..., Any]] = {}
    for name in names:
        found = import_name(name)
        if callable(found) and not isinstance(found, Mapping):
            try:
                found = found()
            except Exception as error:  # the user's code
                raise ModelError(
                    f"compile.decompositions: {name}() raised {type(error).__name__}: {error}; it "
                    "is called without arguments and returns a mapping from operator to function"
                ) from error
        if not isinstance(found, Mapping):
            raise _no_table(name, f"is {type(found).__name__}")
        for op, function in found.items():
            if not callable(function):
                raise _no_table(name, f"holds {type(function).__name__} for {op}")
            for overload in _overloads(name, op):
                table[overload] = function
    return table


def _overloads(name: str, op: object) -> list[OpOverload]:
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
    raise _no_table(name, f"has the key {op!r}")


def _no_table(name: str, what: str) -> ModelError:
    return ModelError(
        f"compile.decompositions: {name} {what}; it must be a mapping from operator "
        "(torch.ops.namespace.name) to function, or a function that returns one"
    )


def decomposing(compile_fx: Callable[..., Any], table: Table) -> Callable[..., Any]:
    """Return Inductor's compiler with ``table`` added to its own decompositions.

    Torch's caches do not know of a user's decompositions and would answer with a program made
    without them: while this compiles, its cache keys carry a tag of the table.
    """
    from torch._inductor.decomposition import select_decomp_table

    tag = _tag(table)

    def compile_with(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        keys = torch.compiler.config.cache_key_tag + tag
        with torch.compiler.config.patch(cache_key_tag=keys):  # type: ignore[attr-defined]
            merged = {**select_decomp_table(), **table}
            return compile_fx(gm, example_inputs, decompositions=merged, **kwargs)

    return compile_with


def _tag(table: Table) -> str:
    """Equal for equal sources; what has none, such as a C function, is never found again."""
    texts = []
    for op, function in table.items():
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            source = uuid.uuid4().hex
        texts.append(f"{op} {source}")
    return "decompose:" + hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()
