"""Programs and variants: own code objects, at most two compiles, everything counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shapeserve.buckets import Bucket, Grid
from shapeserve.compile.breaks import since, snapshot
from shapeserve.compile.cache import ensure_cache_dir
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.monitor import CompileMonitor, classify_recompile
from shapeserve.compile.program import compiled, freezing
from shapeserve.compile.variants import Programs, VariantSet, single_pays
from shapeserve.layout import PaddedLayout
from shapeserve.metrics import CompilePhase, GraphBreakReason, Metrics, Mode, RecompileReason, Tier
from shapeserve.models.spec import ModelSpec, TensorSpec


class Tokens(torch.nn.Module):
    """[B, S] ids -> [B, S, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(self.linear(self.embed(ids))),)


@pytest.fixture
def module() -> torch.nn.Module:
    return Tokens().eval().requires_grad_(False)


@pytest.fixture
def monitor() -> CompileMonitor:
    return monitor_of("m")


def ids(batch: int, seq: int) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


def count(monitor: CompileMonitor, name: str, **labels: str) -> float:
    return sum(
        s.value
        for s in monitor._metrics.samples()
        if s.name == f"shapeserve_{name}" and labels.items() <= s.labels.items()
    )


def monitor_of(model: str, metrics: Metrics | None = None) -> CompileMonitor:
    metrics = metrics or Metrics()
    metrics.preset(model, ["batch=2,seq=8"], ("batch", "seq"))
    return CompileMonitor(metrics, model)


def warm_programs(
    module: torch.nn.Module, monitor: CompileMonitor | None = None, **settings: object
) -> Programs:
    options = {"tier": Tier.COMPILED, "freeze": False, "backend": "eager", **settings}
    programs = Programs(module, monitor=monitor or monitor_of("m"), **options)  # type: ignore[arg-type]
    programs.compile_many(lambda program: program(ids(3, 40)))
    programs.compile_single(lambda program: program(ids(1, 40)))
    return programs


def make_variants(grid: Grid, programs: Programs, **options: Any) -> VariantSet:
    token = TensorSpec("ids", "int64", ("batch", "seq"))
    spec = ModelSpec("m", "module", "float32", {"ids": token}, {}, grid.axes, {}, {})
    cpu = torch.device("cpu")
    return VariantSet(grid, programs, PaddedLayout(spec, 16, cpu), cpu, **options)


def test_twelve_programs_of_one_module_each_stay_compiled(
    module: torch.nn.Module, monitor: CompileMonitor
) -> None:
    # One shared code object would hit torch's recompile_limit of 8 and go eager silently.
    with torch.no_grad():
        for _ in range(12):
            compiled(module, "p", backend="eager", monitor=monitor)(ids(3, 8))
            assert len(monitor.collect(CompilePhase.WARMUP)) == 1


@settings(max_examples=30)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 70)), min_size=1, max_size=6))
def test_i2_two_compiles_serve_every_shape(shapes: list[tuple[int, int]]) -> None:
    module = Tokens().eval().requires_grad_(False)
    monitor = monitor_of("m")
    with torch.no_grad():
        programs = warm_programs(module, monitor)
        assert len(monitor.collect(CompilePhase.WARMUP)) == 2
        for batch, seq in shapes:
            run, tier = programs.for_sizes({"batch": batch, "seq": seq})
            assert tier is Tier.COMPILED
            assert torch.allclose(run(ids(batch, seq))[0], module(ids(batch, seq))[0], atol=1e-6)
        assert monitor.collect(CompilePhase.REQUEST) == ()
    assert count(monitor, "recompiles_total") == 0


def test_specialised_programs_are_static_and_leave_the_shared_ones_alone(
    module: torch.nn.Module,
) -> None:
    shared, own = monitor_of("shared"), monitor_of("own")
    with torch.no_grad():
        programs = warm_programs(module, shared)
        shared.collect(CompilePhase.WARMUP)
        special = programs.specialized(own)
        assert special.for_sizes({"batch": 2, "seq": 8})[1] is Tier.EAGER  # none is made yet
        special.compile_many(lambda program: program(ids(2, 8)))
        run, _ = special.for_sizes({"batch": 2, "seq": 8})
        assert torch.equal(run(ids(2, 8))[0], module(ids(2, 8))[0])
        assert len(own.collect(CompilePhase.WARMUP)) == 1
        run(ids(3, 9))  # another shape: compiled anew, unlike by a dynamic program
        assert len(own.collect(CompilePhase.WARMUP)) == 1
        programs.for_sizes({"batch": 2, "seq": 8})[0](ids(2, 8))
        assert shared.collect(CompilePhase.REQUEST) == ()


