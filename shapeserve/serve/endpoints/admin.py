"""The routes of the administrator. Without the token the router does not know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from starlette.requests import Request

from shapeserve.errors import ConfigError, InvalidRequest, SwapFailed
from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.health import ReplicaReport
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.policies import AskAll, Policies, PolicyState
from shapeserve.serve.service import Route, Service

LASTS = (
    "until these replicas end or the application is deployed again; user_config.policies of the "
    "deployment is the lasting place"
)


class Admin:
    """What tells too much of the inside to be told to everybody, or changes it.

    Args:
        service: the engines.
        report: returns this replica's own health report, for its name.
        policies: checks new ones.
        ask_all: passes one to every replica.
    """

    def __init__(
        self,
        service: Service,
        report: Callable[[], ReplicaReport],
        policies: Policies,
        ask_all: AskAll,
    ) -> None:
        self._service = service
        self._report = report
        self._policies = policies
        self._ask_all = ask_all
        self.routes = [
            Route("GET", http.COMPILE, Endpoint.OTHER, self.compile_record),
            Route("GET", http.POLICY, Endpoint.OTHER, self.policy),
            Route("PUT", http.POLICY, Endpoint.OTHER, self.put_policy),
        ]

    async def compile_record(self, _: Request, call: Call) -> Reply:
        """Answer with what this replica has compiled for a model."""
        name = self._model(call)
        record = asdict(self._service.engines[name].compile_record())
        return http.json_reply({**record, "replica": self._report().replica})

    async def policy(self, _: Request, call: Call) -> Reply:
        """Answer with the policy and the grid that each replica serves a model with."""
        name = self._model(call)
        return self._reply(name, await self._ask_all(name, None))

    async def put_policy(self, request: Request, call: Call) -> Reply:
        """Give every replica a new policy; answer when all of them serve it.

        Raises:
            InvalidRequest: it is no policy, or does not fit the model; the old one serves.
            SwapFailed: not all replicas serve it.
        """
        name = self._model(call)
        policy = openai.read_object(await self._service.json_body(request, call))
        try:
            self._policies.check(name, policy)
        except ConfigError as error:
            raise _rejected(str(error)) from None
        states = await self._ask_all(name, policy)
        bad = [state for state in states if state.result not in ("applied", "unchanged")]
        if bad and len(bad) == len(states) and all(s.result == "rejected" for s in bad):
            raise _rejected(bad[0].message)
        if bad:
            named = "; ".join(f"{s.replica} {s.result}: {s.message}" for s in bad)
            raise SwapFailed(
                f"{len(states) - len(bad)} of {len(states)} replicas serve the new policy; "
                f"{named}; GET the policy to see what each serves, and send it again.",
                param="policy",
            )
        return self._reply(name, states)

    def _model(self, call: Call) -> str:
        return openai.find_model(call.variables["model"], self._service.models).name

    def _reply(self, name: str, states: Sequence[PolicyState]) -> Reply:
        """Render the answer, this replica first."""
        own = self._report().replica
        ordered = sorted(states, key=lambda state: (state.replica != own, state.replica))
        return http.json_reply(
            {
                "model": name,
                "replica": own,
                "grid": self._service.engines[name].grid.version,
                "replicas": [asdict(state) for state in ordered],
                "lasts": LASTS,
            }
        )


def _rejected(message: str) -> InvalidRequest:
    return InvalidRequest(
        f"the policy was not applied, the old one serves: {message}", param="policy"
    )
