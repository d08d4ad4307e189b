"""Open Inference Protocol over gRPC on Ray Serve with its Python proxy, by Triton's own client."""

import asyncio
import ipaddress
import re
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_calls import fake_vectors, ids_input, status, texts_input, trailing, vectors
from service_process import ServiceProcess, eventually, free_port
from tiny import text_of, write_model
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shapeserve.config import ModelConfig
from shapeserve.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

MAX_BODY = 100_000
GRPC_PORT = free_port()
ADDRESS = f"127.0.0.1:{GRPC_PORT}"


def tiny_model(directory: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "aliases": ["ada", "all-MiniLM-L6-v2"],
        "path": str(directory),
        "compile": {"tier": "eager"},
        "policy": {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 4]}},
        "limits": {"max_rows": 8},
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServiceProcess]:
    config = {
        "models": [{"name": "fake", "path": "fake:slow"}, tiny_model(model_dir)],
        "serve": {
            "port": free_port(),
            "grpc_port": GRPC_PORT,
            "proxy": "default",
            "max_body_bytes": MAX_BODY,
            "drain_s": 5,
        },
    }
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("started")
        watch_warming()
        made.until("ready")
        yield made
    finally:
        made.stop()


seen_while_warming: list[tuple[bool, bool]] = []
refused_while_warming: set[str] = set()


def watch_warming() -> None:
    with triton.InferenceServerClient(ADDRESS) as client:
        while not seen_while_warming or not seen_while_warming[-1][1]:
            seen_while_warming.append((client.is_server_live(), client.is_server_ready()))
            if not seen_while_warming[-1][1]:
                try:
                    client.infer("fake", [texts_input(["a"])], client_timeout=0.2)
                except triton.InferenceServerException as error:
                    refused_while_warming.add(status(error))
                time.sleep(0.1)


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(ADDRESS) as made:
        yield made


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[Engine]:
    with Engine(ModelConfig(**tiny_model(model_dir))).start() as engine:
        yield engine


def expected(engine: Engine, samples: list[Any]) -> np.ndarray:
    return np.stack([r.outputs["sentence_embedding"] for r in engine.run(samples)])  # type: ignore[union-attr]


def requests(service: ServiceProcess, **labels: str) -> float:
    return service.total("requests_total", endpoint="oip_grpc", **labels)


# --- health and metadata --------------------------------------------------------------------------


def test_while_warming_it_is_live_not_ready_and_refuses_for_now(service: ServiceProcess) -> None:
    assert {live for live, _ in seen_while_warming} == {True}
    assert seen_while_warming[0][1] is False
    # Until Ray knows of a replica it can refuse; then it holds calls back until the replica is up.
    assert refused_while_warming <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert refused_while_warming


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules, at their import
def test_health_refuses_for_now_what_only_a_replica_answers() -> None:
    from shapeserve.serve.health import Health

    for method in ("ModelInfer", "ModelReady", "ModelMetadata", "ServerMetadata"):
        told: dict[str, Any] = {}
        context = SimpleNamespace(
            set_code=partial(told.__setitem__, "code"),
            set_details=partial(told.__setitem__, "details"),
        )
        asyncio.run(getattr(Health(), method)(b"", grpc_context=context))
        assert told["code"] is grpc.StatusCode.UNAVAILABLE
        assert "ServerReady" in told["details"]


def test_triton_client_reads_server_and_model_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ada")
    assert client.get_server_metadata().name == "shapeserve"
    model = client.get_model_metadata("ada", "1")
    assert (model.name, list(model.versions)) == ("tiny", ["1"])
    inputs = {t.name: (t.datatype, list(t.shape)) for t in model.inputs}
    assert inputs["input_ids"] == ("INT64", [-1, -1])
    assert inputs["text"] == ("BYTES", [-1])
    (output,) = model.outputs
    assert (output.name, output.datatype, list(output.shape)) == (
        "sentence_embedding",
        "FP32",
        [-1, 32],
    )


# --- answers --------------------------------------------------------------------------------------


def test_triton_client_gets_the_engines_vectors_for_token_ids(
    client: Any, reference: Engine
) -> None:
    rows = [[2, 7, 9, 3], [2, 8, 3], [2, *([7] * 20), 3]]
    output = triton.InferRequestedOutput("sentence_embedding")
    result = client.infer("ada", ids_input(rows), "1", [output], request_id="7")
    np.testing.assert_allclose(vectors(result), expected(reference, rows), atol=1e-5)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "7")


