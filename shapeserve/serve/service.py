"""What every endpoint works with: the engines, worker threads, and the way through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request

from shapeserve.errors import DeadlineExceeded, InvalidRequest, RowFailed, Unavailable
from shapeserve.metrics import Endpoint
from shapeserve.models import TextPair
from shapeserve.protocols import http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.body import Bodies, read_body
from shapeserve.serve.calls import Call
from shapeserve.serve.tracing import Spans

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine, PreparedSample, Result, Sample

# Tokenisers release the GIL; more threads than this would only fight the model for the cores.
PREPARE_THREADS = 2
# A service that is replaced takes its place within seconds. Arbitrary.
DRAINING_RETRY_S = 5.0
# Characters that are tokenised in one go, while other requests wait: they take about 30 ms.
CHUNK_CHARACTERS = 32_768
# Below this a reply renders in well under a millisecond, less than a hop to a thread costs.
INLINE_ROWS = 16

Handler = Callable[[Request, Call], Awaitable[Reply]]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Route:
    """One thing that is served.

    Attributes:
        method: HTTP method.
        path: as requested; ``{model}`` stands for one or more segments, of which there is one.
        endpoint: metric label.
        handler: answers.
    """

    method: str
    path: str
    endpoint: Endpoint
    handler: Handler


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows of a request that passed every check that needs no tokenizer.

    Attributes:
        model: name of the engine.
        rows: what ``Engine.prepare`` takes.
        over_max: as for ``Engine.prepare``; so are ``item`` and ``first``.
        item: what errors call the rows.
        first: what they call the first text of all pairs.
        check: called with the prepared rows; raises if they are too much.
    """

    model: str
    rows: Sequence[Sample]
    over_max: str | None
    item: str = "input"
    first: str | None = None
    check: Callable[[Sequence[PreparedSample]], None] | None = None


