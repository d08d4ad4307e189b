"""Long texts: of those that are cut only the beginning is read, and no request holds up others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import httpx
import numpy as np
import pytest
import tiny
from fake_engine import FakeEngine, FakeRanker
from hypothesis import given
from hypothesis import strategies as st
from test_frontend import Service
from test_grpc_frontend import Call, Replica
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shapeserve.config import ModelConfig
from shapeserve.engine import Engine, TextPair
from shapeserve.errors import DeadlineExceeded, InvalidRequest
from shapeserve.metrics import Metrics
from shapeserve.models.tokenizer import TextTokenizer
from shapeserve.serve import calls
from shapeserve.serve import service as service_module
from shapeserve.serve.service import Samples

# --- the beginning of a text ----------------------------------------------------------------------

Tokenizers = dict[str, TextTokenizer]


@pytest.fixture(scope="module")
def tokenizers(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    """The real one, a tiny WordPiece, and a byte-level BPE that keeps spaces."""
    directory = tmp_path_factory.mktemp("tokenizers")
    tiny.write_tokenizer(directory)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<mask>"], show_progress=False
    )
    bpe.train_from_iterator(["the cat sat on the mat", "  a dog  ran"] * 9, trainer)
    bpe.save(str(directory / "bpe.json"))
    return {
        "minilm": TextTokenizer(minilm_dir / "tokenizer.json", vocab_size=30522),
        "tiny": TextTokenizer(directory / "tokenizer.json", vocab_size=len(tiny.VOCAB)),
        "bpe": TextTokenizer(directory / "bpe.json", vocab_size=bpe.get_vocab_size()),
    }


parts = st.one_of(
    st.sampled_from(["the cat ", "embeddingification", "[MASK]", "<mask>", "1234567", " ", "\n\n"]),
    st.sampled_from(["猫が座った", "Zürich ", "ﬁ", "a\u0301", "\u200d🧑\u200d🚀", "...", "don't "]),
    st.text(max_size=5),
    st.builds(
        lambda c, n: c * n, st.sampled_from([" ", "x", "é", "猫", "\t", "7"]), st.integers(1, 300)
    ),
)
texts = st.builds(
    lambda some, n: "".join(some) * n, st.lists(parts, max_size=12), st.integers(1, 9)
)


@pytest.mark.parametrize("name", ["minilm", "tiny", "bpe"])
@given(text=texts, tokens=st.integers(4, 20))
def test_the_beginning_of_a_text_has_the_ids_that_all_of_it_begins_with(
    tokenizers: Tokenizers, name: str, text: str, tokens: int
) -> None:
    tokenizer = tokenizers[name]
    beginning = tokenizer.beginning(text, tokens)
    assert text.startswith(beginning)
    whole, read = tokenizer.encode([text, beginning])
    if len(beginning) < len(text):
        assert len(read) > tokens + tokenizer.special_tokens
    assert np.array_equal(
        tokenizer.truncate(read, tokens) if len(read) > tokens else read,
        tokenizer.truncate(whole, tokens) if len(whole) > tokens else whole,
    )


@pytest.mark.parametrize("name", ["minilm", "tiny", "bpe"])
@pytest.mark.parametrize(
    ("before", "most"),
    [("", 5_000), (" " * 20_000, 200_000), ("x" * 20_000 + " ", 200_000), ("é" * 300, 20_000)],
    ids=["words", "spaces", "word", "accents"],
)
def test_only_as_much_of_a_text_is_read_as_the_kept_tokens_take(
    tokenizers: Tokenizers, name: str, before: str, most: int
) -> None:
    tokenizer, text = tokenizers[name], before + "the cat sat 猫 " * 50_000
    beginning = tokenizer.beginning(text, 256)
    assert len(beginning) <= most
    read, whole = tokenizer.encode([beginning, text[: 2 * most]])
    assert np.array_equal(read[:256], whole[:256])


def test_an_added_token_of_many_words_may_go_on_behind_the_cut(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    file, added = tmp_path / "tokenizer.json", "[a b c d e f g h i j k l m]"
    known = Tokenizer.from_file(str(file))
    known.add_special_tokens([added])
    known.save(str(file))
    tokenizer = TextTokenizer(file, vocab_size=len(tiny.VOCAB) + 1)
    text = " " * 40 + added + " cat" * 200  # the first look ends in the middle of it
    read, whole = tokenizer.encode([tokenizer.beginning(text, 8), text])
    assert whole[1] == len(tiny.VOCAB)
    assert np.array_equal(read[:8], whole[:8])


def test_a_text_without_a_second_word_is_read_whole(tokenizers: Tokenizers) -> None:
    for text in ("x" * 10_000, " " * 10_000, "a" + " " * 10_000):
        assert tokenizers["minilm"].beginning(text, 16) == text


# --- through the engine ---------------------------------------------------------------------------

LONG = "a cat  sat on\nthe dog. " * 45_000  # a megabyte
EAGER: dict[str, Any] = {"compile": {"tier": "eager"}, "limits": {"max_length": 24}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tiny.write_model(tmp_path_factory.mktemp("embed") / "m")
    with Engine(engines.text_config(directory, **EAGER)).start() as made:
        yield made


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tiny.write_classifier(tmp_path_factory.mktemp("rank") / "m")
    with Engine(engines.text_config(directory, **EAGER)).start() as made:
        yield made


def test_a_long_text_is_cut_like_a_short_one_after_a_look_at_its_beginning(engine: Engine) -> None:
    long, short = engine.prepare([LONG, LONG[:2000]], over_max="truncate")
    ids = [sample.rows[0].arrays.arrays["input_ids"] for sample in (long, short)]
    assert np.array_equal(*ids)
    assert len(ids[0]) == 24
    assert long.truncated_from is not None
    assert 24 < long.truncated_from < 500  # tokens that were read, of 315,000


@pytest.mark.parametrize("query", ["the cat", "the cat sat on a dog " * 2])
def test_of_a_pair_only_the_beginning_of_the_document_is_read(ranker: Engine, query: str) -> None:
    pairs = [TextPair(query, LONG), TextPair(query, LONG[:2000])]
    long, short = ranker.prepare(pairs, over_max="truncate")
    for name in ("input_ids", "token_type_ids"):
        arrays = [sample.rows[0].arrays.arrays[name] for sample in (long, short)]
        assert np.array_equal(*arrays)
    assert long.truncated_from is not None
    assert long.truncated_from < 500
    with pytest.raises(InvalidRequest, match="text has 1035000 characters"):
        ranker.prepare([TextPair(LONG, "a")], over_max="truncate")


def test_a_long_text_that_is_not_cut_is_told_how_to_ask_for_it_in_every_protocol(
    engine: Engine,
) -> None:
    with pytest.raises(InvalidRequest, match=r"`over_max: truncate` \(one of the `parameters`"):
        engine.prepare([LONG])


def test_rows_that_are_part_of_a_request_are_named_by_their_place_in_it(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^input\[41\] .*; input\[42\] ") as refused:
        engine.prepare(["a", "", " "], start=40)
    assert (refused.value.param, refused.value.code) == ("input[41]", "empty_input")


# --- in turns -------------------------------------------------------------------------------------


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """One whose chunks are of eight characters."""
    monkeypatch.setattr(service_module, "CHUNK_CHARACTERS", 8)
    made = Service(more={"ranker": FakeRanker})
    yield made
    made.frontend.close()


def requests(rows: list[str]) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Endpoint -> path, a request of these rows, what the rows are called."""
    tensor = {"name": "text", "shape": [len(rows)], "datatype": "BYTES", "data": rows}
    return {
        "embeddings": ("/v1/embeddings", {"model": "mini", "input": rows}, "input"),
        "classify": ("/v1/classify", {"model": "ranker", "input": rows}, "input"),
        "rerank": ("/v1/rerank", {"model": "ranker", "query": "q", "documents": rows}, "documents"),
        "oip": ("/v2/models/mini/infer", {"inputs": [tensor]}, "input"),
    }