def test_triton_client_gets_them_for_texts(client: Any, reference: Engine) -> None:
    texts = [text_of(n, seed=n) for n in (3, 8, 24, 40)]
    result = client.infer("tiny", [texts_input(texts)])
    np.testing.assert_allclose(vectors(result), expected(reference, list(texts)), atol=1e-5)


def test_the_example_of_the_page_prints_what_it_says(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "grpc.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(code.replace("localhost:8001", ADDRESS), "grpc.md", "exec"), {})
    said = re.findall(r"print\(.*\)  # (.*)", code)
    # Here a tiny model has the name.
    assert capsys.readouterr().out.splitlines() == [line.replace("384", "32") for line in said]


@pytest.fixture(scope="module")
def stub(service: ServiceProcess) -> Iterator[Any]:
    with grpc.insecure_channel(ADDRESS) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def typed_request(model: str, rows: list[list[int]]) -> Any:
    contents = service_pb2.InferTensorContents(int64_contents=np.ravel(rows).tolist())
    ids = service_pb2.ModelInferRequest.InferInputTensor(
        name="input_ids", datatype="INT64", shape=[len(rows), len(rows[0])], contents=contents
    )
    return service_pb2.ModelInferRequest(model_name=model, inputs=[ids])


def test_typed_contents_get_the_same(stub: Any, reference: Engine) -> None:
    rows = [[2, 7, 9, 3], [2, 8, 8, 3]]
    response, call = stub.ModelInfer.with_call(
        typed_request("tiny", rows), metadata=[("x-request-id", "my-id")]
    )
    got = vectors(triton.InferResult(response))
    np.testing.assert_allclose(got, expected(reference, rows), atol=1e-5)
    told = dict(call.trailing_metadata())
    assert told["x-request-id"] == told["request_id"] == "my-id"
    assert told["x-shapeserve-modes"] == "eager=2"


def test_i6_concurrent_requests_get_their_own_rows(service: ServiceProcess) -> None:
    """40 at a time, each with rows of its own number of words."""

    async def ask(client: Any, n: int) -> None:
        texts = [" ".join(["w"] * (n + i)) for i in range(1, n % 4 + 2)]
        result = await client.infer("fake", [texts_input(texts)], request_id=str(n))
        assert result.get_response().id == str(n)
        np.testing.assert_allclose(vectors(result), fake_vectors(texts), rtol=1e-6)

    async def ask_all() -> None:
        async with triton_aio.InferenceServerClient(ADDRESS) as client:
            await asyncio.gather(*(ask(client, n) for n in range(40)))

    before = requests(service, model="fake", outcome="ok")
    asyncio.run(ask_all())
    assert requests(service, model="fake", outcome="ok") == before + 40


# --- refusals -------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "model": ({"model_name": "gpt"}, "NOT_FOUND", "model_not_found"),
    "version": ({"model_version": "2"}, "NOT_FOUND", "version_not_found"),
    "blank": ({"inputs": [texts_input(["a", " "])]}, "INVALID_ARGUMENT", "empty_input"),
    "long": ({"inputs": [texts_input([text_of(49)])]}, "INVALID_ARGUMENT", "too_long"),
    "vocabulary": ({"inputs": ids_input([[2, 10**6]])}, "INVALID_ARGUMENT", "invalid_value"),
    "input": ({"inputs": ids_input([[2, 3]])[1:]}, "INVALID_ARGUMENT", "invalid_value"),
    "rows": ({"inputs": [texts_input(["a"] * 9)]}, "INVALID_ARGUMENT", "too_many_rows"),
    "output": (
        {"outputs": [triton.InferRequestedOutput("logits")]},
        "INVALID_ARGUMENT",
        "invalid_value",
    ),
    "classification": (
        {"outputs": [triton.InferRequestedOutput("sentence_embedding", class_count=3)]},
        "INVALID_ARGUMENT",
        "unsupported_parameter",
    ),
    "sequence": ({"sequence_id": 7}, "INVALID_ARGUMENT", "unsupported_parameter"),
    "large": (
        {"inputs": [texts_input(["a" * MAX_BODY])]},
        "RESOURCE_EXHAUSTED",
        "body_too_large",
    ),
    "full": (
        {"model_name": "fake", "inputs": [texts_input(["full"])]},
        "RESOURCE_EXHAUSTED",
        "queue_full",
    ),
    "row-failed": (
        {"model_name": "fake", "inputs": [texts_input(["a", "nan"])]},
        "INTERNAL",
        "row_failed",
    ),
    "crash": (
        {"model_name": "fake", "inputs": [texts_input(["crash"])]},
        "INTERNAL",
        "internal_error",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_has_its_status_is_counted_once_and_harms_nobody(
    service: ServiceProcess, client: Any, name: str
) -> None:
    fields, code, word = BAD[name]
    before = requests(service)
    with pytest.raises(triton.InferenceServerException) as refused:
        client.infer(**{"model_name": "tiny", "inputs": [texts_input(["cat"])], **fields})
    assert (status(refused.value), trailing(refused.value)["x-shapeserve-code"]) == (code, word)
    assert "secret" not in refused.value.message()
    assert len(vectors(client.infer("tiny", [texts_input(["cat", "dog"])]))) == 2
    assert requests(service) == before + 2


def test_a_full_queue_says_when_to_come_again(client: Any) -> None:
    with pytest.raises(triton.InferenceServerException, match="retry in 2 s") as refused:
        client.infer("fake", [texts_input(["full"])])
    assert trailing(refused.value)["retry-after"] == "2"


def test_a_message_far_above_the_limit_is_not_even_read(service: ServiceProcess, stub: Any) -> None:
    request = service_pb2.ModelInferRequest(raw_input_contents=[b"\0" * (64 << 20)])
    before = requests(service)
    with pytest.raises(grpc.RpcError, match="larger than max") as refused:
        stub.ModelInfer(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert requests(service) == before


def test_unknown_models_have_no_metadata(client: Any) -> None:
    for ask in (client.get_model_metadata, client.is_model_ready):
        with pytest.raises(triton.InferenceServerException) as refused:
            ask("gpt")
        assert status(refused.value) == "NOT_FOUND"


def other_address() -> str:
    """An address of this machine that is not of the loopback interface, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if ipaddress.ip_address(address).is_loopback else address


def test_only_this_machine_is_let_in_by_default(service: ServiceProcess) -> None:
    address = other_address()
    if not address:
        pytest.skip("this machine has no interface but the loopback one")
    with triton.InferenceServerClient(f"{address}:{GRPC_PORT}") as client:
        for ask in (client.is_server_live, lambda: client.infer("fake", [texts_input(["a"])])):
            with pytest.raises(triton.InferenceServerException, match="only this machine") as no:
                ask()
            assert status(no.value) == "PERMISSION_DENIED"


# --- clients that do not wait ---------------------------------------------------------------------


def waiting_rows(service: ServiceProcess) -> float:
    return service.total("queue_rows", model="fake")


def test_a_deadline_ends_the_call_and_frees_its_rows(service: ServiceProcess, client: Any) -> None:
    before = requests(service, outcome="deadline")
    with pytest.raises(triton.InferenceServerException) as late:
        client.infer("fake", [texts_input(["slow 60"])], client_timeout=1.0)
    assert status(late.value) == "DEADLINE_EXCEEDED"
    eventually(lambda: requests(service, outcome="deadline") == before + 1)
    assert waiting_rows(service) == 0


def test_tritons_own_timeout_parameter_is_a_deadline_too(client: Any) -> None:
    with pytest.raises(triton.InferenceServerException) as late:
        client.infer("fake", [texts_input(["slow 60"])], timeout=300_000)
    assert status(late.value) == "DEADLINE_EXCEEDED"
    assert trailing(late.value)["x-shapeserve-code"] == "deadline_exceeded"


def test_a_client_that_leaves_frees_its_rows_and_harms_nobody(
    service: ServiceProcess, client: Any
) -> None:
    before = requests(service, outcome="cancelled")
    ended: list[Any] = []
    leaving = [
        client.async_infer(
            "fake", [texts_input(["slow 600"])], lambda result, error: ended.append(error)
        )
        for _ in range(3)
    ]
    staying: list[Any] = []
    client.async_infer(
        "fake", [texts_input(["slow 3"])], lambda result, error: staying.append(result)
    )
    eventually(lambda: waiting_rows(service) == 4)
    for call in leaving:
        call.cancel()
    eventually(lambda: requests(service, outcome="cancelled") == before + 3)
    eventually(lambda: len(ended) == 3 and staying)
    np.testing.assert_allclose(vectors(staying[0]), fake_vectors(["slow 3"]), rtol=1e-6)
    assert waiting_rows(service) == 0


# --- the end: keep this test last -----------------------------------------------------------------


def test_sigterm_answers_what_is_in_flight(service: ServiceProcess, client: Any) -> None:
    ended: list[Any] = []
    for _ in range(3):
        client.async_infer(
            "fake", [texts_input(["slow 2"])], lambda result, error: ended.append(error)
        )
    eventually(lambda: waiting_rows(service) == 3)
    service.process.send_signal(signal.SIGTERM)
    service.until("stopped")
    eventually(lambda: len(ended) == 3)
    assert ended == [None] * 3
