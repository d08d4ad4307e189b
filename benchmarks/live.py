"""A service under test: rows of exact lengths at exact times, and what it counts meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.http_client import Pool, Target
from benchmarks.loadgen import open_loop
from benchmarks.processes import ArmError, ServerProcess
from benchmarks.scenarios import Sample

GROUPS, GROUP_REQUESTS = 10, 5  # of requests that are sent one by one
FIRST_ID, LAST_ID = 1000, 29_000  # ordinary words of the vocabulary


@dataclass(frozen=True)
class Counters:
    """What the service has counted so far."""

    elements: Mapping[str, float]
    device_s: float
    recompiles: float

    @classmethod
    def parse(cls, text: str) -> Counters:
        """Read an exposition."""
        elements: dict[str, float] = {}
        device_s = recompiles = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "shapeserve_tokens_total":
                    kind = sample.labels["kind"]
                    elements[kind] = elements.get(kind, 0.0) + sample.value
                elif sample.name == "shapeserve_device_seconds_total":
                    device_s += sample.value
                elif sample.name == "shapeserve_recompiles_total":
                    recompiles += sample.value
        return cls(elements, device_s, recompiles)

    def since(self, before: Counters) -> Counters:
        """Return what came since then."""
        elements = {kind: n - before.elements.get(kind, 0.0) for kind, n in self.elements.items()}
        return Counters(
            elements, self.device_s - before.device_s, self.recompiles - before.recompiles
        )

    @property
    def waste(self) -> dict[str, float]:
        """``padding_<axis>`` -> share of all elements."""
        whole = sum(self.elements.values())
        return {kind: n / whole for kind, n in self.elements.items() if kind != "real"}


class Played(NamedTuple):
    """What became of rows: every request, seconds to the last answer, what was counted."""

    samples: list[Sample]
    elapsed_s: float
    counted: Counters


class Live:
    """A service that runs, and how to ask it."""

    def __init__(self, server: ServerProcess, target: Target, seed: int) -> None:
        self._server = server
        self.target = target
        self._rng = np.random.default_rng(seed)

    def counters(self) -> Counters:
        """Scrape it."""
        connection = http.client.HTTPConnection(self.target.host, self.target.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return Counters.parse(connection.getresponse().read().decode())
        finally:
            connection.close()

    def play(self, lengths: Sequence[int], schedule_s: Sequence[float]) -> Played:
        """Send rows of these lengths when they are due."""
        requests = [self._request(length) for length in lengths]
        before = self.counters()
        samples, elapsed_s = asyncio.run(self._open_loop(requests, schedule_s))
        self._server.check_alive()
        return Played(samples, elapsed_s, self.counters().since(before))

    def host_s(self, length: int) -> float:
        """Return what a request of an idle service spends outside the device.

        The median of some groups, each the mean of a few requests sent one by one.
        """
        return statistics.median(self._group_host_s(length) for _ in range(GROUPS))

    def _group_host_s(self, length: int) -> float:
        requests = [self._request(length) for _ in range(GROUP_REQUESTS)]
        before = self.counters()
        latencies_s = asyncio.run(self._one_by_one(requests))
        device_s = self.counters().since(before).device_s
        return (sum(latencies_s) - device_s) / len(requests)

    def _request(self, length: int) -> bytes:
        ids = self._rng.integers(FIRST_ID, LAST_ID, length).tolist()
        return self.target.request(orjson.dumps({"model": self.target.model, "input": [ids]}))

    async def _open_loop(
        self, requests: Sequence[bytes], schedule_s: Sequence[float]
    ) -> tuple[list[Sample], float]:
        pool = Pool(self.target, len(requests))
        try:
            return await open_loop(pool, 1, iter(requests), schedule_s)
        finally:
            pool.close()

    async def _one_by_one(self, requests: Sequence[bytes]) -> list[float]:
        pool = Pool(self.target, 1)
        try:
            latencies_s = []
            for request in requests:
                (sample,), _ = await open_loop(pool, 1, iter([request]), [0.0])
                if sample.error:
                    raise ArmError(f"a request of the idle service failed: {sample.error}")
                latencies_s.append(sample.latency_s)
            return latencies_s
        finally:
            pool.close()
