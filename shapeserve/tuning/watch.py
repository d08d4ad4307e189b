"""When to tune again: a state machine over distributions of lengths, with a clock of its own.

It acts only if the traffic has moved (``drift``) for several looks in a row, the last change is
long enough ago, and the new sizes save enough: three dampers against going back and forth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shapeserve.errors import ShapeServeError
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Buckets, waste
from shapeserve.tuning.propose import Proposal

Word = Literal[
    "steady",
    "drifting",
    "cooling",
    "small_saving",
    "proposed",
    "applied",
    "failed",
    "no_data",
]
WORDS: tuple[Word, ...] = (
    *("steady", "drifting", "cooling", "small_saving"),
    *("proposed", "applied", "failed", "no_data"),
)


@dataclass(frozen=True, slots=True)
class WatchRules:
    """What it takes to tune again.

    Attributes:
        drift: distance from the traffic of the last tuning, see :func:`drift_between`.
        looks: how many looks in a row it must be at least that far.
        min_saving: padding / all elements that the new sizes must save against those that serve.
        min_apply_s: time between two rollouts, also one that failed.
        min_rows: fewer say nothing about a distribution.
    """

    drift: float = 0.15
    looks: int = 2
    min_saving: float = 0.02
    min_apply_s: float = 3600.0
    min_rows: int = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """What one look led to.

    Attributes:
        decision: ``steady``: the traffic is as it was; ``drifting``: it is not, but has to be seen
            so again; ``cooling``: it is not, but the last rollout is too recent; ``small_saving``:
            tuned again, not worth a rollout; ``proposed``: worth it, and nobody allowed it;
            ``applied``; ``failed``: the rollout; ``no_data``: too few rows, or none to be had.
        rows: that were looked at.
        drift: distance from the traffic of the last tuning; None without data.
        serving_waste: padding of the sizes that serve, for the traffic that the new ones have not
            seen; None where nothing was tuned.
        proposed_waste: padding of the new ones.
        policy: the new policy.
        message: what went wrong, or what was done.
    """

    decision: Word
    rows: int = 0
    drift: float | None = None
    serving_waste: float | None = None
    proposed_waste: float | None = None
    policy: Mapping[str, Any] | None = None
    message: str = ""


def drift_between(before: Traffic, after: Traffic) -> float:
    """Return how far lengths have moved: the mean distance in octaves, in the cheapest way.

    That is the Wasserstein distance of the logarithms (base 2) of the sizes along the one axis: 1
    if every row is twice as long, 0.15 if all are 11 % longer, or if one of ten is three times as
    long. In octaves, because what a bucket costs is its ratio to a row, not its difference.
    """
    edges = np.union1d(before.sizes[:, 0], after.sizes[:, 0])
    shares = [_up_to(traffic, edges) for traffic in (before, after)]
    return float((np.abs(shares[0] - shares[1])[:-1] * np.diff(np.log2(edges))).sum())


def _up_to(traffic: Traffic, edges: np.ndarray) -> np.ndarray:
    """Return the share of rows up to each of ``edges``, which has all of their sizes."""
    places = np.searchsorted(edges, traffic.sizes[:, 0])
    counts = np.bincount(places, traffic.counts, len(edges))
    return np.asarray(np.cumsum(counts) / counts.sum())


class Watcher:
    """Looks at the traffic now and then.

    Args:
        rules: what it takes to act.
        read: returns the traffic of late.
        propose: tunes to traffic.
        apply: rolls a policy out and says what was done; None: nobody allows it.
        now: monotonic clock, in seconds.

    The first look with enough rows tunes; its sizes are then taken for those that serve, also where
    nobody allows to roll them out.
    """

    def __init__(
        self,
        rules: WatchRules,
        read: Callable[[], Traffic],
        propose: Callable[[Traffic], Proposal],
        apply: Callable[[dict[str, Any]], str] | None,
        now: Callable[[], float],
    ) -> None:
        self._rules = rules
        self._read = read
        self._propose = propose
        self._apply = apply
        self._now = now
        self._tuned_to: Traffic | None = None
        self._serving: Buckets = {}
        self._drifted = 0
        self._rolled_out_s: float | None = None

    def look(self) -> Decision:
        """Look at the traffic, and tune again if it takes that."""
        try:
            traffic = self._read()
        except ShapeServeError as error:
            return self._nothing(str(error))
        if traffic.rows < self._rules.min_rows:
            return self._nothing(
                f"{traffic.rows} rows; at least {self._rules.min_rows} are needed", traffic.rows
            )
        if self._tuned_to is None:
            return self._tune(Decision("steady", traffic.rows), traffic, None)
        drift = drift_between(self._tuned_to, traffic)
        self._drifted = self._drifted + 1 if drift >= self._rules.drift else 0
        seen = Decision("steady", traffic.rows, drift)
        if not self._drifted:
            return seen
        if self._drifted < self._rules.looks:
            return replace(seen, decision="drifting")
        return self._tune(seen, traffic, self._serving)

    def _nothing(self, message: str, rows: int = 0) -> Decision:
        self._drifted = 0  # what was seen before the gap is not in a row with what comes after it
        return Decision("no_data", rows, message=message)

    def _is_recent(self) -> bool:
        last_s = self._rolled_out_s
        return last_s is not None and self._now() - last_s < self._rules.min_apply_s

    def _tune(self, seen: Decision, traffic: Traffic, serving: Buckets | None) -> Decision:
        if self._is_recent():
            return replace(seen, decision="cooling")
        try:
            proposal = self._propose(traffic)
        except ShapeServeError as error:
            return replace(seen, decision="failed", message=str(error))
        proposed = proposal.proposed.second_half
        seen = replace(seen, proposed_waste=proposed, policy=proposal.policy())
        if serving is not None:
            _, unseen = traffic.clipped(proposal.ends).halves()
            seen = replace(seen, serving_waste=waste(unseen, serving))
            if (seen.serving_waste or 0.0) - proposed < self._rules.min_saving:
                self._settle(traffic)
                return replace(seen, decision="small_saving")
        done = self._roll_out(seen, proposal)
        if done.decision != "failed":
            self._settle(traffic)
            if self._apply is not None or serving is None:
                self._serving = proposal.proposed.buckets
        return done

    def _settle(self, traffic: Traffic) -> None:
        """Compare with this traffic from now on."""
        self._tuned_to, self._drifted = traffic, 0

    def _roll_out(self, seen: Decision, proposal: Proposal) -> Decision:
        if self._apply is None:
            message = "not applied: that takes --apply or --apply-admin, and --yes"
            return replace(seen, decision="proposed", message=message)
        self._rolled_out_s = self._now()
        try:
            message = self._apply(proposal.policy())
        except ShapeServeError as error:
            return replace(seen, decision="failed", message=str(error))
        return replace(seen, decision="applied", message=message)
