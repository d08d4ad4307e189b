"""What every endpoint works with: the engines, worker threads, and the way through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request

from shapeserve.errors import RowFailed
from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.body import Bodies, read_body
from shapeserve.serve.calls import Call

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine, PreparedSample, Result

# Tokenisers release the GIL; more threads than this would only fight the model for the cores.
PREPARE_THREADS = 2
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


class Service:
    """Engines by name, and the steps that all endpoints share.

    Args:
        engines: model name -> started engine.
        aliases: model name -> further names of it.
        max_body_bytes: longer bodies are refused with 413.
        max_inflight_bytes: of all bodies held at a time.
        max_answer_bytes: of the tensors of one answer.

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
    ) -> None:
        self.engines = engines
        created_s = int(time.time())
        self.infos = [
            _info(engine, aliases.get(name, ()), created_s) for name, engine in engines.items()
        ]
        self.models = openai.by_name(self.infos)
        self.max_body_bytes = max_body_bytes
        self.max_answer_bytes = max_answer_bytes
        self.bodies = Bodies(max_inflight_bytes)
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, "shapeserve-prepare")

    def close(self) -> None:
        """Stop the worker threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def json_body(self, request: Request, call: Call, *, octets: bool = False) -> bytes:
        """Check the headers of a request with a JSON body; return the body, decompressed.

        Args:
            request: whose body is read.
            call: the same request's headers.
            octets: whether binary data may follow the JSON.
        """
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
        outcomes = await self.engines[model].submit_prepared(samples, deadline_s=call.deadline_s)
        return _all_answered(outcomes, item)


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
