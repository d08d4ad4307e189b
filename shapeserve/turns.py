"""Whose batch is next, where several models share a device.

A pure state machine like the batcher: it has no clock, no thread and no tensor, but is told what a
batch costs (padded elements) when it leaves its queue and how long it took when it is done.

Fair queueing: everybody has an account of the device seconds that its batches took. Of those who
have a batch waiting, the one with the lowest account is next; among equals, the one whose last turn
is longer ago. A batch is charged when it leaves the queue, by its cost at the rate of its owner's
last batches, and corrected to what it took. Who had nothing to run starts again at the lowest
account of those who had, so that a pause earns nothing; when nobody had, all start level. Hence:

- Queues that never run empty get the same device time, give or take one batch of each.
- Who comes with one batch into the flood of another waits for what the device works on already. If
  it comes back so soon that its last batch is not made up for, it also waits for the other's
  batches until it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Each batch weighs 0.9 of the next one, so that a rate covers about the last ten. Arbitrary.
_RATE_DECAY = 0.9


@dataclass(slots=True)
class _Account:
    """What one member was charged, what its last batches cost and took, and its last turn."""

    charged_s: float = 0.0
    cost: float = 0.0
    seconds: float = 0.0
    in_flight: int = 0
    last_turn: int = 0


class Turns(Generic[K]):
    """Shares one device among its members by the time that their batches take.

    Thread rule: none of its own; the caller holds a lock around every call.
    """

    def __init__(self) -> None:
        self._accounts: dict[K, _Account] = {}
        self._waiting: Sequence[K] = ()  # who had a batch when last asked
        self._turn = 0

    def join(self, who: K) -> None:
        """Add a member; its first batch puts it on the level of the others."""
        self._accounts[who] = _Account()

    def leave(self, who: K) -> None:
        """Forget a member; what it has in flight may still be reported."""
        self._accounts.pop(who, None)
        self._waiting = [other for other in self._waiting if other != who]

    def next(self, ready: Sequence[K]) -> K | None:
        """Return whose batch is next of those who have one waiting; None if nobody has.

        To be called whenever the device looks for work, so that it is known who had none. Nothing
        is charged; asked again with the same members, it gives the same answer.
        """
        accounts = self._accounts
        if len(accounts) == 1:  # the rule; ten microseconds a batch
            self._waiting = ready
            return next(iter(ready), None)
        busy = {who for who, account in accounts.items() if account.in_flight}.union(self._waiting)
        if busy:
            level_s = min(accounts[who].charged_s for who in busy)
        else:
            level_s = max(account.charged_s for account in accounts.values()) if accounts else 0.0
        for who in ready:
            if who not in busy:
                accounts[who].charged_s = max(accounts[who].charged_s, level_s)
        self._waiting = ready
        return min(
            ready,
            key=lambda who: (accounts[who].charged_s, accounts[who].last_turn),
            default=None,
        )

    def take(self, who: K, cost: float) -> float:
        """Charge a batch that leaves the queue; return the seconds charged, for :meth:`done`.

        Args:
            who: its owner.
            cost: padded elements that it executes.
        """
        account = self._accounts[who]
        charge_s = cost * account.seconds / account.cost if account.cost else 0.0
        account.charged_s += charge_s
        account.in_flight += 1
        account.last_turn = self._turn = self._turn + 1
        return charge_s

    def done(self, who: K, cost: float, charge_s: float, seconds: float) -> None:
        """Correct the charge of a batch to the ``seconds`` that it kept the device."""
        account = self._accounts.get(who)
        if account is None:
            return
        account.in_flight -= 1
        account.charged_s += seconds - charge_s
        account.cost = account.cost * _RATE_DECAY + cost
        account.seconds = account.seconds * _RATE_DECAY + seconds
