"""The REST API of Ray's dashboard, through Ray's own client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import AuthenticationError

from shapeserve.errors import ConfigError, RolloutFailed

T = TypeVar("T")


class Dashboard:
    """A cluster, as ``serve deploy`` sees it: with Ray's token if ``RAY_AUTH_MODE=token``.

    Args:
        address: such as ``http://127.0.0.1:8265``.

    Raises:
        ConfigError: nothing answers there as Ray does, or the token is missing.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = self._told(lambda: ServeSubmissionClient(address))

    def details(self) -> dict[str, Any]:
        """Return what runs, and the configurations that were deployed."""
        found: dict[str, Any] = self._told(self._client.get_serve_details)
        return found

    def deploy(self, schema: Mapping[str, Any]) -> None:
        """Deploy all applications of a configuration, and end those that it leaves out.

        Raises:
            RolloutFailed: Serve refuses it.
        """

        def put() -> None:
            try:
                self._client.deploy_applications(dict(schema))
            except RuntimeError as error:
                raise RolloutFailed(f"Ray Serve refused the configuration: {error}") from error

        self._told(put)

    def _told(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except AuthenticationError as error:
            raise ConfigError(
                f"--apply {self._address}: Ray wants a token: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that of the cluster"
            ) from error
        except (OSError, ValueError, RuntimeError) as error:  # those of `requests` are OSErrors
            raise ConfigError(
                f"--apply {self._address}: cannot be reached as a Ray dashboard: {error}; give its "
                "address, such as http://127.0.0.1:8265 (`shapeserve serve` has none: use "
                "--apply-admin)"
            ) from error
