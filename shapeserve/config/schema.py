"""The configuration: frozen values with unit, default and effect of every key.

Built with ``ServeConfig.from_yaml`` or ``from_dict``; ``shapeserve.config.load`` turns what
pydantic finds into a ``ConfigError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.config.base import Axis, Bool, Float, Int, Name, PerAxis, along, problem
from shapeserve.config.base import Frozen as _Frozen
from shapeserve.config.base import field as _field
from shapeserve.config.base import suggest as _suggest
from shapeserve.config.load import Document
from shapeserve.config.paths import is_package_path, model_directory
from shapeserve.config.policy import Policy, axes_of

DType = Literal["float32", "float16", "bfloat16", "int64", "int32", "bool", "uint8"]
OverMax = Literal["fallback", "split", "truncate", "reject"]


def _yaml_switch(value: object) -> object:
    """Undo YAML 1.1, which reads a bare ``on`` or ``off`` as a boolean."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _check_dim(dim: int | str) -> int | str:
    if isinstance(dim, int) and dim < 1:
        raise problem(f"dim {dim} is below 1; write the size of a fixed dimension or an axis name")
    if isinstance(dim, str) and not dim.isidentifier():
        raise problem(f"dim {dim!r} is no axis name; use letters, digits and _, as in seq")
    return dim


def _check_output_dim(dim: int | str) -> int | str:
    if isinstance(dim, int) or "/" not in dim:
        return _check_dim(dim)
    axis, _, rate = dim.partition("/")
    if not axis.isidentifier() or not rate.isdecimal() or int(rate) < 1 or axis == BATCH:
        raise problem(f"dim {dim!r} is no axis at a lower rate; write it as frames/4")
    return dim


Dim = Annotated[Int | str, AfterValidator(_check_dim)]
OutputDim = Annotated[Int | str, AfterValidator(_check_output_dim)]


