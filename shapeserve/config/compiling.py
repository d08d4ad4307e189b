"""How variants are built."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shapeserve.config.base import (
    Bool,
    Float,
    Frozen,
    ImportName,
    ImportPath,
    Name,
    field,
    problem,
)


def _yaml_switch(value: object) -> object:
    """Undo YAML 1.1, which reads a bare ``on`` or ``off`` as a boolean."""
    return ("on" if value else "off") if isinstance(value, bool) else value


_ModulePath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class CompileConfig(Frozen):
    """How variants are built."""

    tier: Literal["auto", "eager", "compiled", "graph", "eager_graph"] = field(
        "Tier of the variants: `auto` is `graph` on CUDA and `compiled` on the CPU. `eager_graph` "
        "captures the eager model: ready within seconds, 10-25 % slower than `graph`.",
        "word",
        "auto",
    )
    freeze: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = field(
        "Pack the weights as constants of the compiled program: faster, longer start. `auto` "
        "does it on the CPU where the result is verified.",
        "word",
        "auto",
    )
    backend: Literal["inductor", "eager"] = field(
        "What torch.compile generates code with. `eager` traces and guards only: a start within "
        "seconds and no speed, for tests.",
        "word",
        "inductor",
    )
    fuse_layers: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = field(
        "Join layers at start: projections of one input as one product, a GELU with the linear "
        "layer before it; kept only where the answers stay the same. `auto` does it for text on "
        "CUDA.",
        "word",
        "auto",
    )
    graph_memory_fraction: Float = field(
        "Captures of this model stop once their pool has reserved this share of the device's "
        "memory; what is left is served compiled.",
        "share, 0 to 1",
        0.25,
        gt=0,
        le=1,
    )
    strict: Bool = field(
        "Refuse to start when a variant cannot be built, instead of serving it at a lower tier.",
        "true or false",
        False,
    )
    eager_islands: tuple[_ModulePath, ...] = field(
        "Sub-modules of the model that run eagerly, outside the compiled graphs, as "
        "`encoder.layer.3`: for code that torch cannot trace.",
        "dotted names",
        (),
    )
    custom_ops: tuple[ImportPath, ...] = field(
        "Python modules imported before the model is loaded; they register operators and their "
        "fake implementations.",
        "dotted names",
        (),
    )
    decompositions: tuple[ImportName, ...] = field(
        "What operators are made of, so that they fuse with their neighbours: a mapping from "
        "operator to function, or a function that returns one, as `package.module:name`.",
        "dotted names",
        (),
    )
    debug_dir: Name | None = field(
        "Keeps torch's own trace (for tlparse) and logs of the warm-up in this directory, relative "
        "to the config file.",
        "path",
        None,
    )
    log_recompiles: Bool = field(
        "Have torch print every recompile of the process, with the guard that failed.",
        "true or false",
        False,
    )

    @model_validator(mode="after")
    def _decomposes(self) -> Self:
        if self.decompositions and self.backend != "inductor":
            raise problem(
                f"decompositions are for backend inductor, backend is {self.backend}; remove one",
                "decompositions",
            )
        return self
