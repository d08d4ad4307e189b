"""Rows laid end to end: the packed layout, the ragged one, and the models that can take them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import engines
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeserve.batcher import Batcher, Lane, Row
from shapeserve.buckets import TOKENS, Bucket
from shapeserve.config import AxisPolicy, ServeConfig
from shapeserve.engine import Engine
from shapeserve.errors import ConfigError, ModelError
from shapeserve.layout import PackedLayout, PaddedLayout, RaggedLayout, RowArrays, takes_tokens
from shapeserve.metrics import identities
from shapeserve.models import load
from shapeserve.models.packed import bounded, padded_bounds
from shapeserve.models.spec import ModelSpec, TensorSpec
from shapeserve.policy import packed_grid
from shapeserve.warmup.probe import relative_error

CPU = torch.device("cpu")
IDS = TensorSpec("ids", "int64", ("batch", "seq"), pad=7)
MASK = TensorSpec("mask", "int64", ("batch", "seq"), make="mask")
POSITIONS = TensorSpec("positions", "int64", ("batch", "seq"), make="positions")
LANE = Lane((), False, (16, 64), TOKENS)


def spec(*outputs: TensorSpec) -> ModelSpec:
    return ModelSpec(
        "m",
        "module",
        "float32",
        {t.name: t for t in (IDS, MASK, POSITIONS)},
        {t.name: t for t in outputs},
        ("batch", "seq"),
        {"seq": 16},
        {"seq": 16},
    )


def rows_of(*lengths: int) -> list[RowArrays]:
    start = np.cumsum([0, *lengths])
    return [
        RowArrays({"ids": np.arange(s, s + n)}, {"seq": n})
        for s, n in zip(start, lengths, strict=False)
    ]


# --- layouts -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_padding_made_on_the_device_equals_padding_made_on_the_host(lengths: list[int]) -> None:
    rows, sizes = rows_of(*lengths), {"batch": 5, "seq": 8}
    host = PaddedLayout(spec(), 40, CPU).write(rows, sizes)
    layout = RaggedLayout(spec(), 40, 5, CPU)
    layout.poison()
    seen: list[torch.Tensor] = []
    layout.bind(lambda *inputs: (seen.extend(inputs), ())[1], sizes)(*layout.write(rows, sizes))
    for ours, theirs in zip(seen, host, strict=True):
        assert torch.equal(ours, theirs)


def test_ragged_outputs_travel_back_without_their_padding() -> None:
    token, pooled = (
        TensorSpec(n, "float32", d) for n, d in (("t", ("batch", "seq", 2)), ("p", ("batch", 2)))
    )
    layout = RaggedLayout(spec(token, pooled), 16, 4, CPU)
    rows, sizes = rows_of(3, 1, 4), {"batch": 4, "seq": 4}

    def program(ids: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = ids[:, :, None].float().expand(-1, -1, 2)
        return values, values.amax(1)

    outputs = layout.bind(program, sizes)(*layout.write(rows, sizes))
    assert outputs[0].shape == (16, 2)
    found, finite = layout.read(outputs, rows, sizes).rows()
    assert finite == [True] * 3
    for row, given_row in zip(found, rows, strict=True):
        assert row["t"][:, 0].tolist() == given_row.arrays["ids"].tolist()
    assert found[2]["p"].tolist() == [7.0, 7.0]


def test_i7_the_tail_of_a_packed_batch_is_its_only_padding() -> None:
    layout = PackedLayout(spec(), 32, 8, CPU)
    tokens, offsets = layout.write(rows_of(3, 5), {TOKENS: 32})
    assert tokens[:8].tolist() == [*range(8)]
    assert offsets.tolist() == [0, 3, 8, 8, 8, 8, 8, 8, 8]
    assert layout.split(rows_of(3, 5), {TOKENS: 32}) == {"real": 8, "padding_tokens": 24}


@pytest.mark.parametrize("kind", [PackedLayout, RaggedLayout])
def test_i4_what_a_large_batch_leaves_behind_is_a_valid_id_to_a_small_one(
    kind: type[PackedLayout | RaggedLayout],
) -> None:
    # An id beyond the vocabulary ends the process on a GPU, so that offsets must never be read
    # as tokens.
    layout, vocabulary = kind(spec(), 4096, 1024, CPU), 5
    sizes = (
        ({"tokens": 4096}, {"tokens": 16})
        if kind is PackedLayout
        else ({"batch": 1024, "seq": 4}, {"batch": 2, "seq": 8})
    )
    rows = [RowArrays({"ids": np.full(4, 3)}, {"seq": 4}) for _ in range(1024)]
    for written, executed in ((rows, sizes[0]), (rows[:1], sizes[1]), (rows[:2], sizes[1])):
        tokens, offsets = layout.write(written, executed)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
        assert int(offsets[-1]) == 4 * len(written)


def test_only_models_whose_rows_are_token_ids_can_be_ragged() -> None:
    assert takes_tokens(spec())
    pixels = TensorSpec("pixels", "float32", ("batch", "height"))
    other = ModelSpec("m", "module", "float32", {"p": pixels}, {}, ("batch", "height"), {}, {})
    assert not takes_tokens(other)


# --- batches -------------------------------------------------------------------------------------


def packed_row(tokens: int) -> Row:
    return Row(tokens, LANE, tokens, units=tokens)


@given(lengths=st.lists(st.integers(4, 64), min_size=1, max_size=60))
def test_packed_batches_keep_the_order_and_fit_their_size(lengths: list[int]) -> None:
    batcher = Batcher(max_queue_rows=100, max_queue_tokens=10_000)
    batcher.offer([packed_row(n) for n in lengths], 0.0)
    seen: list[int] = []
    while (batch := batcher.next_batch(0.0)) is not None:
        taken = [row.payload for row in batch.rows]
        assert sum(taken) <= batch.size in LANE.batch_sizes
        seen += taken
        if len(seen) < len(lengths) and batch.size == 64:
            assert sum(taken) + lengths[len(seen)] > 64  # the next row did not fit
        batcher.complete(batch, 0.0)
    assert seen == lengths


def test_a_batch_is_launched_ahead_only_if_more_rows_wait_than_it_takes() -> None:
    batcher = Batcher(max_queue_rows=100, max_queue_tokens=10_000)
    batcher.offer([packed_row(20)], 0.0)
    assert batcher.next_batch(0.0, ahead=True) is None  # others may still join
    batcher.offer([packed_row(20) for _ in range(3)], 0.0)
    batch = batcher.next_batch(0.0, ahead=True)
    assert batch is not None
    assert (batch.size, len(batch.rows)) == (64, 3)
    assert batcher.next_batch(0.0, ahead=True) is None
    assert batcher.next_batch(0.0) is not None


def test_the_default_packed_grid_grows_by_a_quarter_and_holds_the_longest_row() -> None:
    sizes = [b.size(TOKENS) for b in packed_grid({}, 16_384, {"seq": 512}).buckets]
    assert sizes[0] == 16
    assert sizes[-1] == 16_384
    assert all(b <= max(a * 1.25 + 8, a + 8) for a, b in itertools.pairwise(sizes))
    assert packed_grid({}, 64, {"seq": 512}).buckets[-1] == Bucket(((TOKENS, 512),))
    with pytest.raises(ConfigError, match="does not hold one row of 512"):
        packed_grid({TOKENS: AxisPolicy(explicit=(64,))}, 64, {"seq": 512})
    with pytest.raises(ConfigError, match=r"16384 is above limits.max_batch_tokens 8192"):
        packed_grid({TOKENS: AxisPolicy(explicit=(64, 16_384))}, 8192, {"seq": 512})


# --- models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mean", "cls", "lasttoken", "max"])
def pooled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("packed") / "m"
    tiny.write_model(directory, kind="roberta", pooling=request.param)
    with engines.started(packed_config(directory)) as engine:
        yield engine


def packed_config(directory: Path) -> ServeConfig:
    policy = {TOKENS: {"explicit": [16, 64]}}
    return engines.text_config(directory, layout="packed", policy=policy)


def test_i4_packed_rows_have_the_unpadded_answer_with_every_pooling(pooled: Engine) -> None:
    texts = [tiny.text_of(3 + (7 * i) % 40, seed=i) for i in range(40)]
    results = pooled.run(texts)
    for text, result in zip(texts, results, strict=True):
        (prepared,) = pooled.prepare([text])
        arrays = prepared.rows[0].arrays
        expected = engines.alone(pooled, dict(arrays.arrays), dict(arrays.sizes))
        assert relative_error([result.outputs["sentence_embedding"]], expected) < 1e-5
    assert {r.bucket for r in results} <= {"tokens=16", "tokens=64"}
    assert identities(pooled.metrics.samples()) == []
    assert engines.value(pooled, "recompiles_total") == 0


def test_a_row_of_one_token_takes_its_place(pooled: Engine) -> None:
    (result,) = pooled.run([[5]])
    assert (result.length, result.bucket) == (1, "tokens=16")


def test_one_compile_serves_all_packed_buckets_and_a_row_beyond_them(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "m", max_length=24, positions=48)
    policy = {TOKENS: {"explicit": [16, 32]}}
    config = engines.text_config(directory, layout="packed", policy=policy)
    with engines.started(config) as engine:
        assert engines.value(engine, "compiles_total", stage="dynamo") == 1
        (result,) = engine.run([tiny.text_of(41)])
        assert (result.mode, result.bucket, result.reason) == ("fallback", "none", "over_max")
        assert engines.value(engine, "recompiles_total") == 0
        assert identities(engine.metrics.samples()) == []


def test_a_causal_model_is_refused_packed_naming_why(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "m", kind="qwen3", pooling="lasttoken")
    with pytest.raises(ModelError, match=r"causal|cannot take packed rows"):
        engines.started(packed_config(directory))


def test_truncation_and_rejection_mean_the_same_as_in_the_padded_layout(pooled: Engine) -> None:
    (prepared,) = pooled.prepare([tiny.text_of(40)], over_max="truncate")
    assert (prepared.length, prepared.truncated_from) == (24, 40)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_bounds_of_padded_rows_hold_each_token_in_its_row(lengths: list[int]) -> None:
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    starts, ends = padded_bounds(mask.long())
    for row, length in enumerate(lengths):
        for position in range(6):
            token = 6 * row + position
            found = (int(starts[token]), int(ends[token]))
            real = position < length
            assert found == ((6 * row, 6 * row + length) if real else (token, token + 1))
    assert (starts.diff() >= 0).all()
    assert (ends.diff() >= 0).all()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
def test_i4_padded_rows_with_bounds_have_the_answers_of_the_mask(
    kind: str, pooling: str, tmp_path: Path
) -> None:
    directory = tiny.write_model(tmp_path / "m", kind=kind, pooling=pooling)
    config = engines.text_config(directory).models[0]
    model = load(config, CPU)
    _, padded = bounded(model.module.encoder, pooling, normalize=True)
    assert padded is not None
    ids = torch.randint(5, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9)[None] < torch.tensor([9, 1, 4, 7])[:, None]).long()
    ids = torch.where(mask.bool(), ids, model.spec.pad_token_id or 0)
    with torch.no_grad():
        assert torch.allclose(padded(ids, mask)[0], model.module(ids, mask)[0], atol=1e-5)