def test_a_row_axis_of_size_one_runs_eagerly_instead_of_a_third_compile(
    module: torch.nn.Module,
) -> None:
    assert warm_programs(module).for_sizes({"batch": 4, "seq": 1})[1] is Tier.EAGER


def test_a_planted_recompile_is_counted_with_its_reason_and_logged_once(
    module: torch.nn.Module, monitor: CompileMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        programs = warm_programs(module, monitor)
        monitor.collect(CompilePhase.WARMUP)
        programs.for_sizes({"batch": 2, "seq": 8})[0](ids(2, 8).to(torch.int32))
        (event,) = monitor.collect(CompilePhase.REQUEST)
    assert event.recompile_reason is not None
    assert "dtype" in event.recompile_reason
    assert count(monitor, "recompiles_total", reason="dtype") == 1
    assert count(monitor, "compiles_total", phase="request", stage="dynamo") == 1
    assert [r.levelname for r in caplog.records if r.name == "shapeserve.compile"] == ["ERROR"]


def test_a_compile_of_another_thread_is_not_taken_for_ours(
    module: torch.nn.Module, monitor: CompileMonitor
) -> None:
    import threading

    def compile_there() -> None:
        with torch.no_grad():
            compiled(module, "there", backend="eager", monitor=monitor)(ids(2, 8))

    thread = threading.Thread(target=compile_there)
    thread.start()
    thread.join()
    assert monitor.collect(CompilePhase.REQUEST) == ()


def test_a_recompile_is_counted_for_the_model_it_is_of_whoever_collects_first(
    module: torch.nn.Module,
) -> None:
    metrics = Metrics()
    first, second = monitor_of("first", metrics), monitor_of("second", metrics)
    with torch.no_grad():
        programs = warm_programs(module, first)
        others = warm_programs(module, second)
        assert len(first.collect(CompilePhase.WARMUP)) == 2
        assert len(second.collect(CompilePhase.WARMUP)) == 2
        programs.for_sizes({"batch": 2, "seq": 8})[0](ids(2, 8).to(torch.int32))
        others.for_sizes({"batch": 2, "seq": 8})[0](ids(2, 8))
    assert second.collect(CompilePhase.REQUEST) == ()
    assert len(first.collect(CompilePhase.REQUEST)) == 1
    assert count(first, "recompiles_total", model="first") == 1
    assert count(first, "recompiles_total", model="second") == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, RecompileReason.FIRST_COMPILE),
        ("tensor 'x' size mismatch at index 0. expected 4, actual 8", RecompileReason.SHAPE),
        ("tensor 'x' stride mismatch at index 0", RecompileReason.STRIDE),
        ("tensor 'x' dtype mismatch. expected Long, actual Int", RecompileReason.DTYPE),
        ("tensor 'x' dispatch key set mismatch", RecompileReason.TENSOR_KIND),
        ("GLOBAL_STATE changed: num_threads", RecompileReason.GLOBAL_STATE),
        ("something new", RecompileReason.OTHER),
    ],
    ids=lambda v: str(v)[:24],
)
def test_guard_texts_map_to_a_closed_set(text: str | None, reason: RecompileReason) -> None:
    assert classify_recompile(text) is reason


def test_freezing_is_on_only_inside_the_block() -> None:
    import torch._inductor.config as config

    with freezing(True):
        assert config.freezing
    assert not config.freezing


def test_variants_name_their_tier_and_refuse_changes_once_sealed(module: torch.nn.Module) -> None:
    bucket = Bucket.of(batch=2, seq=8)
    variants = make_variants(Grid(("batch", "seq"), [bucket]), warm_programs(module))
    assert (variants[bucket].tier, variants[bucket].mode) == (Tier.COMPILED, Mode.COMPILED)
    assert not variants[bucket].degraded
    variants.demote(bucket)
    assert variants[bucket].degraded
    variants.seal()
    with pytest.raises(RuntimeError, match="sealed"):
        variants.demote(bucket)