async def sent(service: Service, endpoint: str, rows: list[str]) -> tuple[httpx.Response, str, Any]:
    path, content, item = requests(rows)[endpoint]
    engine = service.engines[
        "ranker" if item == "documents" or "ranker" in str(content) else "mini"
    ]
    return await service.http.post(path, json=content), item, engine


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoint", requests([]))
async def test_rows_are_prepared_in_chunks_and_bad_ones_named_by_their_index(
    service: Service, endpoint: str
) -> None:
    good, _, engine = await sent(service, endpoint, ["one", "two", "three", "a long text", "four"])
    assert good.status_code == 200
    assert sum(engine.prepared) == 5
    assert len(engine.prepared) > 3
    engine.prepared.clear()
    bad, item, _ = await sent(service, endpoint, ["one", "two", "three", " ", "a long text", " "])
    error = bad.json()["error"]
    message = error["message"] if isinstance(error, dict) else error
    error = error if isinstance(error, dict) else bad.json()
    assert (bad.status_code, error["code"], error["param"]) == (400, "empty_input", f"{item}[3]")
    assert f"{item}[4] and what comes after it were not looked at yet" in message
    assert sum(engine.prepared) == 4  # not those after the chunk with the first bad one


def test_grpc_prepares_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "CHUNK_CHARACTERS", 8)
    replica, call = Replica(), Call()
    asyncio.run(replica.infer("one", "two", "a long text", " ", call=call))
    assert replica.engines["mini"].prepared == [2, 1, 1]
    assert call.details == "input[3] is blank"  # the last chunk: nothing was left out
    replica.frontend.close()


