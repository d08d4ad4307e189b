"""Everything that a report shows beside the proposal itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shapeserve.traces import Traffic
from shapeserve.tuning.cost import ANALYTIC, Cost
from shapeserve.tuning.loads import Loads, under_load
from shapeserve.tuning.propose import Proposal, by_number
from shapeserve.tuning.request import Request, Scored

_PLAYED = ("default", "pow2", "proposed")


@dataclass(frozen=True)
class Study:
    """A proposal, the traffic that it is for, and what else could be had.

    Attributes:
        source: where the traffic comes from, for people to read.
        traffic: the rows, cut to the ends of the proposal.
        request: what was asked for.
        proposal: what came of it.
        by_number: number of row shapes -> what so many would do.
        max_batch_tokens: padded elements of a simulated batch.
        loads: latencies, None if the traffic has no times or nothing is known about costs.
    """

    source: str
    traffic: Traffic
    request: Request
    proposal: Proposal
    by_number: Mapping[int, Scored]
    max_batch_tokens: int
    loads: Loads | None

    @cached_property
    def second_half(self) -> Traffic:
        """The rows that the proposal had not seen."""
        return self.traffic.halves()[1]

    @property
    def named(self) -> dict[str, Scored]:
        """Name -> policy, the proposed one last."""
        return {**self.proposal.compared, "proposed": self.proposal.proposed}


def study(
    source: str,
    traffic: Traffic,
    request: Request,
    proposal: Proposal,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Study:
    """Fit every number of row shapes, and simulate today's default, powers of two and the proposal.

    Args:
        source: where the traffic comes from, for people to read.
        traffic: the rows.
        request: what was asked for.
        proposal: what :func:`shapeserve.tuning.propose.propose` made of both.
        on_step: told how many fits of how many are done, and then how many simulations.

    Raises:
        ConfigError: the proposal has more buckets than a policy may have.
    """
    traffic = traffic.clipped(proposal.ends)
    numbers = by_number(traffic, request, on_step)
    most = max(request.max_batch_tokens, prod(proposal.ends.values()))
    loads, cost = None, _cost(request, proposal)
    if cost is not None and traffic.times_s is not None:
        named = {**proposal.compared, "proposed": proposal.proposed}
        policies = {name: named[name].buckets for name in _PLAYED}
        _, second = traffic.halves()
        loads = under_load(second, policies, request.device, cost, most, on_step)
    return Study(source, traffic, request, proposal, numbers, most, loads)


def _cost(request: Request, proposal: Proposal) -> Cost | None:
    """Return the cost that the proposal was judged by."""
    if proposal.cost_source is None:
        return None
    return request.cost or ANALYTIC[request.device]
