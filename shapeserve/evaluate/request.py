"""Time whole requests through engines: checks, queue, copies, the call, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shapeserve.engine import Engine
from shapeserve.errors import ShapeServeError
from shapeserve.evaluate.latency import FirstCall, Latency
from shapeserve.evaluate.module import recompiles_total, said
from shapeserve.evaluate.reference import Case
from shapeserve.evaluate.result import Arm, CompileCost, Row, Scope, Start
from shapeserve.evaluate.timing import Timing, time_calls, timed
from shapeserve.metrics import Mode, Tier
from shapeserve.warmup import Probe

_ARM_OF = {Mode.GRAPH: Arm.CAPTURED, Mode.SPECIALIZED: Arm.SPECIALIZED, Mode.COMPILED: Arm.COMPILED}
_CPU = torch.device("cpu")  # a result is on the host when it is there


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that is ready, and how it became so."""

    engine: Engine
    start: Start

    @property
    def arm(self) -> Arm:
        """How it runs a bucket."""
        programs = self.engine.runner.programs
        if programs.tier is Tier.GRAPH:
            return Arm.CAPTURED
        return Arm.COMPILED if programs.compiles else Arm.EAGER


def measure_requests(
    engines: Sequence[Served], case: Case, probe: Probe, timing: Timing
) -> list[Row]:
    """Return a row for each engine; the requests, whose rows fill the bucket, take turns."""
    clients, rows = {}, {}
    for served in engines:
        client = _Client(served, case)
        row = client.first_row(probe)
        clients[row.arm], rows[row.arm] = client, row
    well = {arm: client.call for arm, client in clients.items() if rows[arm].error is None}
    before = {arm: recompiles_total(client.engine.metrics) for arm, client in clients.items()}
    seconds, failed = time_calls(well, _CPU, timing)
    for arm in well:
        if arm in failed:
            rows[arm] = replace(rows[arm], error=said(failed[arm]))
        else:
            rows[arm] = clients[arm].timed_row(rows[arm], seconds[arm], before[arm])
    return [*rows.values()]


class _Client:
    """Sends one request again and again."""

    def __init__(self, served: Served, case: Case) -> None:
        self.engine = served.engine
        self._served = served
        self._case = case
        self._samples = [row.arrays for row in case.rows]
        self._first_s = 0.0
        self._outputs: list[Mapping[str, np.ndarray]] = []
        self._ran: Counter[tuple[Mode, str]] = Counter()
        self._arm = served.arm

    def call(self) -> None:
        """Send it and wait; a row that fails raises."""
        results = self.engine.admit_when_free(self.engine.prepare(self._samples))()
        outputs = []
        for result in results:
            if isinstance(result, ShapeServeError):
                raise result
            outputs.append(result.outputs)
            self._ran[result.mode, result.bucket] += 1
        self._outputs = outputs

    def first_row(self, probe: Probe) -> Row:
        """Send it for the first time, and compare the answers."""
        bucket, cost = self._case.bucket.label, _whole_cost(self._served.start)
        row = Row(bucket, self._served.arm, Scope.REQUEST, compile=cost)
        try:
            self._first_s = timed(self.call, _CPU)
            self._arm = self._arm_seen()
            dtype = self.engine.spec.dtype
            numerics = self._case.numerics(self._outputs, probe, dtype)
            return replace(row, arm=self._arm, numerics=numerics)
        except Exception as error:  # the user's model: whatever it raises is a result
            return replace(row, error=said(error))

    def _arm_seen(self) -> Arm:
        """How the rows ran: a bucket whose capture failed is served compiled.

        One that is served eagerly keeps the arm that was meant, for beside it stands the engine
        that is eager on purpose; its note says where it ran.
        """
        seen = {_ARM_OF.get(mode, Arm.EAGER) for mode, _ in self._ran}
        return self._served.arm if len(seen) != 1 or seen == {Arm.EAGER} else seen.pop()

    def timed_row(self, row: Row, later_s: Sequence[float], recompiles: int) -> Row:
        """Fill in what the later requests took; ``recompiles`` were there before."""
        start = self._served.start
        start_s = start.once_s + start.seconds
        includes = f"the start of the engine ({start_s:.1f} s) and the first request"
        first = FirstCall(start_s + self._first_s, includes)
        return replace(
            row,
            latency=Latency(first, tuple(later_s)),
            recompiles=recompiles_total(self.engine.metrics) - recompiles,
            note=self._elsewhere(),
        )

    def _elsewhere(self) -> str | None:
        """Say where rows ran, if not all of them in the bucket and the way that was meant."""
        arm, label = self._arm, self._case.bucket.label
        if all(_ARM_OF.get(mode, Arm.EAGER) is arm and b == label for mode, b in self._ran):
            return None
        whole, most = self._ran.total(), self._ran.most_common()
        parts = (f"{n / whole:.0%} in {bucket} ({mode})" for (mode, bucket), n in most)
        return f"rows ran {', '.join(parts)}"


def _whole_cost(start: Start) -> CompileCost | None:
    """What all programs of an engine cost together."""
    costs = [*start.programs.values()]
    if not costs:
        return None
    return CompileCost(
        seconds=sum(cost.seconds for cost in costs),
        graphs=sum(cost.graphs for cost in costs),
        graph_breaks=sum(cost.graph_breaks for cost in costs),
        cache_hits=sum(cost.cache_hits for cost in costs),
        cache_misses=sum(cost.cache_misses for cost in costs),
        cache_bypasses=sum(cost.cache_bypasses for cost in costs),
        generated_kernels=sum(cost.generated_kernels or 0 for cost in costs) or None,
    )
