"""What an engine tells of its compiles and variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import engines
import numpy as np
import pytest
import tiny
import torch

from shapeserve.compile import monitor as monitor_module
from shapeserve.compile.monitor import CompileEvent, CompileMonitor
from shapeserve.compile.record import CompileRecord
from shapeserve.config import parse_policy
from shapeserve.engine import Engine
from shapeserve.layout import RowArrays
from shapeserve.metrics import CompilePhase, CompileStage, Metrics, Tier
from shapeserve.protocols.http import json_reply

POLICY = {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [2, 4]}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tiny.write_model(tmp_path_factory.mktemp("tiny"))
    with engines.started(engines.text_config(directory, policy=POLICY)) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def warm(engine: Engine) -> CompileRecord:
    """The record right after the start, whatever the tests do to the engine later."""
    return engine.compile_record()


def recompile(engine: Engine) -> None:
    """Run a batch as a client's, under a global state that the programs were not compiled for."""
    row = RowArrays({"input_ids": np.array([2, 5, 3])}, {"seq": 3})
    sizes = engine.grid.buckets[0].as_dict()

    def run() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            engine.runner.launch_counted([row], sizes, fallback=False).finish()

    engine.on_device(run)


def test_a_warm_engine_has_a_variant_a_bucket_and_no_recompile(
    engine: Engine, warm: CompileRecord
) -> None:
    record = warm
    assert record.model == engine.spec.name
    assert len(record.variants) == 4
    assert {(v.tier, v.wanted, v.degraded) for v in record.variants} == {
        (Tier.COMPILED, Tier.COMPILED, False)
    }
    assert {total.phase for total in record.compiles} == {CompilePhase.WARMUP}
    dynamo = next(t for t in record.compiles if t.stage is CompileStage.DYNAMO)
    assert dynamo.count >= 1
    assert dynamo.seconds == pytest.approx(
        engines.value(engine, "compile_seconds_total", stage="dynamo", phase="warmup")
    )
    assert (record.recompiles, record.recent_recompiles) == ({}, ())


def test_a_recompile_on_the_request_path_is_told_with_the_whole_guard(engine: Engine) -> None:
    recompile(engine)
    record = engine.compile_record()
    (last,) = record.recent_recompiles
    assert record.recompiles == {str(last.reason): 1}
    assert str(last.reason) == "global_state"
    assert last.guard is not None
    assert "grad_mode" in last.guard
    assert last.program.startswith("many_")
    assert last.seconds > 0
    assert CompilePhase.REQUEST in {total.phase for total in record.compiles}


def test_the_record_is_of_the_grid_that_serves_now(engine: Engine) -> None:
    grid = engine.swap_policy(parse_policy({"seq": {"explicit": [24]}, "batch": {"explicit": [2]}}))
    record = engine.compile_record()
    assert record.grid == grid.version
    assert [v.bucket for v in record.variants] == ["batch=2,seq=24"]


def test_a_variant_that_was_demoted_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = engine.runner.variants
    monkeypatch.setattr(variants, "_sealed", False)
    bucket = engine.grid.buckets[0]
    variants.demote(bucket)
    told = {v.bucket: v for v in engine.compile_record().variants}[bucket.label]
    assert (told.tier, told.wanted, told.degraded) == (Tier.EAGER, Tier.COMPILED, True)


def test_only_the_last_recompiles_are_kept_oldest_first() -> None:
    metrics = Metrics()
    metrics.preset("m", ["batch=2,seq=8"], ("batch", "seq"))
    monitor = CompileMonitor(metrics, "m")
    kept = monitor_module._RECOMPILES_KEPT
    for i in range(kept + 5):
        monitor._count(CompileEvent(str(i), "many_0", {}, "guard"), CompilePhase.REQUEST)
    assert [r.compile_id for r in monitor.recent_recompiles] == [str(i) for i in range(5, kept + 5)]
    monitor._count(CompileEvent("x", "many_0", {}, None), CompilePhase.WARMUP)
    assert monitor.recent_recompiles[-1].compile_id == str(kept + 4)


def test_a_record_is_plain_json(warm: CompileRecord) -> None:
    assert b'"tier":"compiled"' in json_reply(asdict(warm)).body
