"""The hand-written services: what people write on Ray Serve for an encoder, in one file.

``ray-nobatch`` runs one text a call; ``ray-batch`` is ``@serve.batch``, padded to the longest text
of the batch; ``ray-batch-compiled`` is the same through ``torch.compile(dynamic=True)``.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.arms import BASELINE_ARMS
from benchmarks.encoder import BATCH_ROWS, Encoder
from benchmarks.environment import cores

BATCH_WAIT_TIMEOUT_S = 0.005

Row = tuple[list[float], int]  # a vector and the number of tokens it was made of


# max_ongoing_requests: the default of 5 would keep every batch at 5 or less.
@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": cores()})
class Embeddings:
    """The usual embeddings service. The model runs in a thread, never on the event loop."""

    def __init__(self, arm: str) -> None:
        self._batching = arm != "ray-nobatch"
        self._encoder = Encoder(compiled=arm == "ray-batch-compiled")
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            return Response(status_code=200)  # readiness
        body = orjson.loads(await request.body())
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        if self._batching:
            rows = await asyncio.gather(*(self._embed_together(text) for text in texts))
        else:
            rows = [(await self._encode([text]))[0] for text in texts]
        return Response(orjson.dumps(answer(body["model"], rows)), media_type="application/json")

    @serve.batch(max_batch_size=BATCH_ROWS, batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S)
    async def _embed_together(self, texts: list[str]) -> list[Row]:
        return await self._encode(texts)

    async def _encode(self, texts: list[str]) -> list[Row]:
        loop = asyncio.get_running_loop()
        vectors, tokens = await loop.run_in_executor(self._thread, self._encoder.encode, texts)
        return list(zip(vectors, tokens, strict=True))


def answer(model: str, rows: list[Row]) -> dict[str, Any]:
    """Return the answer in OpenAI's form."""
    tokens = sum(count for _, count in rows)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, (vector, _) in enumerate(rows)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=BASELINE_ARMS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--temp-dir", required=True, help="short path for Ray's sockets and logs")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ray.init(
        address="local",
        num_cpus=cores(),
        include_dashboard=False,
        log_to_driver=True,
        _temp_dir=options.temp_dir,
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": options.port},
        logging_config={"enable_access_log": False},
    )
    serve.run(Embeddings.bind(options.arm), name="embeddings", route_prefix="/")  # type: ignore[attr-defined]
    stop.wait()
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


if __name__ == "__main__":
    main()
