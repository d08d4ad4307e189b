"""What a client is told, and that it survives the way between processes."""

import pickle

import pytest

from shapeserve import errors
from shapeserve.errors import RequestError, RowFailed, ShapeServeError

STATUS_AND_WORDS = [
    ("InvalidRequest", 400, "invalid_request_error", "invalid_value"),
    ("NotFound", 404, "invalid_request_error", "model_not_found"),
    ("PayloadTooLarge", 413, "invalid_request_error", "body_too_large"),
    ("UnsupportedMediaType", 415, "invalid_request_error", "unsupported_media_type"),
    ("Overloaded", 429, "overloaded_error", "queue_full"),
    ("RowFailed", 500, "server_error", "row_failed"),
    ("SwapFailed", 500, "server_error", "swap_failed"),
    ("Unavailable", 503, "server_error", "unavailable"),
    ("DeadlineExceeded", 504, "timeout_error", "deadline_exceeded"),
]


@pytest.mark.parametrize(("name", "status", "kind", "code"), STATUS_AND_WORDS)
def test_each_request_error_has_its_status_and_body(
    name: str, status: int, kind: str, code: str
) -> None:
    error = getattr(errors, name)("too bad", param="input[3]")
    assert error.status == status
    assert error.body() == {
        "error": {"message": "too bad", "type": kind, "param": "input[3]", "code": code}
    }


def test_every_request_error_is_in_the_table_above_and_in_the_drawn_tree() -> None:
    names = {cls.__name__ for cls in RequestError.__subclasses__()}
    assert names == {row[0] for row in STATUS_AND_WORDS}
    assert all(f"{name} " in (errors.__doc__ or "") for name in names)


@pytest.mark.parametrize("name", [row[0] for row in STATUS_AND_WORDS])
def test_a_request_error_keeps_everything_through_pickle(name: str) -> None:
    error = getattr(errors, name)("no", param="model", code="special", retry_after_s=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.body() == error.body()
    assert copy.retry_after_s == 1.5
    assert str(copy) == "no"


def test_one_except_clause_catches_everything() -> None:
    with pytest.raises(ShapeServeError):
        raise RowFailed("row 3 is not finite", param="input[3]")