@pytest.mark.asyncio
async def test_a_request_of_one_chunk_is_one_job(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    pool = service.frontend._service._pool
    submit = pool.submit
    monkeypatch.setattr(pool, "submit", lambda *job: jobs.append(job) or submit(*job))
    assert (await service.embed(["one", "two"])).status_code == 200
    assert len(jobs) == 1
    assert (await service.embed(["one", "two", "three"])).status_code == 200
    assert len(jobs) == 1 + 3


class HeldEngine(FakeEngine):
    """Holds every first chunk until it is told to go on; keeps the order of all of them."""

    def __init__(self, config: ModelConfig, metrics: Metrics) -> None:
        super().__init__(config, metrics)
        self.order: list[str] = []
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()

    def prepare(self, samples: list[Any], **options: Any) -> list[Any]:
        self.order.append(samples[0])
        if samples[0].startswith("first"):
            self.entered.release()
            assert self.go_on.wait(30)
        return super().prepare(samples, **options)


@pytest.mark.asyncio
async def test_a_small_request_does_not_wait_for_the_end_of_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "CHUNK_CHARACTERS", 8)
    service = Service(more={"held": HeldEngine})
    engine = service.engines["held"]
    assert isinstance(engine, HeldEngine)
    rows = [
        ["first", "second", "third", f"last {i}"] for i in range(service_module.PREPARE_THREADS)
    ]
    long = [asyncio.create_task(service.embed(some, model="held")) for some in rows]
    for _ in long:
        assert await asyncio.to_thread(engine.entered.acquire, timeout=30)
    pool = service.frontend._service._pool
    small = asyncio.create_task(service.embed("small", model="held"))
    while not pool._work_queue.qsize():
        await asyncio.sleep(0.001)
    engine.go_on.set()
    answers = await asyncio.gather(*long, small)
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert engine.order.index("small") <= len(rows)  # right behind what was under way
    service.frontend.close()


@pytest.mark.asyncio
async def test_a_text_longer_than_a_chunk_keeps_no_thread_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "CHUNK_CHARACTERS", 8)
    service = Service(more={"held": HeldEngine})
    engine = service.engines["held"]
    assert isinstance(engine, HeldEngine)
    long = [asyncio.create_task(service.embed("first " * 9, model="held")) for _ in range(4)]
    assert await asyncio.to_thread(engine.entered.acquire, timeout=30)
    assert (await service.embed("small", model="held")).status_code == 200
    assert not any(task.done() for task in long)
    engine.go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}
    service.frontend.close()


@pytest.mark.asyncio
async def test_nothing_more_is_tokenised_once_the_deadline_has_passed(service: Service) -> None:
    call = calls.Call({}, "POST", "/", deadline_s=0.0)
    samples = Samples("mini", ["one", "two", "three"], None)
    with pytest.raises(DeadlineExceeded, match="before all rows were tokenised"):
        await service.frontend._service.prepare(call, lambda: (None, samples))
    assert service.engines["mini"].prepared == []
