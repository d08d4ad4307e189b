"""One replica: the deployment class that Ray Serve runs, around a frontend and its engines.

Start-up: heartbeats to the health application begin, then the engines load and warm up in a thread;
Ray routes requests here only once the constructor is through, that is when all of them are sealed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError, Unavailable
from shapeserve.metrics import Metrics, merge_texts
from shapeserve.protocols.health import ReplicaReport, State
from shapeserve.serve.admin import Guard
from shapeserve.serve.frontend import Frontend
from shapeserve.serve.grpc import GrpcMethods
from shapeserve.serve.health import Heartbeat
from shapeserve.serve.logs import log_with_ray
from shapeserve.serve.policies import PolicyState
from shapeserve.serve.ray_metrics import RayMirror
from shapeserve.serve.status import ReplicaStatus
from shapeserve.serve.tracing import spans_if_traced

if TYPE_CHECKING:
    from shapeserve.engine import DeviceThread, Engine

log = logging.getLogger("shapeserve.serve")

# A peer that has not answered a scrape by then is left out of it: Prometheus gives up at 10 s.
SCRAPE_TIMEOUT_S = 5.0
# A swap warms the new grid: seconds on a CPU, minutes for hundreds of captures. Arbitrary.
SWAP_TIMEOUT_S = 600.0
# Ray's control plane is back within seconds, or somebody has to look at it. Arbitrary.
ASK_AGAIN_S = 5.0

# Serve checks the health of a replica as soon as it counts it as running; the proxies hear of it
# after that. HAProxy's reload was seen 0.65 s later: until then requests take a detour of 0.4 s,
# and its old process closes connections.
ROUTED_AFTER_S = 1.0

EngineFactory = Callable[[ModelConfig, Metrics, "dict[str, DeviceThread]"], "Engine"]


def new_engine(config: ModelConfig, metrics: Metrics, devices: dict[str, DeviceThread]) -> Engine:
    """Make the engine of one model; see :func:`shapeserve.engine.shared_engine`."""
    from shapeserve.engine import shared_engine  # building an application needs no torch

    return shared_engine(config, metrics, devices)


class ShapeServe(GrpcMethods):
    """HTTP, gRPC, queues and engines of one process.

    Args:
        config: the service's configuration; every model gets an engine here, and those of one
            device share its thread.
        make_engine: makes an unstarted engine; tests pass a fake.

    Thread rule: Ray's event loop, which nothing here blocks; engines start, swap and close in
    worker threads.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: ServeConfig, make_engine: EngineFactory = new_engine
    ) -> None:
        log_with_ray()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._deployment = (context.deployment, context.app_name)
        self._peers: DeploymentHandle[Any] | None = None
        self._asking: asyncio.Task[DeploymentHandle[Any]] | None = None
        self._drain_s = config.serve.drain_s
        self._spans = spans_if_traced()
        self._mirror = RayMirror()
        self._metrics = Metrics(mirror=self._mirror)
        devices: dict[str, DeviceThread] = {}
        self._engines = [make_engine(model, self._metrics, devices) for model in config.models]
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure = ""
        self._running_since_s: float | None = None
        self._heart = heart = Heartbeat(self.report, self._mirror.flush)
        self._beating = asyncio.create_task(heart.run())
        try:
            await asyncio.to_thread(self._start_engines)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            await heart.beat()  # the process ends now, and somebody waits for the reason
            self._beating.cancel()
            raise
        self._by_name = {engine.spec.name: engine for engine in self._engines}
        self._frontend = Frontend(
            self._by_name,
            aliases={engine.spec.name: engine.config.aliases for engine in self._engines},
            metrics=self._metrics,
            max_body_bytes=config.serve.max_body_bytes,
            metrics_text=self._all_metrics,
            report=self.report,
            ask_all=self._all_policies,
            guard=Guard.from_environment(),
            statuses=self._all_statuses,
            spans=self._spans,
            max_inflight_bytes=config.serve.inflight_bytes,
            max_answer_bytes=config.serve.max_answer_bytes,
        )
        self._grpc = self._frontend.grpc
        await heart.beat()

    def _start_engines(self) -> None:
        taken: set[str] = set()
        for engine in self._engines:
            engine.start()
            # The config knows neither the name that a model has of its own, nor its clashes.
            names = {engine.spec.name, *engine.config.aliases}
            if twice := taken & names:
                raise ConfigError(
                    f"models: two of them are called {min(twice)!r}; give one another `name`"
                )
            taken |= names
        # What lives now, a million objects of torch and the models, lives as long as the process. A
        # full collection walks them all, in the midst of traffic; gaps of 0.3 s between launches
        # were seen.
        gc.collect()
        gc.freeze()

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        return await self._frontend(request)

    # --- health -------------------------------------------------------------------------------

    def report(self) -> ReplicaReport:
        """Return this replica's health, as heartbeats and ``/v2/health/ready`` say it."""
        steps = [engine.progress for engine in self._engines]
        now = next((e.progress for e in self._engines if not e.ready), steps[-1])
        state, message = self._state()
        return ReplicaReport(
            self._name,
            state,
            done=sum(step.done for step in steps),
            total=sum(step.total for step in steps),
            stage=now.stage,
            detail=now.detail,
            message=message,
            in_flight=self._frontend.in_flight if hasattr(self, "_frontend") else 0,
        )

    def _state(self) -> tuple[State, str]:
        if self._failure:
            return "failed", self._failure
        try:
            for engine in self._engines:
                engine.healthy()
        except Unavailable as error:
            return "unhealthy", str(error)
        if hasattr(self, "_frontend") and self._frontend.draining:
            return "draining", ""
        if not all(engine.ready for engine in self._engines):
            return "warming", ""
        since_s = self._running_since_s
        if since_s is None or time.monotonic() - since_s < ROUTED_AFTER_S:
            return "warming", "sealed; waiting for the proxies to route here"
        return "ready", ""

    async def check_health(self) -> None:
        """Raise if a device thread is dead or stuck; after three times Serve replaces us."""
        if self._running_since_s is None:
            self._running_since_s = time.monotonic()
            # A handle hears of the replicas some time after it is made: one that is made for the
            # first question asks only those that it has heard of, and misses the others.
            self._asking = asyncio.create_task(self._all_replicas())
        for engine in self._engines:
            engine.healthy()

    # --- metrics ------------------------------------------------------------------------------

    async def metrics_text(self) -> tuple[str, str]:
        """Return this replica's name and exposition; replicas ask each other."""
        return self._name, await asyncio.to_thread(self._metrics.text)

    async def _all_metrics(self) -> str:
        """Return the exposition of all replicas, or of this one if the others cannot be asked."""
        parts: dict[str, str | None] = {}
        for i, answer in enumerate(await self._ask_all("metrics_text")):
            name, text = answer if isinstance(answer, tuple) else (f"unreachable-{i}", None)
            parts[name] = text
        if self._name not in parts:
            parts[self._name] = (await self.metrics_text())[1]
        return await asyncio.to_thread(merge_texts, parts)

    async def status(self) -> ReplicaStatus:
        """Return what this replica says of its models; replicas ask each other."""
        return await asyncio.to_thread(self._frontend.status)

    async def _all_statuses(self) -> tuple[list[ReplicaStatus], int]:
        """Return what the replicas say of their models, and how many did not answer."""
        answers = await self._ask_all("status")
        found = [answer for answer in answers if isinstance(answer, ReplicaStatus)]
        missing = len(answers) - len(found)
        if self._name not in {status.report.replica for status in found}:
            found.append(await self.status())
        return found, missing

    async def _ask_all(self, method: str) -> list[Any]:
        """Return what a method of every replica returns, or raises; nothing if none can be asked.

        Whatever Ray's control plane is going through: whoever asks has at least our own part.
        """
        try:
            peers = await self._all_replicas()
            answers: list[Any] = await peers.broadcast(method).results_async(
                timeout_s=SCRAPE_TIMEOUT_S, return_exceptions=True
            )
        except Exception:
            log.warning("cannot ask the other replicas for their %s", method, exc_info=True)
            return []
        return answers

    # --- policy -------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Any) -> None:
        """Apply ``{policies: {MODEL: policy}}``, or stop taking work: ``{draining: true}``.

        Returns before the policies serve, except to a replica that is still starting: until this
        returns, Serve leads no request here. Never raises: Serve would kill this warm replica for
        it. A bad policy is logged and counted, and the old one keeps serving.
        """
        if isinstance(user_config, dict) and user_config.get("draining") is True:
            self._frontend.drain(self._beat_now)
            self._beat_now()
            return
        self._frontend.resume()
        try:
            policies = dict((user_config or {}).get("policies") or {})
        except (AttributeError, TypeError, ValueError):
            log.error("user_config is not {policies: {MODEL: policy}}; it is ignored")
            return
        swap = self._frontend.policies.reconfigure(policies)
        if self._running_since_s is None:
            await swap
        else:
            self._in_background(swap)

    async def policy_here(self, model: str, policy: Mapping[str, Any] | None) -> PolicyState:
        """Swap a policy on this replica, or say which serves; replicas ask each other."""
        return await self._frontend.policies.here(model, policy)

    async def _all_policies(
        self, model: str, policy: Mapping[str, Any] | None
    ) -> Sequence[PolicyState]:
        """Swap a policy on every replica, or ask which serves.

        Raises:
            Unavailable: the replicas cannot be asked; nothing was changed.
        """
        try:
            peers = await self._all_replicas()
            asked = peers.broadcast("policy_here", model, policy)
        except Exception as error:
            log.warning("cannot ask the replicas for their policy", exc_info=True)
            raise Unavailable(
                "the replicas cannot be asked, and nothing was changed; try again",
                retry_after_s=ASK_AGAIN_S,
            ) from error
        answers = await asked.results_async(timeout_s=SWAP_TIMEOUT_S, return_exceptions=True)
        return [
            answer
            if isinstance(answer, PolicyState)
            else PolicyState(f"unreachable-{i}", "silent", message=repr(answer))
            for i, answer in enumerate(answers)
        ]

    async def _all_replicas(self) -> DeploymentHandle[Any]:
        if self._peers is None:
            self._peers = await asyncio.to_thread(serve.get_deployment_handle, *self._deployment)
        return self._peers

    def _beat_now(self) -> None:
        """Report at once; whoever stops the service waits for it."""
        self._in_background(self._heart.beat())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # or it may be collected while it runs
        task.add_done_callback(self._tasks.discard)

    # --- end ----------------------------------------------------------------------------------

    async def __del__(self) -> None:
        """Finish what is queued; Serve awaits this when requests in flight are answered."""
        self._beating.cancel()
        if hasattr(self, "_frontend"):
            self._frontend.close()
        deadline_s = time.monotonic() + self._drain_s  # of all: they finish side by side
        for engine in self._engines:
            await asyncio.to_thread(engine.close, max(deadline_s - time.monotonic(), 0.0))
        self._mirror.flush()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.flush)
