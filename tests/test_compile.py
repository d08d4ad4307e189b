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
from shapeserve.compile.breaks import classify_break
from shapeserve.compile.cache import ensure_cache_dir
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.monitor import (
    CompileMonitor,
    _cache_results,
    _seconds,
    classify_recompile,
)
from shapeserve.compile.program import compiled, freezing
from shapeserve.compile.variants import Programs, VariantSet, single_pays
from shapeserve.layout import PaddedLayout
from shapeserve.metrics import (
    NO_BUCKET,
    CompilePhase,
    CompileStage,
    GraphBreakReason,
    Metrics,
    Mode,
    RecompileReason,
    Tier,
)
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


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (r for r in caplog.records if r.name == "shapeserve.compile")
    return [r.getMessage() for r in ours if r.levelname == "ERROR"]


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


@settings(max_examples=10)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 70)), min_size=3, max_size=12))
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
        (event,) = monitor.collect(CompilePhase.REQUEST, "batch=2,seq=8")
    assert event.recompile_reason is not None
    assert "dtype" in event.recompile_reason
    assert count(monitor, "recompiles_total", reason="dtype") == 1
    assert count(monitor, "compiles_total", phase="request", stage="dynamo") == 1
    (error,) = errors(caplog)
    assert "of model m at batch=2,seq=8: many_" in error
    assert event.recompile_reason in error


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


def broken_program(
    module: torch.nn.Module, monitor: CompileMonitor, *inputs: torch.Tensor
) -> Programs:
    programs = Programs(module, tier=Tier.COMPILED, freeze=False, backend="eager", monitor=monitor)
    with torch.no_grad():
        programs.compile_many(lambda program: program(*inputs))
    return programs


def test_a_planted_graph_break_is_counted_with_its_reason_and_the_answer_stays(
    monitor: CompileMonitor,
) -> None:
    programs = broken_program(Branching(), monitor, ids(3, 8))
    run, _ = programs.for_sizes({"batch": 2, "seq": 4})
    with torch.no_grad():
        assert run(ids(2, 4))[0].eq(1).all()
    events = monitor.collect(CompilePhase.WARMUP)
    assert {event.eager for event in events} == {None}
    # Torch breaks the program at its call of the module, then the module's own frame.
    assert count(monitor, "graph_breaks_total") == 2
    assert count(monitor, "graph_breaks_total", reason="data_dependent") == 2
    # The attempt without breaks, which raised, is not a frame that runs eager.
    assert count(monitor, "eager_frames_total") == 0


class Looping(torch.nn.Module):
    """A break inside a loop, which torch cannot resume: the frame runs eager for good."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return (x,)


def test_a_planted_eager_fallback_is_counted_as_an_eager_frame_and_as_its_break(
    monitor: CompileMonitor,
) -> None:
    torch._dynamo.reset()
    broken_program(Looping(), monitor, ids(3, 8))
    events = monitor.collect(CompilePhase.WARMUP)
    assert [event.name for event in events if event.eager] == ["forward"]
    assert count(monitor, "eager_frames_total", reason="unsupported") == 1
    assert count(monitor, "eager_frames_total") == 1
    assert count(monitor, "graph_breaks_total", reason="explicit") == 2  # around it and in it


def test_an_eager_frame_after_the_seal_is_an_error_that_names_the_shape_class(
    monitor: CompileMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        torch._dynamo.reset()  # a frame that cannot be compiled is tried once in a process
        broken_program(Looping(), monitor, ids(3, 8))
        monitor.collect(CompilePhase.REQUEST, NO_BUCKET)
    (error,) = (error for error in errors(caplog) if "eager frame" in error)  # once for each cause
    assert "model m at fallback: forward" in error
    assert "graph_break()" in error


class Scaled(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + 1


class Stack(torch.nn.Module):
    """Layers of one class that differ in an attribute, with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Scaled(i) for i in range(1, 13)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return (x,)


def test_layers_that_share_their_code_are_told_apart_when_the_graph_breaks() -> None:
    # Twelve: also more than torch's recompile limit of 8 for one code object.
    run, _ = broken_program(Stack(), monitor_of("m"), ids(3, 8)).for_sizes({"batch": 2, "seq": 4})
    with torch.no_grad():
        assert run(ids(2, 4))[0].equal(Stack()(ids(2, 4))[0])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Data-dependent branching\n  Explanation: ...", GraphBreakReason.DATA_DEPENDENT),
        ("Dynamic shape operator", GraphBreakReason.DATA_DEPENDENT),
        ("Operator does not support running with fake tensors", GraphBreakReason.OPAQUE_OP),
        ("Dynamic shape operator (no meta kernel)", GraphBreakReason.OPAQUE_OP),
        ("Attempted to call function marked as skipped", GraphBreakReason.UNSUPPORTED_CALL),
        ("Failed to trace builtin operator\n ... `print` with", GraphBreakReason.SIDE_EFFECT),
        ("(reason: shapeserve eager island head)", GraphBreakReason.EAGER_ISLAND),
        ("something new", GraphBreakReason.OTHER),
    ],
    ids=lambda v: str(v)[:24],
)
def test_break_texts_map_to_a_closed_set(text: str, reason: GraphBreakReason) -> None:
    assert classify_break(text) is reason


