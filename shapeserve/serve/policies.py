"""The policies of one replica's models: what serves, and how another one gets there.

Two ways lead here. ``user_config`` is Serve's: every replica gets it, those that are started later
too. The administrator's route changes the replicas that live now, until the next ``user_config``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shapeserve.config import parse_policy, policy_to_dict
from shapeserve.errors import ConfigError, ShapeServeError
from shapeserve.metrics import Metrics, SwapResult

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine

log = logging.getLogger("shapeserve.serve")

PolicyResult = Literal["serves", "applied", "unchanged", "rejected", "failed", "silent"]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a replica serves, and what it did with what it was given.

    Attributes:
        replica: its name.
        result: ``serves`` if it was only asked, ``silent`` if it did not answer.
        grid: version of the grid that serves now; "" if that is not known.
        policy: the policy that serves now, as in a configuration.
        message: why a policy was rejected or failed.
    """

    replica: str
    result: PolicyResult
    grid: str = ""
    policy: Mapping[str, Any] | None = None
    message: str = ""


AskAll = Callable[[str, "Mapping[str, Any] | None"], Awaitable[Sequence[PolicyState]]]
"""Model, and a new policy or None -> what every replica says; see :meth:`Policies.here`."""


class Policies:
    """Validates, swaps and tells.

    Args:
        engines: model name -> started engine.
        metrics: where refusals are counted; the engines' own.
        replica: this replica's name.

    Thread rule: one event loop; swaps block worker threads.
    """

    def __init__(self, engines: Mapping[str, Engine], metrics: Metrics, replica: str) -> None:
        self._engines = engines
        self._metrics = metrics
        self._replica = replica
        self._deployments = 0
        self._one_deployment = asyncio.Lock()

    async def reconfigure(self, policies: Mapping[str, Any]) -> None:
        """Serve with these policies, and a model without one with its configured one.

        The last call wins, also while an earlier one still warms its grids up: those that wait for
        it and are not the last are left out. Never raises: a bad policy is logged and counted, and
        the old one keeps serving.
        """
        self._deployments += 1
        mine = self._deployments
        async with self._one_deployment:
            if mine == self._deployments:
                await self._serve_with(policies)

    async def _serve_with(self, policies: Mapping[str, Any]) -> None:
        for name in policies.keys() - self._engines.keys():
            served = ", ".join(self._engines)
            log.error("user_config has a policy for %r; served are: %s; ignored", name, served)
        for name, engine in self._engines.items():
            given = policies.get(name)
            try:
                policy = engine.config.policy if given is None else self.check(name, given)
                if not await self._swap(name, policy) and given is not None:
                    # So that whoever deployed it sees that it has arrived.
                    self._metrics.policy_swaps_total.child(name, SwapResult.UNCHANGED).inc()
            except ShapeServeError as error:
                log.error("the policy for model %r was not applied: %s", name, error)
            except Exception:
                log.exception("the policy for model %r was not applied", name)

    def check(self, name: str, policy: Any) -> Any:
        """Return the parsed policy; one that is none is counted.

        Raises:
            ConfigError: naming key, value, bound and remedy.
        """
        try:
            return parse_policy(policy)
        except ConfigError:
            self._metrics.policy_swaps_total.child(name, SwapResult.REJECTED).inc()
            raise

    async def here(self, name: str, policy: Mapping[str, Any] | None) -> PolicyState:
        """Swap the policy of a model on this replica, if one is given; say what serves then."""
        result: PolicyResult = "serves"
        message = ""
        if policy is not None:
            try:
                result = "applied" if await self._swap(name, parse_policy(policy)) else "unchanged"
            except ConfigError as error:  # counted by the engine
                result, message = "rejected", str(error)
            except Exception as error:
                log.exception("the policy for model %r was not applied", name)
                result, message = "failed", f"{type(error).__name__}: {error}"
        return replace(self._state(name), result=result, message=message)

    async def only_here(self, name: str, policy: Mapping[str, Any] | None) -> Sequence[PolicyState]:
        """As :data:`AskAll`, where this replica is all there is."""
        return [await self.here(name, policy)]

    async def _swap(self, name: str, policy: Any) -> bool:
        """Return whether the policy is another one than that which served."""
        engine = self._engines[name]
        if engine.policy == policy:
            return False  # Serve calls again whenever anything else of the deployment changes
        grid = await asyncio.to_thread(engine.swap_policy, policy)
        log.info("model %r serves grid %s", name, grid.version)
        return True

    def _state(self, name: str) -> PolicyState:
        engine = self._engines[name]
        policy = policy_to_dict(engine.policy)
        return PolicyState(self._replica, "serves", engine.grid.version, policy)