class Service:
    """Engines by name, and the steps that all endpoints share.

    Args:
        engines: model name -> started engine.
        aliases: model name -> further names of it.
        max_body_bytes: longer bodies are refused with 413.
        max_inflight_bytes: of all bodies held at a time.
        max_answer_bytes: of the tensors of one answer.
        spans: traces what the engines did; without it nothing is traced.

    Thread rule: one event loop. Nothing here blocks it.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        aliases: Mapping[str, tuple[str, ...]],
        max_body_bytes: int,
        max_inflight_bytes: float,
        max_answer_bytes: float,
        spans: Spans | None = None,
    ) -> None:
        self.engines = engines
        self._spans = spans
        created_s = int(time.time())
        self.infos = [
            _info(engine, aliases.get(name, ()), created_s) for name, engine in engines.items()
        ]
        self.models = openai.by_name(self.infos)
        self.max_body_bytes = max_body_bytes
        self.max_answer_bytes = max_answer_bytes
        self.bodies = Bodies(max_inflight_bytes)
        self.draining = False
        self.in_flight = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, "shapeserve-prepare")
        # Texts longer than a chunk, which cannot be taken apart, wait for nobody but each other.
        self._long_pool = ThreadPoolExecutor(1, "shapeserve-prepare-long")

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Answer what is under way and refuse what comes; call ``on_idle`` once nothing is left."""
        self.draining, self._on_idle = True, on_idle
        if not self.in_flight:
            on_idle()

    def resume(self) -> None:
        """Take new work again."""
        self.draining = False

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request for as long as it is answered."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.draining and not self.in_flight:
                self._on_idle()

    def check_open(self) -> None:
        """Refuse work that comes while the service stops.

        Raises:
            Unavailable: it does.
        """
        if self.draining:
            raise Unavailable(
                "the service is stopping; send the request again to another one, or when this one "
                "is back",
                retry_after_s=DRAINING_RETRY_S,
            )

    def close(self) -> None:
        """Stop the worker threads."""
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def json_body(self, request: Request, call: Call, *, octets: bool = False) -> bytes:
        """Check the headers of a request with a JSON body; return the body, decompressed.

        Args:
            request: whose body is read.
            call: the same request's headers.
            octets: whether binary data may follow the JSON.
        """
        self.check_open()
        call.set_deadline()
        http.check_media_type(call.headers.get("content-type"), octets=octets)
        encoding = http.parse_content_encoding(call.headers.get("content-encoding"))
        length = call.headers.get("content-length")
        hold = partial(self.bodies.hold, call)
        body = await read_body(request, length, self.max_body_bytes, hold)
        if encoding is None:
            return body
        plain = await self.in_worker(http.decompress, body, encoding, self.max_body_bytes)
        hold(len(plain))
        return plain

    async def in_worker(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work (parsing, tokenising, rendering) on a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(job, *args, **kwargs))

    async def prepare(
        self, call: Call, read: Callable[[], tuple[T, Samples]]
    ) -> tuple[T, list[PreparedSample]]:
        """Read a request and prepare its rows on worker threads, many characters bit by bit.

        Between two bits other requests have their turn. Nothing is queued if a row is bad; what
        comes after the bit with the first bad row is not looked at.

        Args:
            call: whose deadline is kept.
            read: returns the request and its rows.

        Raises:
            InvalidRequest: naming the bad rows, the first ten of the bit that has some.
            DeadlineExceeded: before all were prepared.
        """
        request, samples, prepared = await self.in_worker(self._read_and_prepare, read)
        if prepared is not None:
            return request, prepared
        prepared = []
        loop = asyncio.get_running_loop()
        for start, end in _chunks(samples.rows):
            if call.late:
                raise DeadlineExceeded("the deadline passed before all rows were tokenised")
            size = sum(map(_characters, samples.rows[start:end]))
            pool = self._pool if size <= CHUNK_CHARACTERS else self._long_pool
            prepared += await loop.run_in_executor(pool, self._prepare_part, samples, start, end)
        if samples.check is not None:
            await self.in_worker(samples.check, prepared)
        return request, prepared

    def _read_and_prepare(
        self, read: Callable[[], tuple[T, Samples]]
    ) -> tuple[T, Samples, list[PreparedSample] | None]:
        """Read a request, and prepare its rows at once if they are one chunk."""
        request, samples = read()
        if sum(map(_characters, samples.rows)) > CHUNK_CHARACTERS:
            return request, samples, None
        prepared = self._prepare_part(samples, 0, len(samples.rows))
        if samples.check is not None:
            samples.check(prepared)
        return request, samples, prepared

    def _prepare_part(self, samples: Samples, start: int, end: int) -> list[PreparedSample]:
        try:
            return self.engines[samples.model].prepare(
                samples.rows[start:end],
                over_max=samples.over_max,
                item=samples.item,
                first=samples.first,
                start=start,
            )
        except InvalidRequest as error:
            ours = (error.param or "").startswith(f"{samples.item}[")
            if end == len(samples.rows) or not ours:
                raise
            raise InvalidRequest(
                f"{error.message}; {samples.item}[{end}] and what comes after it were not looked "
                "at yet",
                param=error.param,
                code=error.code,
            ) from None

    async def render(self, rows: int, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Render a reply of ``rows`` rows: here if they are few, else on a worker thread."""
        if rows <= INLINE_ROWS:
            return job(*args, **kwargs)
        return await self.in_worker(job, *args, **kwargs)

    async def answer(
        self, model: str, samples: Sequence[PreparedSample], call: Call, *, item: str = "input"
    ) -> list[Result]:
        """Wait for the results of prepared samples, in order; errors call them ``item``.

        Raises:
            RowFailed: naming the rows that failed (the first ten).
            Overloaded, DeadlineExceeded, Unavailable: see ``Engine.submit_prepared``.
        """
        queued_s = time.monotonic()
        outcomes = await self.engines[model].submit_prepared(samples, deadline_s=call.deadline_s)
        if self._spans is not None:
            answered = [outcome for outcome in outcomes if not isinstance(outcome, RowFailed)]
            self._spans.record(model, answered, queued_s)
        return _all_answered(outcomes, item)


def _characters(row: Sample) -> int:
    """How much work a row is: its characters, or its token ids; ready arrays are none."""
    if isinstance(row, TextPair):
        return len(row.text) + len(row.text_pair)
    return 0 if isinstance(row, Mapping) else len(row)


def _chunks(rows: Sequence[Sample]) -> Iterator[tuple[int, int]]:
    """Cut rows into parts of at most ``CHUNK_CHARACTERS``, or of one row: start and end of each."""
    start = size = 0
    for i, row in enumerate(rows):
        size += _characters(row)
        if i > start and size > CHUNK_CHARACTERS:
            yield start, i
            start, size = i, _characters(row)
    yield start, len(rows)


def _info(engine: Engine, aliases: tuple[str, ...], created_s: int) -> openai.ModelInfo:
    spec = engine.spec
    return openai.ModelInfo(
        name=spec.name,
        aliases=aliases,
        dim=spec.embedding_dim,
        max_rows=engine.config.limits.max_rows,
        normalize=spec.normalize,
        created_s=created_s,
        head=spec.head,
    )


def _all_answered(outcomes: Sequence[Result | RowFailed], item: str) -> list[Result]:
    """Return the results, or raise one 500 that names the rows that failed (the first ten)."""
    failed = [(i, outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, RowFailed)]
    if failed:
        named = "; ".join(f"{item}[{i}]: {error.message}" for i, error in failed[:10])
        more = f"; and {len(failed) - 10} more" if len(failed) > 10 else ""
        raise RowFailed(
            f"{named}{more}; the other rows of this request ran and may be sent again.",
            param=f"{item}[{failed[0][0]}]",
        )
    return [outcome for outcome in outcomes if not isinstance(outcome, RowFailed)]