def test_emptied_counters_of_torch_lose_no_later_break(monitor: CompileMonitor) -> None:
    broken_program(Branching(), monitor, ids(3, 8))
    monitor.collect(CompilePhase.WARMUP)
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    broken_program(Branching(), monitor, ids(3, 8))
    monitor.collect(CompilePhase.WARMUP)
    assert count(monitor, "graph_breaks_total", reason="data_dependent") == 4


def test_stages_that_did_not_run_are_not_counted(
    module: torch.nn.Module, monitor: CompileMonitor
) -> None:
    with torch.no_grad():
        compiled(module, "p", backend="eager", monitor=monitor)(ids(3, 8))
    monitor.collect(CompilePhase.WARMUP)
    assert count(monitor, "compiles_total", stage="dynamo") == 1
    assert count(monitor, "compiles_total", stage="aot_autograd") == 1  # one graph
    assert count(monitor, "compiles_total", stage="inductor") == 0
    assert count(monitor, "compile_cache_total") == 0


class Record:
    """What torch's record of one compile says of it."""

    def __init__(self, **fields: int) -> None:
        times = ["dynamo_cumulative", "aot_autograd_cumulative", "inductor_cumulative"]
        names = [f"{name}_compile_time_us" for name in times]
        names += ["compile_time_autotune_time_us"]
        names += [f"inductor_fx_local_cache_{result}_count" for result in ("hit", "miss")]
        self.__dict__.update(dict.fromkeys(names), **fields)


def test_the_time_of_a_stage_excludes_the_stages_inside_it() -> None:
    record = Record(
        dynamo_cumulative_compile_time_us=10_000_000,
        aot_autograd_cumulative_compile_time_us=7_000_000,
        inductor_cumulative_compile_time_us=5_000_000,
        compile_time_autotune_time_us=2_000_000,
    )
    assert _seconds(record) == {
        CompileStage.DYNAMO: 3.0,
        CompileStage.AOT: 2.0,
        CompileStage.INDUCTOR: 3.0,
        CompileStage.AUTOTUNE: 2.0,
    }


@pytest.mark.parametrize(
    ("fields", "results"),
    [
        ({"inductor_fx_local_cache_hit_count": 1}, {"hit": 1, "miss": 0}),
        ({"inductor_fx_local_cache_miss_count": 2}, {"hit": 0, "miss": 2}),
        ({"inductor_cumulative_compile_time_us": 5}, {"bypass": 1}),
        ({}, {}),
    ],
    ids=str,
)
def test_the_cache_is_hit_missed_or_bypassed(
    fields: dict[str, int], results: dict[str, int]
) -> None:
    assert {str(k): v for k, v in _cache_results(Record(**fields)).items()} == results


@pytest.mark.slow
def test_torchs_own_cache_is_seen_to_miss_and_hit_and_packed_weights_to_bypass_it(
    module: torch.nn.Module,
    monitor: CompileMonitor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for expected in ({"miss": 1}, {"miss": 1, "hit": 1}):
        with torch.no_grad():
            compiled(module, "p", backend="inductor", monitor=monitor)(ids(3, 8))
        monitor.collect(CompilePhase.WARMUP)
        for result in ("hit", "miss", "bypass"):
            assert count(monitor, "compile_cache_total", result=result) == expected.get(result, 0)
    with torch.no_grad(), freezing(True):
        compiled(module, "p", backend="inductor", monitor=monitor)(ids(3, 8))
    monitor.collect(CompilePhase.WARMUP)
    assert count(monitor, "compile_cache_total", result="bypass") == 1
    assert count(monitor, "compiles_total", stage="inductor") == 2  # not for the hit


def test_a_planted_overflow_of_the_recompile_limit_runs_eager_counted_and_logged_once(
    module: torch.nn.Module, monitor: CompileMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    programs = Programs(module, tier=Tier.COMPILED, freeze=False, backend="eager", monitor=monitor)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        programs.compile_many(lambda program: program(ids(3, 8)))
        monitor.collect(CompilePhase.WARMUP)
        run, _ = programs.for_sizes({"batch": 2, "seq": 4})
        planted = ids(2, 4).to(torch.int32)
        for calls in (1, 2):
            assert torch.allclose(run(planted)[0], module(planted)[0])
            assert monitor.collect(CompilePhase.REQUEST, "batch=2,seq=4") == ()
            assert count(monitor, "eager_frames_total", reason="recompile_limit") == calls
    assert count(monitor, "recompiles_total") == 0  # nothing was compiled
    (error,) = errors(caplog)
    assert "eager frame (recompile_limit)" in error
    assert "at batch=2,seq=4" in error
    assert "dtype mismatch" in error


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
