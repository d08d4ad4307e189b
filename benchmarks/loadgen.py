"""The load generator: runs one scenario against one server and prints its summary as JSON.

It is a process of its own (``python -m benchmarks.loadgen < job.json``), so that its garbage
collection and event loop are nobody else's, and its CPU time is known.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from benchmarks.http_client import Pool, Target
from benchmarks.mix import mixed_texts
from benchmarks.scenarios import UNFINISHED, Sample, Scenario, poisson_schedule, summarise

# HAProxy accepts 4,096; what is above waits here, and its waiting counts.
MAX_CONNECTIONS = 2048
REQUEST_TIMEOUT_S = 120.0
# An open loop waits this long after its last request; what is still out is "unfinished".
GIVE_UP_S = 10.0
# Prebuilt requests are sent round and round; no arm caches answers.
PREBUILT_ROWS = 4096


def embeddings_request(target: Target, texts: Sequence[str]) -> bytes:
    """Return the bytes of one embeddings request."""
    return target.request(orjson.dumps({"model": target.model, "input": list(texts)}))


def answer_error(status: int, body: bytes, rows: int) -> str | None:
    """Say what is wrong with an answer, in few words that can be counted; None if it is good."""
    if status != 200:
        return f"status {status}"
    try:
        vectors = [item["embedding"] for item in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "unreadable answer"
    if len(vectors) != rows:
        return "wrong number of embeddings"
    if any(not vector or None in vector for vector in vectors):
        return "empty or null embedding"
    return None


async def ask(pool: Pool, request: bytes, rows: int, since_s: float) -> Sample:
    """Send one request and check its answer; the latency counts from ``since_s``."""
    error: str | None
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            status, body = await pool.exchange(request)
        latency_s = time.perf_counter() - since_s
        error = answer_error(status, body, rows)
    except asyncio.CancelledError:
        return Sample(time.perf_counter() - since_s, rows, UNFINISHED)
    except (OSError, EOFError, TimeoutError, ValueError) as failure:
        latency_s = time.perf_counter() - since_s
        error = type(failure).__name__
    return Sample(latency_s, rows, error)


async def closed_loop(
    pool: Pool, scenario: Scenario, requests: Iterator[bytes]
) -> tuple[list[Sample], float]:
    """Let every client ask, wait, ask again until the time is over; wait for the last answers.

    The last answers belong to the elapsed time: all load that was taken is divided by all time
    that it took.
    """
    samples: list[Sample] = []
    start_s = time.perf_counter()

    async def client() -> None:
        while (now_s := time.perf_counter()) - start_s < scenario.duration_s:
            sample = await ask(pool, next(requests), scenario.rows, now_s)
            samples.append(sample)
            if sample.error is not None:
                await asyncio.sleep(0.05)  # a refusing server must not turn this into a spin

    await asyncio.gather(*(client() for _ in range(scenario.clients)))
    return samples, time.perf_counter() - start_s


async def open_loop(
    pool: Pool, rows: int, requests: Iterator[bytes], schedule_s: Sequence[float]
) -> tuple[list[Sample], float]:
    """Send every request at its time, whatever became of the earlier ones.

    Latency counts from the scheduled time, so a server (or generator) that falls behind cannot
    hide it (coordinated omission).
    """
    start_s = time.perf_counter()
    tasks = []
    for due_s in schedule_s:
        if (wait_s := start_s + due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(ask(pool, next(requests), rows, start_s + due_s)))
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=GIVE_UP_S)
        for task in late:
            task.cancel()
    return list(await asyncio.gather(*tasks)), time.perf_counter() - start_s


async def run(target: Target, scenario: Scenario, seed: int) -> dict[str, Any]:
    """Run one scenario; return its summary and what the generator itself cost."""
    texts = mixed_texts(seed)
    built = [
        embeddings_request(target, list(itertools.islice(texts, scenario.rows)))
        for _ in range(PREBUILT_ROWS // scenario.rows)
    ]
    requests = itertools.cycle(built)
    pool = Pool(target, MAX_CONNECTIONS)
    cpu_s = time.process_time()
    if scenario.rate_per_s is None:
        samples, elapsed_s = await closed_loop(pool, scenario, requests)
    else:
        schedule_s = poisson_schedule(scenario.rate_per_s, scenario.duration_s, seed)
        samples, elapsed_s = await open_loop(pool, scenario.rows, requests, schedule_s)
    pool.close()
    summary = summarise(samples, elapsed_s)
    summary["generator_cpu_share"] = (time.process_time() - cpu_s) / elapsed_s
    return summary


def job(target: Target, scenario: Scenario, seed: int) -> str:
    """Return the standard input of a generator process."""
    return json.dumps({"target": asdict(target), "scenario": asdict(scenario), "seed": seed})


def main() -> None:
    """Read one job from standard input, run it, print its summary."""
    given = json.load(sys.stdin)
    target, scenario = Target(**given["target"]), Scenario(**given["scenario"])
    print(json.dumps(asyncio.run(run(target, scenario, given["seed"]))))


if __name__ == "__main__":
    main()
