"""From samples to routed rows: the CPU work before admission, off the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shapeserve.dispatch import Dispatcher, Route
from shapeserve.engine.rows import PreparedRow, PreparedSample, Sample
from shapeserve.engine.texts import FIRST, SECOND, Texts
from shapeserve.errors import InvalidRequest
from shapeserve.lanes import Lanes
from shapeserve.layout import RowArrays
from shapeserve.models.spec import TensorSpec, TextPair
from shapeserve.runner import ModelRunner

if TYPE_CHECKING:  # needs the extra ``hf``, which a service of other models may lack
    from shapeserve.models.tokenizer import TextTokenizer

_NAMED_ROWS = 10  # a message names the first ten bad rows
_KEPT_ROUTES = 4096  # every length of most text models; bounded, because clients choose sizes


class Preparer:
    """Tokenises, checks and routes samples for one runner (policy).

    Args:
        runner: where the rows will run.
        dispatcher: decides bucket, fallback, truncation, split or refusal.
        tokenizer: of a text model, else None.
        max_rows: rows that one request may carry.
        max_fallback_elements: area of one fallback batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        dispatcher: Dispatcher,
        tokenizer: TextTokenizer | None,
        *,
        max_rows: int,
        max_fallback_elements: int,
    ) -> None:
        self._runner = runner
        self._spec = runner.spec
        self._dispatcher = dispatcher
        self._texts = Texts(tokenizer, runner.spec, dispatcher) if tokenizer else None
        self._max_rows = max_rows
        self._sent = {n: s for n, s in runner.spec.inputs.items() if s.make is None}
        self._lanes = Lanes(runner.grid, max_fallback_elements)
        self._routes: dict[tuple[int | str | None, ...], Route] = {}

    def prepare(
        self,
        samples: Sequence[Sample],
        *,
        over_max: str | None = None,
        item: str = "input",
        first: str | None = None,
        start: int = 0,
    ) -> list[PreparedSample]:
        """Prepare every sample, or refuse the request naming the bad ones.

        Args:
            samples: one entry per row of the request.
            over_max: the caller's choice for rows beyond the largest bucket, instead of the
                configured one.
            item: what errors call the samples.
            first: what they call the first text of the pairs, where all have the same one.
            start: index of the first of the samples in the request, for errors.

        Raises:
            InvalidRequest: nothing, too much, or at least one sample that cannot run.
        """
        if not samples:
            raise InvalidRequest(f"{item} is empty; send at least one item", param=item)
        if len(samples) > self._max_rows:
            raise InvalidRequest(
                f"{item} has {len(samples)} items, at most {self._max_rows} are allowed; send "
                "several requests",
                param=item,
                code="too_many_rows",
            )
        if over_max == "split" and self._spec.task == "classify":
            raise InvalidRequest(
                f"over_max=split makes no sense for {self._spec.name}: the logits of a text are "
                "not those of its pieces; use fallback, truncate or reject",
                param="over_max",
            )
        outcomes = self._outcomes(samples, over_max)
        errors = {i: o for i, o in enumerate(outcomes, start) if isinstance(o, InvalidRequest)}
        if errors:
            raise _joined(errors, item, first)
        return [o for o in outcomes if isinstance(o, PreparedSample)]

    def prepare_each(
        self, samples: Sequence[Sample], *, first: int = 0
    ) -> list[PreparedSample | InvalidRequest]:
        """Prepare every sample; the error of a bad one stands in its place, named by index.

        Args:
            samples: any number of samples.
            first: index of the first of them in the caller's list.
        """
        outcomes = self._outcomes(samples, None)
        return [
            _joined({first + i: o}) if isinstance(o, InvalidRequest) else o
            for i, o in enumerate(outcomes)
        ]

    def _outcomes(
        self, samples: Sequence[Sample], over_max: str | None
    ) -> list[PreparedSample | InvalidRequest]:
        outcomes: list[PreparedSample | InvalidRequest] = []
        for row in self._to_arrays(samples, over_max):
            try:
                if isinstance(row, InvalidRequest):
                    raise row
                outcomes.append(self._route(row, over_max))
            except InvalidRequest as error:
                outcomes.append(error)
        return outcomes

    def _to_arrays(
        self, samples: Sequence[Sample], over_max: str | None
    ) -> list[RowArrays | InvalidRequest]:
        """Turn samples into arrays; texts are tokenised together."""
        rows: dict[int, RowArrays | InvalidRequest] = {}
        texts: dict[int, str | TextPair] = {}
        for i, sample in enumerate(samples):
            if self._texts is not None and isinstance(sample, str | TextPair):
                texts[i] = sample
            else:
                rows[i] = self._array_row(sample)
        if self._texts is not None and texts:
            rows |= zip(texts, self._texts.rows([*texts.values()], over_max), strict=True)
        return [rows[i] for i in range(len(samples))]

    def _array_row(self, sample: Any) -> RowArrays | InvalidRequest:
        try:
            if isinstance(sample, Mapping):
                return self._named_arrays(sample)
            if isinstance(sample, str | TextPair):
                raise InvalidRequest(
                    f"is a text, but {self._spec.name} takes tensors; send {self._accepted()}"
                )
            if self._texts is None or not isinstance(sample, (Sequence, np.ndarray)):
                raise InvalidRequest(f"is {type(sample).__name__}; send {self._accepted()}")
            return self._texts.of_ids(sample)
        except InvalidRequest as error:
            return error

    def _accepted(self) -> str:
        arrays = f"arrays by input name ({', '.join(self._sent)})"
        return f"a string, a list of token ids, or {arrays}" if self._texts else arrays

    def _named_arrays(self, sample: Mapping[str, Any]) -> RowArrays:
        """Check arrays by name against the specs and read the row's sizes off them."""
        if set(sample) != set(self._sent):
            raise InvalidRequest(
                f"has the inputs {sorted(map(str, sample))}, expected exactly {sorted(self._sent)}"
            )
        arrays: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        for name, spec in self._sent.items():
            array = _as_array(sample[name], spec)
            if array is None or array.ndim != len(spec.dims) - 1:
                given = sample[name]
                what = (
                    f"has dtype {given.dtype} and shape {list(given.shape)}"
                    if isinstance(given, np.ndarray)
                    else f"is {type(given).__name__}"
                )
                expected = f"an array of {list(spec.dims[1:])} that {spec.dtype} can hold"
                raise InvalidRequest(f"{name} {what}; send {expected}")
            for dim, size in zip(spec.dims[1:], array.shape, strict=True):
                known = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
                if size != known or size < 1:
                    raise InvalidRequest(
                        f"{name} has size {size} along {dim}, expected {max(known, 1)}"
                    )
            _check_finite(array, name)
            arrays[name] = array
        for axis, least in self._spec.min_length.items():
            if sizes[axis] < least:
                raise InvalidRequest(
                    f"has {axis}={sizes[axis]}, the model needs at least {least}; send a larger "
                    "row",
                    code="too_short",
                )
        if self._texts is not None:
            self._texts.check_ids(arrays["input_ids"])
        for name, array in arrays.items():
            _check_below(array, self._sent[name])
        return RowArrays(arrays, {axis: sizes[axis] for axis in self._spec.row_axes})

    def _route(self, row: RowArrays, over_max: str | None) -> PreparedSample:
        route = self._route_of(row.sizes, over_max)
        if route.message is not None:
            raise InvalidRequest(route.message, code="too_long")
        cut = self._cut(row, route.keep) if route.keep else row
        truncated_from = _length(row) if route.keep else None
        if route.action != "split":
            return PreparedSample((self._prepared(cut, route),), row.sizes, truncated_from)
        pieces = [
            self._prepared(piece, self._route_of(piece.sizes, None))
            for piece in self._pieces(cut, route)
        ]
        return PreparedSample(tuple(pieces), row.sizes, truncated_from)

    def _route_of(self, sizes: Mapping[str, int], over_max: str | None) -> Route:
        """The dispatcher's decision, kept for sizes that come again, as those of short texts do."""
        key = (*sizes.values(), over_max)
        route = self._routes.get(key)
        if route is None:
            route = self._dispatcher.route(sizes, over_max=over_max)
            if len(self._routes) < _KEPT_ROUTES:
                self._routes[key] = route
        return route

    def _prepared(self, row: RowArrays, route: Route) -> PreparedRow:
        return PreparedRow(row, *self._lanes.place(row.sizes, route), self._runner)

    def _cut(self, row: RowArrays, kept: Mapping[str, int]) -> RowArrays:
        if self._texts is not None:
            return self._texts.cut(row, kept["seq"])
        return self._crop(row, {a: (0, size) for a, size in {**row.sizes, **kept}.items()})

    def _pieces(self, row: RowArrays, route: Route) -> list[RowArrays]:
        if self._texts is not None:
            return self._texts.pieces(row, max(route.pieces))
        start, parts = 0, []
        for size in route.pieces:
            bounds = {axis: (0, whole) for axis, whole in row.sizes.items()}
            bounds[str(route.axis)] = (start, start + size)
            parts.append(self._crop(row, bounds))
            start += size
        return parts

    def _crop(self, row: RowArrays, bounds: Mapping[str, tuple[int, int]]) -> RowArrays:
        arrays = {}
        for name, array in row.arrays.items():
            dims = self._spec.inputs[name].dims[1:]
            region = tuple(slice(*bounds[d]) if isinstance(d, str) else slice(None) for d in dims)
            arrays[name] = array[region]
        return RowArrays(arrays, {axis: end - start for axis, (start, end) in bounds.items()})


