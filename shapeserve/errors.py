"""Every exception that shapeserve raises on purpose.

::

    ShapeServeError
    ├── ConfigError              loading or validating a config; the CLI exits with 2
    ├── ModelError               loading, self-test or strict warm-up of a model; start-up fails
    ├── RolloutFailed            a policy that was sent to a service does not serve there
    └── RequestError             anything a client is told: a status and an error body
        ├── InvalidRequest       400  the request itself is wrong (protocols, tokeniser, dispatch)
        ├── NotFound             404  no model of that name
        ├── PayloadTooLarge      413  the body is over ``max_body_bytes``
        ├── UnsupportedMediaType 415  the body is not JSON
        ├── Overloaded           429  the batcher's queue is full; the client may retry
        ├── RowFailed            500  one row failed on the device, also when retried alone
        ├── SwapFailed           500  a replica did not take a new policy
        ├── Unavailable          503  not ready, draining, or the device thread is dead
        └── DeadlineExceeded     504  the row's deadline passed before it ran
"""

# ruff: noqa: N818 - the names say what happened to the request, as HTTP statuses do.

from __future__ import annotations


class ShapeServeError(Exception):
    """Base of all errors of this package."""


class ConfigError(ShapeServeError):
    """The configuration is wrong; the message names value, bound and remedy."""


class ModelError(ShapeServeError):
    """A model cannot be loaded, or did not pass its self-test or a strict warm-up."""


class RolloutFailed(ShapeServeError):
    """A new policy was sent to a service that runs, and is not what serves there."""


class RequestError(ShapeServeError):
    """A request is refused or failed, and the client is told why.

    Attributes:
        status: HTTP status.
        type: the family of the error, as OpenAI clients know it.
        code: the stable word for this error; scripts compare it.
        param: the field at fault, such as ``input[3]``, or None.
        retry_after_s: seconds after which a retry makes sense, or None.
    """

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep what the client is told.

        Everything but ``message`` is a keyword with a default, so that pickle can rebuild
        the error in another process from ``args`` and ``__dict__``.
        """
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of the answer."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class InvalidRequest(RequestError):
    """The request can never succeed as it is; change it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class NotFound(RequestError):
    """No model of the requested name is served."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class PayloadTooLarge(RequestError):
    """The body is longer than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(RequestError):
    """The body has a content type that the route does not read."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Overloaded(RequestError):
    """The queue is full; nothing of the request was queued."""

    status = 429
    type = "overloaded_error"
    code = "queue_full"


class RowFailed(RequestError):
    """One row failed on the device, also when it was retried alone."""

    status = 500
    type = "server_error"
    code = "row_failed"


class SwapFailed(RequestError):
    """Not every replica serves the policy that it was given."""

    status = 500
    type = "server_error"
    code = "swap_failed"


class Unavailable(RequestError):
    """This replica cannot answer: warming up, draining, or its device thread is dead."""

    status = 503
    type = "server_error"
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """The deadline passed before the row ran."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
