"""Everything that a report shows beside the proposal itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shapeserve.traces import Traffic
from shapeserve.tuning.fit import fit
from shapeserve.tuning.loads import Loads, under_load
from shapeserve.tuning.packed import PackedTask
from shapeserve.tuning.propose import Proposal
from shapeserve.tuning.request import Request, Scored
from shapeserve.tuning.search import MAX_SHAPES, PLAYED, Steps
from shapeserve.tuning.task import PaddedTask, Task, ends_of

OnStep = Callable[[int, int], None]

_UNDER_LOAD = ("default", "pow2", "proposed")


@dataclass(frozen=True)
class Study:
    """A proposal, the traffic that judges it, and what else could be had.

    Attributes:
        source: where the traffic comes from, for people to read.
        note: what else is to be known of it, or "".
        ordered: whether the traffic has times.
        request: what was asked for.
        proposal: what came of it.
        judged: the second half, cut to the ends of the proposal; of packed rows the batches that
            they form, as if each were a row.
        by_number: number of row shapes (or sizes) -> what so many would do.
        loads: latencies, None if the traffic has no times or nothing is known about costs.
    """

    source: str
    note: str
    ordered: bool
    request: Request
    proposal: Proposal
    judged: Traffic
    by_number: Mapping[int, Scored]
    loads: Loads | None

    @property
    def named(self) -> dict[str, Scored]:
        """Name -> policy, the proposed one last."""
        return {**self.proposal.compared, "proposed": self.proposal.proposed}


def study(
    source: str,
    note: str,
    traffic: Traffic,
    request: Request,
    proposal: Proposal,
    on_step: OnStep = lambda done, total: None,
) -> Study:
    """Fit every number of row shapes, and simulate today's default, powers of two and the proposal.

    Args:
        source: where the traffic comes from, for people to read.
        note: what else is to be known of it, or "".
        traffic: the rows.
        request: what was asked for.
        proposal: what :func:`shapeserve.tuning.propose.propose` made of both.
        on_step: told how many fits of how many are done, and then how many simulations.

    Raises:
        ConfigError: the proposal has more buckets than a policy may have.
    """
    packed = request.layout == "packed"
    task: Task = (PackedTask if packed else PaddedTask).of(traffic, request)
    ordered = traffic.times_s is not None
    numbers = by_number(task, proposal, on_step)
    loads = None
    if task.cost is not None and ordered:
        _, second = traffic.clipped(ends_of(traffic, request)).halves()
        named = {**proposal.compared, "proposed": proposal.proposed}
        policies = {
            name: task.served(named[name].buckets, proposal.batches if name == "proposed" else None)
            for name in _UNDER_LOAD
        }
        loads = under_load(second, policies, on_step)
    return Study(source, note, ordered, request, proposal, task.second, numbers, loads)


def by_number(
    task: Task, proposal: Proposal, on_step: OnStep = lambda done, total: None
) -> dict[int, Scored]:
    """Return what each number of row shapes up to ``MAX_SHAPES`` would do to both halves.

    Of packed rows that takes simulations, so that only some numbers are there; that of the proposal
    always is.
    """
    if isinstance(task, PaddedTask):  # latencies are for a few loads, not for every number
        task = replace(task, request=replace(task.request, objective="padding"))
    some = PLAYED if proposal.packed else range(1, MAX_SHAPES + 1)
    numbers = sorted({*some, proposal.proposed.shapes})
    steps = Steps(on_step)
    steps.expect(2 * len(numbers))
    found = {}
    for number, made in fit(task.first, task.rules, numbers, steps).items():
        found[number] = task.score(made.buckets, proposal.batches)
        steps()
    return found