def _check_finite(array: np.ndarray, name: str) -> None:
    """Refuse NaN and infinity: the answer would be none either, and look like our fault."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return
    first = np.argwhere(~np.isfinite(array))[0]
    raise InvalidRequest(
        f"{name} holds {array[tuple(first)]} at {first.tolist()}; send finite numbers"
    )


def _as_array(value: Any, spec: TensorSpec) -> np.ndarray | None:
    """Return ``value`` as an array that the spec's dtype holds without loss of kind or range."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return None
    kinds = "fiub" if "float" in spec.dtype else "iub"
    if array.dtype.kind not in kinds:
        return None
    if spec.dtype in ("uint8", "int32") and array.size and array.dtype.kind in "iu":
        bounds = np.iinfo(spec.dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            return None
    return array


def _check_below(array: np.ndarray, spec: TensorSpec) -> None:
    """Refuse integers that the model has no entry for: on a GPU they end the process."""
    if spec.below is None or (array.min() >= 0 and array.max() < spec.below):
        return
    bad = array[(array < 0) | (array >= spec.below)].flat[0]
    raise InvalidRequest(f"{spec.name} holds {bad}; values are 0 to {spec.below - 1}")


def _length(row: RowArrays) -> int:
    return prod(row.sizes.values())


def _joined(
    errors: Mapping[int, InvalidRequest], item: str = "input", first: str | None = None
) -> InvalidRequest:
    """One error for the request: the first bad rows by index, and the first one's code."""
    shared = next((e for e in errors.values() if first is not None and e.param == FIRST), None)
    if shared is not None:  # of every row, and named once
        return InvalidRequest(f"{first} {shared.message}", param=first, code=shared.code)
    named = list(errors.items())[:_NAMED_ROWS]
    places = [f"{item}[{i}]" + ("" if first else _part(error)) for i, error in named]
    text = "; ".join(f"{at} {e.message}" for at, (_, e) in zip(places, named, strict=True))
    more = f"; and {len(errors) - len(named)} more" if len(errors) > len(named) else ""
    return InvalidRequest(text + more, param=places[0], code=named[0][1].code)


def _part(error: InvalidRequest) -> str:
    """Which text of a pair is at fault, as part of its name."""
    return f".{error.param}" if error.param in (FIRST, SECOND) else ""
