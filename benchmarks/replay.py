"""Send the rows of a trace to a running service at their recorded times, round and round.

    python benchmarks/replay.py http://127.0.0.1:8000 --model all-MiniLM-L6-v2 --speed 5

Rows are token ids of exactly the recorded lengths, one a request. A line every ten seconds says
what became of them; Ctrl-C, SIGTERM or --seconds ends it, and it waits for what is out. Exit code 1
if a request failed. Latency counts from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.http_client import Pool, Target
from benchmarks.live import FIRST_ID, LAST_ID
from benchmarks.loadgen import MAX_CONNECTIONS, ask
from benchmarks.scenarios import Sample, percentile
from shapeserve.errors import ShapeServeError
from shapeserve.traces import SEQ, read_traffic

TRACE = Path(__file__).resolve().parent / "data" / "traces" / "enc_rag_mix.csv.gz"
REPORT_S = 10.0


@dataclass
class Tally:
    """What became of the requests since the start, and of those since the last line."""

    errors: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    recent_s: list[float] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Count one request."""
        if sample.error is None:
            self.answered += 1
            self.recent_s.append(sample.latency_s)
        else:
            self.errors[sample.error] += 1

    def line(self) -> str:
        """Say it, and begin anew with the latencies."""
        recent_ms, self.recent_s = sorted(1e3 * s for s in self.recent_s), []
        latency = (
            f"p50 {percentile(recent_ms, 50):.1f} ms, p99 {percentile(recent_ms, 99):.1f} ms"
            if recent_ms
            else "no answer since the last line"
        )
        why = ", ".join(f"{error}: {n}" for error, n in self.errors.most_common(3))
        failed = f"{self.errors.total()} failed{f' ({why})' if why else ''}"
        return f"{time.strftime('%H:%M:%S')} {self.answered} answered, {failed}; {latency}"


def rows(lengths: Sequence[int], times_s: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Yield when each row is due and its length, without end: one round of the trace on another."""
    gap_s = times_s[-1] / len(times_s)  # an ordinary one, between two rounds
    for turn in itertools.count():
        for due_s, length in zip(times_s, lengths, strict=True):
            yield turn * (times_s[-1] + gap_s) + due_s, length


async def replay(target: Target, due: Iterator[tuple[float, int]], seconds: float) -> Tally:
    """Send until ``seconds`` have passed or a signal comes; report meanwhile; wait for the rest."""
    tally, ended, rng = Tally(), asyncio.Event(), np.random.default_rng(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    pool, start_s = Pool(target, MAX_CONNECTIONS), time.perf_counter()
    out: set[asyncio.Task[None]] = set()

    async def one(length: int, since_s: float) -> None:
        ids = rng.integers(FIRST_ID, LAST_ID, length).tolist()
        body = orjson.dumps({"model": target.model, "input": [ids]})
        tally.add(await ask(pool, target.request(body), 1, since_s))

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            print(tally.line(), flush=True)

    reporter = asyncio.create_task(report())
    for due_s, length in due:
        if due_s >= seconds or await _ends(ended, start_s + due_s - time.perf_counter()):
            break
        out.add(task := asyncio.create_task(one(length, start_s + due_s)))
        task.add_done_callback(out.discard)
    reporter.cancel()
    await asyncio.gather(*out)  # each gives up by itself
    pool.close()
    return tally


async def _ends(ended: asyncio.Event, within_s: float) -> bool:
    """Wait until a row is due; return whether the end came first."""
    try:
        async with asyncio.timeout(max(within_s, 0)):
            await ended.wait()
    except TimeoutError:
        pass
    return ended.is_set()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the service, with the application's prefix if it has one")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--trace", type=Path, default=TRACE, help="t_s,len (enc_rag_mix)")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as recorded (1)")
    parser.add_argument("--max-length", type=int, default=256, help="cut rows to so many tokens")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="until a signal")
    options = parser.parse_args(arguments)
    if urlsplit(options.url).scheme != "http" or not urlsplit(options.url).hostname:
        parser.error(f"{options.url} is no address; give one such as http://127.0.0.1:8000")
    if not options.speed > 0:
        parser.error(f"--speed {options.speed:g}: give a number above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay; return 1 if a request failed, 2 if the trace cannot be read."""
    options = parse(arguments)
    try:
        traffic = read_traffic(options.trace)
    except ShapeServeError as error:
        print(error, file=sys.stderr)
        return 2
    if traffic.times_s is None or traffic.axes != (SEQ,):
        print(f"{options.trace} is no trace of lengths (t_s,len); give one", file=sys.stderr)
        return 2
    clipped = traffic.clipped({SEQ: options.max_length})
    url = urlsplit(options.url)
    path = url.path.rstrip("/") + "/v1/embeddings"
    target = Target(str(url.hostname), url.port or 80, path, options.model)
    times_s = ((traffic.times_s - traffic.times_s[0]) / options.speed).tolist()
    due = rows(clipped.sizes[:, 0].tolist(), times_s)
    tally = asyncio.run(replay(target, due, options.seconds))
    print(f"{tally.line()}\n{'failed' if tally.errors else 'ok'}")
    return int(bool(tally.errors))


if __name__ == "__main__":
    sys.exit(main())