class InputSpec(_Frozen):
    """One input tensor of a model given by ``import``."""

    dtype: DType = _field("Element type.", "word")
    dims: tuple[Dim, ...] = _field(
        "Names of dynamic axes and sizes of fixed ones; the first is `batch`.", "elements"
    )
    pad: Float | Int = _field("Value written where a row is shorter than its bucket.", "value", 0)
    make: Literal["mask", "positions"] | None = _field(
        "Made by the layout instead of sent by the caller: `mask` is 1 on real elements and 0 on "
        "padding, along every axis of `dims`; `positions` counts from 0 along its one axis.",
        "word",
        None,
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_batch_first(self.dims)
        named = sum(isinstance(dim, str) for dim in self.dims[1:])
        if self.make == "mask" and not named:
            raise problem("make: mask needs an axis besides batch, as [batch, seq]", "make")
        if self.make == "positions" and named != 1:
            raise problem(
                f"make: positions counts along one axis besides batch, dims has {named}", "make"
            )
        if not self.dtype.startswith(("float", "bfloat")) and self.pad != int(self.pad):
            raise problem(f"pad {self.pad} is not a whole number, but dtype is {self.dtype}", "pad")
        return self


class OutputSpec(_Frozen):
    """One output tensor of a model given by ``import``."""

    dtype: DType = _field("Element type.", "word")
    dims: tuple[OutputDim, ...] = _field(
        "As for inputs; the padding is cut off along every axis named here. `frames/4` is the "
        "axis `frames` at a quarter of its rate, rounded up.",
        "elements",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_batch_first(self.dims)
        return self


def _check_batch_first(dims: tuple[int | str, ...]) -> None:
    if not dims or dims[0] != BATCH:
        raise problem(f"dims {list(dims)} must begin with batch, as [batch, seq]", "dims")


class RareShape(_Frozen):
    """What happens to rows that no bucket fits well, for one axis."""

    over_max: OverMax = _field(
        "A row longer than the largest bucket: run it in the dynamic-shape fallback, split it "
        "into pieces, truncate it to the largest bucket, or reject it.",
        "word",
        "fallback",
    )
    max_padding_waste: Float = _field(
        "A row whose cheapest bucket would be padding for more than this share goes to the "
        "fallback; 1 never does.",
        "share of the padded row, 0 to 1",
        0.6,
        gt=0,
        le=1,
    )
    guard_min: Int = _field("Buckets up to this size are never too wasteful.", "elements", 64, ge=1)


class Limits(_Frozen):
    """Bounds on rows, batches and the queue."""

    max_length: PerAxis | None = _field(
        "Largest bucket size of every axis but `batch`, or axis -> size; unset means the model's "
        "own.",
        "elements",
        None,
    )
    hard_limit: PerAxis | None = _field(
        "Longest row that runs at all, for every axis or axis -> size; between `max_length` and "
        "this `rare_shapes` decides. Unset means the model's own, such as the size of its "
        "position table, and twice `max_length` for a module.",
        "elements",
        None,
    )
    min_length: PerAxis = _field(
        "Shortest row that the model can run, for every axis or axis -> size; a shorter one is "
        "refused with 400.",
        "elements",
        1,
    )
    max_rows: Int = _field("Rows that one request may carry.", "rows", 2048, ge=1)
    max_batch_tokens: Int = _field(
        "Buckets of a larger area are not built, except the smallest batch of each row shape.",
        "padded elements",
        8192,
        ge=1,
    )
    max_queue_rows: Int = _field("More waiting rows are refused with 429.", "rows", 4096, ge=1)
    max_queue_tokens: Int = _field(
        "More waiting elements are refused with 429.", "padded elements", 1_000_000, ge=1
    )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are named by a limit of their own."""
        limits = (self.min_length, self.max_length, self.hard_limit)
        return tuple(
            dict.fromkeys(a for limit in limits if isinstance(limit, Mapping) for a in limit)
        )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for axis in self.axes or ("",):  # "": what is said of every axis
            low = along(self.min_length, axis) or 1
            end, hard = along(self.max_length, axis), along(self.hard_limit, axis)
            longest = hard or end
            if end and hard and end > hard:
                raise problem(
                    f"max_length {end} is above hard_limit {hard}; lower max_length or raise "
                    "hard_limit",
                    "max_length",
                    axis,
                )
            if longest and low > (end or longest):
                raise problem(
                    f"min_length {low} is above the largest bucket of {end or longest}; lower it",
                    "min_length",
                    axis,
                )
            if longest and longest > self.max_queue_tokens:
                raise problem(
                    f"max_queue_tokens {self.max_queue_tokens} would never admit a row of "
                    f"{longest}; use {longest} or more",
                    "max_queue_tokens",
                )
        return self


_WORD = r"[A-Za-z_]\w*"
_ModulePath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
_ImportPath = Annotated[str, Field(pattern=rf"^{_WORD}(\.{_WORD})*$")]
_ImportName = Annotated[str, Field(pattern=rf"^{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*$")]


class CompileConfig(_Frozen):
    """How variants are built."""

    tier: Literal["auto", "eager", "compiled", "graph", "eager_graph"] = _field(
        "Tier of the variants: `auto` is `graph` on CUDA and `compiled` on the CPU. `eager_graph` "
        "captures the eager model: ready within seconds, 10-25 % slower than `graph`.",
        "word",
        "auto",
    )
    freeze: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = _field(
        "Pack the weights as constants of the compiled program: faster, longer start. `auto` "
        "does it on the CPU where the result is verified.",
        "word",
        "auto",
    )
    backend: Literal["inductor", "eager"] = _field(
        "What torch.compile generates code with. `eager` traces and guards only: a start within "
        "seconds and no speed, for tests.",
        "word",
        "inductor",
    )
    fuse_layers: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = _field(
        "Join layers at start: projections of one input as one product, a GELU with the linear "
        "layer before it; kept only where the answers stay the same. `auto` does it for text on "
        "CUDA.",
        "word",
        "auto",
    )
    graph_memory_fraction: Float = _field(
        "Captures of this model stop once their pool has reserved this share of the device's "
        "memory; what is left is served compiled.",
        "share, 0 to 1",
        0.25,
        gt=0,
        le=1,
    )
    strict: Bool = _field(
        "Refuse to start when a variant cannot be built, instead of serving it at a lower tier.",
        "true or false",
        False,
    )
    eager_islands: tuple[_ModulePath, ...] = _field(
        "Sub-modules of the model that run eagerly, outside the compiled graphs, as "
        "`encoder.layer.3`: for code that torch cannot trace.",
        "dotted names",
        (),
    )
    custom_ops: tuple[_ImportPath, ...] = _field(
        "Python modules imported before the model is loaded; they register operators and their "
        "fake implementations.",
        "dotted names",
        (),
    )
    decompositions: tuple[_ImportName, ...] = _field(
        "What operators are made of, so that they fuse with their neighbours: a mapping from "
        "operator to function, or a function that returns one, as `package.module:name`.",
        "dotted names",
        (),
    )
    debug_dir: Name | None = _field(
        "Keeps torch's own trace (for tlparse) and logs of the warm-up in this directory, relative "
        "to the config file.",
        "path",
        None,
    )
    log_recompiles: Bool = _field(
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


class Batching(_Frozen):
    """When a batch is dispatched; its largest size comes from ``policy.batch``."""

    batch_wait_timeout_s: Float = _field(
        "Longest wait of a row for more rows while the device is free. 0 never waits.",
        "seconds",
        0.0,
        ge=0,
    )


class ModelConfig(_Frozen):
    """One served model, from a directory (``path``) or from code (``import``)."""

    name: Name | None = _field(
        "Name in requests and metrics; unset means the model's own.", "word", None
    )
    aliases: tuple[Name, ...] = _field("Further names that requests may use.", "words", ())
    path: Name | None = _field(
        "Model directory in sentence-transformers or Hugging Face form, relative to the config "
        "file; or `package:NAME` for the one inside an installed Python package.",
        "path",
        None,
    )
    import_: _ImportName | None = _field(
        "Factory of a torch module, as `package.module:function`; needs `inputs` and `outputs`.",
        "dotted name",
        None,
        alias="import",
    )
    inputs: Mapping[Name, InputSpec] | None = _field(
        "Inputs of an imported module, in call order.", "specs", None
    )
    outputs: Mapping[Name, OutputSpec] | None = _field(
        "Outputs of an imported module, in return order.", "specs", None
    )
    dtype: Literal["float32", "bfloat16", "float16"] = _field(
        "Type of weights and arithmetic.", "word", "float32"
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "Where the model runs: `auto` is CUDA if there is one.", "word", "auto"
    )
    layout: Literal["auto", "padded", "packed"] = _field(
        "How rows are laid out in a batch: `padded` to a common size, or `packed` end to end "
        "(text encoders), where a bucket is a number of tokens. `auto` packs where the policy has "
        "`tokens`, and on CUDA where it says nothing and the model can.",
        "word",
        "auto",
    )
    policy: Policy = _field(
        "What buckets there are: axis -> sizes, or several axes as `height,width` -> shapes. Axes "
        "left out get the default of the device.",
        "axes",
        {},
    )
    rare_shapes: Mapping[Axis, RareShape] = _field(
        "What happens to rows that no bucket fits well: axis -> rules.", "axes", {}
    )
    limits: Limits = _field("Bounds on rows, batches and the queue.", "section", Limits())
    compile: CompileConfig = _field("How variants are built.", "section", CompileConfig())
    batching: Batching = _field("When a batch is dispatched.", "section", Batching())
    token_embeddings: Bool = _field(
        "Give the vector of every token as well, as the output `token_embeddings` [batch, seq, D] "
        "without padding (text encoders; not over `/v1/embeddings`).",
        "true or false",
        False,
    )
    trust_remote_code: Bool = _field(
        "Run Python code that comes with the model directory.", "true or false", False
    )
    padding_invariant: Bool | None = _field(
        "Whether padding leaves answers unchanged. False runs every row at its exact size: in the "
        "bucket of just that size where the policy has one, else in the fallback. Unset trusts "
        "the model and tests it at start.",
        "true or false",
        None,
    )
    threads: Int | None = _field(
        "CPU threads of the model, the same for all models of a service; unset means what another "
        "model says, else all cores it may use.",
        "threads",
        None,
        ge=1,
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.import_ is None):
            given = "neither is" if self.path is None else "both are"
            raise problem(f"a model needs exactly one of path and import; {given} given")
        if self.import_ and not (self.inputs and self.outputs):
            raise problem("import needs inputs and outputs; declare at least one of each", "import")
        if self.path and (self.inputs is not None or self.outputs is not None):
            key = "inputs" if self.inputs is not None else "outputs"
            raise problem(f"{key} belongs to import; a model directory brings its own", key)
        if self.token_embeddings and self.path is None:
            raise problem(
                "token_embeddings is for text encoders (path); declare an output instead",
                "token_embeddings",
            )
        if self.path and self.limits.min_length != 1:
            raise problem(
                "min_length belongs to import; a text of any length runs", "limits", "min_length"
            )
        return self

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        padded = [axis for axis in self.policy if axis != TOKENS]
        if self.layout == "packed" and self.path is None:
            raise problem("layout packed is for text encoders (path); use padded or auto", "layout")
        if self.layout == "packed" and padded:
            raise problem(
                f"policy.{padded[0]} says nothing about packed rows, whose buckets are numbers of "
                f"tokens; use policy.{TOKENS}, or layout: padded",
                "policy",
                padded[0],
            )
        if TOKENS in self.policy and (padded or self.layout == "padded") and self.path:
            other = f"policy.{padded[0]} speaks of" if padded else "layout asks for"
            raise problem(
                f"policy.{TOKENS} is for packed rows, but {other} padded ones; remove one of them",
                "policy",
                TOKENS,
            )
        return self

    def packs(self, device: Literal["cpu", "cuda"]) -> bool:
        """Whether rows are to be packed on this kind of device, if the model can.

        ``auto`` packs text on CUDA, and wherever the policy has ``tokens``; a policy of padded
        sizes asks for padded rows.
        """
        if self.layout != "auto" or self.path is None:
            return self.layout == "packed"
        return TOKENS in self.policy or (device == "cuda" and not self.policy)

    @model_validator(mode="after")
    def _axes_exist(self) -> Self:
        if BATCH in self.rare_shapes:
            raise problem(
                "batch has no rare shapes: rows beyond the largest batch are spread over several "
                "batches; remove it",
                "rare_shapes",
                BATCH,
            )
        if self.inputs is None:
            return self
        axes = {dim for spec in self.inputs.values() for dim in spec.dims if isinstance(dim, str)}
        named = [(axis, "policy", key) for key in self.policy for axis in axes_of(key)]
        named += [(axis, "rare_shapes", axis) for axis in self.rare_shapes]
        for axis, section, key in named:
            if axis not in axes:
                hint = _suggest(axis, sorted(axes)).replace("Known keys", "Axes")
                raise problem(f"no input has the axis {axis!r}; {hint}", section, key)
        for axis in self.limits.axes:
            if axis not in axes - {BATCH}:
                hint = _suggest(axis, sorted(axes - {BATCH})).replace("Known keys", "Axes")
                raise problem(f"rows have no axis {axis!r}; {hint}", "limits")
        for name, out in (self.outputs or {}).items():
            for dim in out.dims:
                if isinstance(dim, str) and dim.partition("/")[0] not in axes:
                    raise problem(f"no input has the axis {dim!r}", "outputs", name, "dims")
        if all(spec.make for spec in self.inputs.values()):
            raise problem("every input is made by the layout; leave make out of one", "inputs")
        return self

    @model_validator(mode="after")
    def _buckets_within_limits(self) -> Self:
        for key, sizes in self.policy.items():
            for axis, (first, last) in zip(axes_of(key), sizes.ends, strict=True):
                if axis not in (BATCH, TOKENS):
                    self._check_first(key, axis, first)
                    self._check_last(axis, last, ("policy", key, *sizes.largest_key))
        return self

    def _check_first(self, key: str, axis: str, first: int) -> None:
        low = along(self.limits.min_length, axis) or 1
        if first < low:
            raise problem(
                f"smallest bucket {axis}={first} is below limits.min_length {low}, so the model "
                f"cannot run it; begin the policy at {low} or more",
                "policy",
                key,
            )

    def _check_last(self, axis: str, last: int, at: tuple[str | int, ...]) -> None:
        hard, end = along(self.limits.hard_limit, axis), along(self.limits.max_length, axis)
        if hard and last > hard:
            raise problem(
                f"largest bucket {axis}={last} is above limits.hard_limit {hard}; end the policy "
                f"at {min(hard, end or hard)}",
                *at,
            )
        if end and last > end:
            raise problem(
                f"largest bucket {axis}={last} is above limits.max_length {end}; end the policy "
                f"at {end} or raise limits.max_length to {last}",
                *at,
            )
        if end and last < end:
            raise problem(
                f"largest bucket {axis}={last} does not cover limits.max_length {end}; end the "
                f"policy at {end} or lower limits.max_length to {last}",
                *at,
            )

    @model_validator(mode="after")
    def _pieces_are_long_enough(self) -> Self:
        for axis, rule in self.rare_shapes.items():
            if rule.over_max == "split" and (along(self.limits.min_length, axis) or 1) > 1:
                raise problem(
                    "the last piece of a split row may be shorter than limits.min_length; use "
                    "fallback, truncate or reject",
                    "rare_shapes",
                    axis,
                    "over_max",
                )
        return self


class HttpConfig(_Frozen):
    """The HTTP and gRPC service."""

    host: Name = _field("Address to listen on.", "address", "127.0.0.1")
    port: Int = _field("Port to listen on.", "port", 8000, ge=1, le=65535)
    grpc_port: Int | None = _field(
        "Port for the Open Inference Protocol over gRPC; none, no gRPC.",
        "port",
        None,
        ge=1,
        le=65535,
    )
    replicas: Int = _field("Processes that each hold the models.", "processes", 1, ge=1)
    max_body_bytes: Int = _field(
        "Longer request bodies are refused with 413 (gRPC: RESOURCE_EXHAUSTED).",
        "bytes",
        16_777_216,
        ge=1,
    )
    max_inflight_bytes: Int | None = _field(
        "Request bodies that a replica holds at a time; while there are more, requests are refused "
        "with 429. Unset means 64 times `max_body_bytes`.",
        "bytes",
        None,
        ge=1,
    )
    max_answer_bytes: Int = _field(
        "Requests whose output tensors would be larger are refused with 400.",
        "bytes",
        268_435_456,
        ge=1,
    )
    proxy: Literal["fast", "default"] = _field(
        "`fast` uses Ray Serve's HAProxy and throughput flags, `default` its Python proxy.",
        "word",
        "fast",
    )
    drain_s: Float = _field(
        "Longest time to finish what is in flight when stopping.", "seconds", 10.0, ge=0
    )

    @model_validator(mode="after")
    def _room_for_one_body(self) -> Self:
        # Twice, because a compressed body is held beside what it becomes.
        if self.inflight_bytes < 2 * self.max_body_bytes:
            raise problem(
                f"max_inflight_bytes {self.max_inflight_bytes} has no room for one body of "
                f"max_body_bytes {self.max_body_bytes}, compressed and not; use "
                f"{2 * self.max_body_bytes} or more",
                "max_inflight_bytes",
            )
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.port:
            raise problem(
                f"grpc_port {self.grpc_port} is the HTTP port; choose another", "grpc_port"
            )
        return self

    @model_validator(mode="after")
    def _grpc_host(self) -> Self:
        # Ray's Python proxy opens its gRPC port on all interfaces. Callers can be told apart by
        # whether they are on this machine, but not by the interface they came in at.
        if self.grpc_port and self.proxy == "default" and not (self.is_local or self.is_open):
            raise problem(
                f"with proxy default, gRPC cannot listen on {self.host} alone; use proxy fast, or "
                "host 127.0.0.1 or 0.0.0.0",
                "grpc_port",
            )
        return self

    @property
    def inflight_bytes(self) -> int:
        """``max_inflight_bytes``, also where it is unset."""
        return self.max_inflight_bytes or 64 * self.max_body_bytes

    @property
    def is_local(self) -> bool:
        """Whether only this machine is let in."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_open(self) -> bool:
        """Whether all interfaces are listened on."""
        return self.host in ("0.0.0.0", "::")


class ServeConfig(_Frozen):
    """Everything that a service needs: its models and its HTTP side."""

    models: tuple[ModelConfig, ...] = _field("The served models.", "models")
    serve: HttpConfig = _field("The HTTP service.", "section", HttpConfig())

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        if not models:
            raise problem("no model is given; list at least one with path or import")
        seen: dict[str, int] = {}
        for i, model in enumerate(models):
            for name in (*((model.name,) if model.name else ()), *model.aliases):
                if name in seen:
                    raise problem(
                        f"the name {name!r} is taken by models[{seen[name]}]; choose another", i
                    )
                seen[name] = i
        return models

    @field_validator("models")
    @classmethod
    def _one_number_of_threads(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        asked = {model.threads: i for i, model in reversed([*enumerate(models)]) if model.threads}
        if len(asked) > 1:
            (first, _), (other, i) = sorted(asked.items(), key=lambda item: item[1])[:2]
            raise problem(
                f"threads {other} differs from {first} above; the models of a service run in one "
                "thread in turn, so give them the same number, or give it to one of them",
                i,
                "threads",
            )
        return models

    @classmethod
    def from_yaml(cls, path: str | Path) -> ServeConfig:
        """Read a YAML file; relative model paths are taken from its directory.

        Raises:
            ConfigError: naming file, line, key, value, bound and remedy.
        """
        document = Document.from_yaml(path)
        config = cls._validate(document)
        base = Path(path).resolve().parent
        models = tuple(_anchored(model, base) for model in config.models)
        return config.model_copy(update={"models": models})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServeConfig:
        """Build a config from plain data in the shape of the YAML file.

        Raises:
            ConfigError: naming key, value, bound and remedy.
        """
        return cls._validate(Document(data))

    @classmethod
    def for_model_dir(cls, path: str | Path, name: str | None = None) -> ServeConfig:
        """Return the default config for one model directory (or ``package:NAME``).

        Raises:
            ConfigError: there is no such model directory.
        """
        directory = model_directory(str(path))
        return cls.from_dict({"models": [{"path": str(directory), "name": name}]})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data with every default filled in; ``from_dict`` reads it back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def _validate(cls, document: Document) -> ServeConfig:
        try:
            return cls.model_validate(document.data)
        except ValidationError as error:
            raise document.explain(error) from None


def _anchored(model: ModelConfig, base: Path) -> ModelConfig:
    """Make relative paths absolute: replicas run in other working directories."""
    changed: dict[str, Any] = {}
    if model.path is not None and not is_package_path(model.path):
        changed["path"] = str(base / Path(model.path).expanduser())
    if model.compile.debug_dir is not None:
        kept = str(base / Path(model.compile.debug_dir).expanduser())
        changed["compile"] = model.compile.model_copy(update={"debug_dir": kept})
    return model.model_copy(update=changed)


def parse_policy(data: Mapping[str, Any]) -> Policy:
    """Build a policy (axis -> sizes) from plain data, as in ``models[].policy``.

    Raises:
        ConfigError: naming key, value, bound and remedy.
    """
    try:
        return _POLICY.validate_python(data)
    except ValidationError as error:
        raise Document(data).explain(error) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the config file."""
    return ServeConfig.model_json_schema(by_alias=True)


_POLICY: TypeAdapter[Policy] = TypeAdapter(Policy)
