"""Warm-up: what is refused, what is served at a lower tier, and when an engine is ready."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import engines
import numpy as np
import pytest
import tiny
import torch

from shapeserve.buckets import Bucket
from shapeserve.compile.variants import VariantSet
from shapeserve.engine import Engine
from shapeserve.errors import ModelError
from shapeserve.metrics import CompilePhase
from shapeserve.warmup import WarmupContext, WarmupProgress, verify
from shapeserve.warmup.probe import relative_error


def test_i4_a_padding_sensitive_model_is_refused_naming_the_worst_row_and_the_remedy() -> None:
    with pytest.raises(
        ModelError, match=r"padding changes the answers .* seq=\d+ padded into"
    ) as e:
        engines.started(engines.module_config("padding_sensitive"))
    assert "make: mask" in str(e.value)
    assert "padding_invariant: false" in str(e.value)


def test_a_declared_padding_sensitive_model_runs_every_row_at_its_exact_size() -> None:
    config = engines.module_config("padding_sensitive", padding_invariant=False)
    with engines.started(config) as engine:
        rows = [{"values": np.arange(1, n + 1, dtype=np.float32)} for n in (2, 3, 5, 16)]
        results = engine.run(rows)
        means = [float(r.outputs["mean"][0]) for r in results]
        assert means == [1.5, 2.0, 3.0, 8.5]
        assert [(r.mode, r.reason) for r in results[:3]] == [("fallback", "capability")] * 3
        assert results[3].bucket == "batch=1,seq=16"  # of exactly this size: no seq padding


def test_i3_ready_only_after_every_bucket_was_verified_with_no_compile(tmp_path: Path) -> None:
    seen: list[tuple[bool, WarmupProgress]] = []
    engine = Engine(
        engines.text_config(tiny.write_model(tmp_path)),
        on_progress=lambda p: seen.append((engine.ready, p)),
    )
    with engine.start():
        assert not any(ready for ready, _ in seen)
        verified = {p.detail for _, p in seen if p.stage == "verify"}
        assert verified >= {b.label for b in engine.grid.buckets}
        assert seen[-1][1].stage == "sealed"
        assert seen[-1][1].done == seen[-1][1].total == len(engine.grid.buckets)
        assert engine.ready
        assert engines.value(engine, "variants", tier="compiled", state="warm") == len(engine.grid)
        assert engines.value(engine, "warmup_ratio") == 1
        assert engines.value(engine, "compiles_total", stage="dynamo") <= 2


class _BreaksInOneBucket(VariantSet):
    """A variant set whose variant of one bucket answers wrongly."""

    def _base(self, bucket: Bucket):  # type: ignore[no-untyped-def]
        variant = super()._base(bucket)
        if bucket != Bucket.of(batch=2, seq=8):
            return variant
        run = variant.run
        return type(variant)(
            bucket, variant.tier, lambda *x: tuple(o + 1 for o in run(*x)), variant.wanted
        )


def test_i3_a_wrong_variant_is_named_and_served_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shapeserve.engine.build.VariantSet", _BreaksInOneBucket)
    with engines.started(engines.module_config("masked_tokens")) as engine:
        assert engines.value(engine, "variants", tier="eager", state="degraded") == 1
        row = {"ids": np.arange(1, 7)}
        (result,) = engine.run([row])
        expected = engines.alone(engine, row, {"seq": 6})
        assert relative_error(list(result.outputs.values()), expected) < 1e-4
    assert any("batch=2,seq=8" in r.message and r.levelname == "ERROR" for r in caplog.records)


def test_i3_strict_refuses_to_start_with_a_wrong_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shapeserve.engine.build.VariantSet", _BreaksInOneBucket)
    with pytest.raises(ModelError, match=r"bucket batch=2,seq=8 .* differs by"):
        engines.started(engines.module_config("masked_tokens", compile={"strict": True}))


def test_two_dynamic_axes_start_with_two_compiles_and_give_the_eager_answer() -> None:
    with engines.started(engines.module_config("masked_conv")) as engine:
        assert engines.value(engine, "compiles_total", stage="dynamo") <= 2
        rng = np.random.default_rng(1)
        sizes = [(2, 2), (3, 8), (4, 5), (8, 8), (7, 2)]
        rows = [{"pixels": rng.standard_normal((3, h, w)).astype(np.float32)} for h, w in sizes]
        for (h, w), row, result in zip(sizes, rows, engine.run(rows), strict=True):
            assert result.outputs["maps"].shape == (4, h, w)
            expected = engines.alone(engine, row, {"height": h, "width": w})
            assert relative_error(list(result.outputs.values()), expected) < 1e-4
        assert engines.value(engine, "recompiles_total") == 0


def test_reference_errors_count_nan_and_wrong_integers_as_infinite() -> None:
    assert relative_error([np.array([np.nan])], [np.array([1.0])]) == float("inf")
    assert relative_error([np.array([1])], [np.array([2])]) == float("inf")
    assert relative_error([np.array([2.0])], [np.array([1.0])]) == 1.0


def test_starting_twice_is_an_error(tmp_path: Path) -> None:
    with engines.started(engines.module_config("poisonous", compile={"tier": "eager"})) as engine:
        with pytest.raises(RuntimeError, match="cannot start"):
            engine.start()
        assert torch.is_grad_enabled()  # the device thread's no_grad is its own


def test_a_switched_off_compiler_is_an_error_not_a_silent_eager_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ModelError, match="compiled nothing"):
        engines.started(engines.module_config("masked_tokens"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_that_the_budget_refuses_is_counted_and_strict_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    config = engines.module_config("masked_tokens", compile={"tier": "eager"})
    with engines.started(config) as engine:
        built = engine._ready_parts()
        context = WarmupContext(
            built.runner, built.probe, built.monitor, engine.metrics, CompilePhase.WARMUP, strict
        )
        monkeypatch.setattr(built.runner.variants, "capture", lambda *_: False)
        refused = pytest.raises(ModelError, match="graph_memory_fraction")
        with refused if strict else nullcontext():
            engine.on_device(lambda: verify._capture(context, engine.grid.buckets[0]))
        assert engines.value(engine, "captures_total", outcome="refused") == 1


def test_a_compile_after_the_seal_is_an_error_with_the_bucket_that_ran(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engines.started(engines.module_config("masked_tokens")) as engine:
        row = {"ids": np.arange(1, 7)}
        before = engine.on_device(torch.get_num_threads)
        engine.on_device(lambda: torch.set_num_threads(before + 1))  # torch guards on it
        try:
            (result,) = engine.run([row])
            engine.run([row])
        finally:
            engine.on_device(lambda: torch.set_num_threads(before))
        assert engines.value(engine, "recompiles_total", reason="global_state") == 1
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    (error,) = (text for text in errors if text.startswith("recompile on the request path"))
    assert f"of model masked_tokens at {result.bucket}: " in error
    assert "num_threads" in error