def test_a_program_for_one_row_pays_only_if_two_rows_cost_more() -> None:
    import time

    def linear(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time.sleep(0.004 * x.shape[0])
        return (x,)

    def flat(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time.sleep(0.004)
        return (x,)

    assert single_pays(lambda batch: linear(ids(batch, 8)), torch.device("cpu"))
    assert not single_pays(lambda batch: flat(ids(batch, 8)), torch.device("cpu"))


class Branching(torch.nn.Module):
    """Breaks the graph: Python looks at a value."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if bool((x > 100).any()):
            return (x * 2,)
        return (x + 1,)


def test_a_module_that_breaks_the_graph_still_compiles_and_the_break_has_a_reason(
    monitor: CompileMonitor,
) -> None:
    before = snapshot()
    programs = Programs(
        Branching(), tier=Tier.COMPILED, freeze=False, backend="eager", monitor=monitor
    )
    with torch.no_grad():
        programs.compile_many(lambda program: program(ids(3, 8)))
        run, _ = programs.for_sizes({"batch": 2, "seq": 4})
        assert run(ids(2, 4))[0].eq(1).all()
    assert len(monitor.collect(CompilePhase.WARMUP)) >= 2
    assert since(before)[GraphBreakReason.DATA_DEPENDENT] >= 1


def test_a_recompile_limit_runs_eager_counted_instead_of_silently(
    module: torch.nn.Module, monitor: CompileMonitor
) -> None:
    programs = Programs(module, tier=Tier.COMPILED, freeze=False, backend="eager", monitor=monitor)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        programs.compile_many(lambda program: program(ids(3, 8)))
        run, _ = programs.for_sizes({"batch": 2, "seq": 4})
        planted = ids(2, 4).to(torch.int32)
        assert torch.allclose(run(planted)[0], module(planted)[0])
    assert monitor.eager_frames == count(monitor, "eager_frames_total") == 1


def test_a_cache_directory_that_cannot_be_written_is_replaced_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "cache"))
    fresh = ensure_cache_dir()
    assert fresh != str(file / "cache")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == fresh
    assert "not writable" in caplog.text
    assert ensure_cache_dir() == fresh


class FakeStreams:
    """As torch: so many streams, handed out in turn, equal if they are the same one."""

    def __init__(self, many: int) -> None:
        self._many = many
        self._next = 0

    def __call__(self, device: torch.device) -> int:
        self._next += 1
        return self._next % self._many


def test_grids_that_live_at_the_same_time_never_share_a_capture_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStreams(3))
    cpu = torch.device("cpu")
    stays, swapped = GraphPool(cpu), GraphPool(cpu)
    for _ in range(7):  # a new policy each, warmed beside the old one
        old, swapped = swapped, GraphPool(cpu)
        assert len({stays._stream, old._stream, swapped._stream}) == 3
        del old
    monkeypatch.setattr(torch.cuda, "Stream", FakeStreams(2))
    with pytest.raises(RuntimeError, match="serve fewer models"):
        GraphPool(cpu)


class FakePool:
    """Captures nothing; every capture takes 100 bytes."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0

    def capture(self, program: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
        self.bytes += 100
        return program


@pytest.mark.parametrize(("budget", "captured"), [(None, 4), (250, 3), (100, 1), (0, 0)])
def test_captures_stop_at_the_memory_budget_and_the_rest_stays_compiled(
    module: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
    captured: int,
) -> None:
    monkeypatch.setattr("shapeserve.compile.variants.GraphPool", FakePool)
    grid = Grid(("batch", "seq"), [Bucket.of(batch=2, seq=8 * i) for i in range(1, 5)])
    programs = warm_programs(module, tier=Tier.GRAPH)
    variants = make_variants(grid, programs, graph_bytes=budget)
    done = [variants.capture(bucket, (ids(2, bucket.size("seq")),)) for bucket in grid.buckets]
    assert sum(done) == captured
    tiers = [variants[bucket].tier for bucket in grid.buckets]
    assert tiers == [Tier.GRAPH] * captured + [Tier.COMPILED] * (4 - captured)
    assert [variants[bucket].degraded for bucket in grid.buckets] == [not ok for ok in done]
    assert variants.graph_bytes == 100 * captured
