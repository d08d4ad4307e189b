"""The configuration: frozen values with unit, default and effect of every key.

Built with ``ServeConfig.from_yaml`` or ``from_dict``; ``shapeserve.config.load`` turns what
pydantic finds into a ``ConfigError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.config.base import (
    Axis,
    Bool,
    Float,
    Frozen,
    ImportName,
    Int,
    Name,
    PerAxis,
    along,
    field,
    problem,
    suggest,
)
from shapeserve.config.compiling import CompileConfig
from shapeserve.config.http import HttpConfig
from shapeserve.config.load import Document
from shapeserve.config.paths import is_package_path, model_directory
from shapeserve.config.policy import Policy, axes_of
from shapeserve.config.record import Record
from shapeserve.config.tensors import InputSpec, OutputSpec

OverMax = Literal["fallback", "split", "truncate", "reject"]


class RareShape(Frozen):
    """What happens to rows that no bucket fits well, for one axis."""

    over_max: OverMax = field(
        "A row longer than the largest bucket: run it in the dynamic-shape fallback, split it "
        "into pieces, truncate it to the largest bucket, or reject it.",
        "word",
        "fallback",
    )
    max_padding_waste: Float = field(
        "A row whose cheapest bucket would be padding for more than this share goes to the "
        "fallback; 1 never does.",
        "share of the padded row, 0 to 1",
        0.6,
        gt=0,
        le=1,
    )
    guard_min: Int = field("Buckets up to this size are never too wasteful.", "elements", 64, ge=1)


class Limits(Frozen):
    """Bounds on rows, batches and the queue."""

    max_length: PerAxis | None = field(
        "Largest bucket size of every axis but `batch`, or axis -> size; unset means the model's "
        "own.",
        "elements",
        None,
    )
    hard_limit: PerAxis | None = field(
        "Longest row that runs at all, for every axis or axis -> size; between `max_length` and "
        "this `rare_shapes` decides. Unset means the model's own, such as the size of its "
        "position table, and twice `max_length` for a module.",
        "elements",
        None,
    )
    min_length: PerAxis = field(
        "Shortest row that the model can run, for every axis or axis -> size; a shorter one is "
        "refused with 400.",
        "elements",
        1,
    )
    max_rows: Int = field("Rows that one request may carry.", "rows", 2048, ge=1)
    max_batch_tokens: Int = field(
        "Buckets of a larger area are not built, except the smallest batch of each row shape.",
        "padded elements",
        8192,
        ge=1,
    )
    max_queue_rows: Int = field("More waiting rows are refused with 429.", "rows", 4096, ge=1)
    max_queue_tokens: Int = field(
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


class Batching(Frozen):
    """When a batch is dispatched; its largest size comes from ``policy.batch``."""

    batch_wait_timeout_s: Float = field(
        "Longest wait of a row for more rows while the device is free. 0 never waits.",
        "seconds",
        0.0,
        ge=0,
    )


class ModelConfig(Frozen):
    """One served model, from a directory (``path``) or from code (``import``)."""

    name: Name | None = field(
        "Name in requests and metrics; unset means the model's own.", "word", None
    )
    aliases: tuple[Name, ...] = field("Further names that requests may use.", "words", ())
    path: Name | None = field(
        "Model directory in sentence-transformers or Hugging Face form, relative to the config "
        "file; or `package:NAME` for the one inside an installed Python package.",
        "path",
        None,
    )
    import_: ImportName | None = field(
        "Factory of a torch module, as `package.module:function`; needs `inputs` and `outputs`.",
        "dotted name",
        None,
        alias="import",
    )
    inputs: Mapping[Name, InputSpec] | None = field(
        "Inputs of an imported module, in call order.", "specs", None
    )
    outputs: Mapping[Name, OutputSpec] | None = field(
        "Outputs of an imported module, in return order.", "specs", None
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        "Type of weights and arithmetic.", "word", "float32"
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        "Where the model runs: `auto` is CUDA if there is one.", "word", "auto"
    )
    layout: Literal["auto", "padded", "packed"] = field(
        "How rows are laid out in a batch: `padded` to a common size, or `packed` end to end "
        "(text encoders), where a bucket is a number of tokens. `auto` packs where the policy has "
        "`tokens`, and on CUDA where it says nothing and the model can.",
        "word",
        "auto",
    )
    policy: Policy = field(
        "What buckets there are: axis -> sizes, or several axes as `height,width` -> shapes. Axes "
        "left out get the default of the device.",
        "axes",
        {},
    )
    rare_shapes: Mapping[Axis, RareShape] = field(
        "What happens to rows that no bucket fits well: axis -> rules.", "axes", {}
    )
    limits: Limits = field("Bounds on rows, batches and the queue.", "section", Limits())
    compile: CompileConfig = field("How variants are built.", "section", CompileConfig())
    batching: Batching = field("When a batch is dispatched.", "section", Batching())
    record: Record | None = field(
        "Write the sizes and arrival times of accepted rows to files, for `shapeserve tune`; unset "
        "writes nothing.",
        "section",
        None,
    )
    token_embeddings: Bool = field(
        "Give the vector of every token as well, as the output `token_embeddings` [batch, seq, D] "
        "without padding (text encoders; not over `/v1/embeddings`).",
        "true or false",
        False,
    )
    trust_remote_code: Bool = field(
        "Run Python code that comes with the model directory.", "true or false", False
    )
    padding_invariant: Bool | None = field(
        "Whether padding leaves answers unchanged. False runs every row at its exact size: in the "
        "bucket of just that size where the policy has one, else in the fallback. Unset trusts "
        "the model and tests it at start.",
        "true or false",
        None,
    )
    threads: Int | None = field(
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
                hint = suggest(axis, sorted(axes)).replace("Known keys", "Axes")
                raise problem(f"no input has the axis {axis!r}; {hint}", section, key)
        for axis in self.limits.axes:
            if axis not in axes - {BATCH}:
                hint = suggest(axis, sorted(axes - {BATCH})).replace("Known keys", "Axes")
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


class ServeConfig(Frozen):
    """Everything that a service needs: its models and its HTTP side."""

    models: tuple[ModelConfig, ...] = field("The served models.", "models")
    serve: HttpConfig = field("The HTTP service.", "section", HttpConfig())

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
        serving = config.serve
        if serving.log_dir is not None:
            kept = str(base / Path(serving.log_dir).expanduser())
            serving = serving.model_copy(update={"log_dir": kept})
        return config.model_copy(update={"models": models, "serve": serving})

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
    if model.record is not None:
        kept = str(base / Path(model.record.path).expanduser())
        changed["record"] = model.record.model_copy(update={"path": kept})
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


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """Return a policy as plain JSON data; :func:`parse_policy` reads it back."""
    dumped: dict[str, Any] = _POLICY.dump_python(policy, mode="json", exclude_none=True)
    return dumped


def policy_schemas(ref_template: str) -> dict[str, Any]:
    """Return the JSON schema of a policy, under ``Policy``, and those that it refers to.

    Args:
        ref_template: how it refers, with ``{model}`` for the name.
    """
    schema = _POLICY.json_schema(ref_template=ref_template)
    schemas: dict[str, Any] = schema.pop("$defs")
    return {**schemas, "Policy": schema}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the config file."""
    return ServeConfig.model_json_schema(by_alias=True)


_POLICY: TypeAdapter[Policy] = TypeAdapter(Policy)
