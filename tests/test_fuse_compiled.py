"""Joined layers under torch.compile, in captured graphs, and in the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_modules import (
    TOLERANCE,
    Encoder,
    difference,
    hf,
    rows,
    runner,
    slots,
    weight_bytes,
)
from torch import Tensor
from torch._inductor.utils import fresh_cache

from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.program import compiled, freezing
from shapeserve.config import ServeConfig
from shapeserve.metrics import CompilePhase, Metrics
from shapeserve.models import load
from shapeserve.models.fuse import (
    fuse,
    fuse_verified,
    linear_gelu,
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A Dynamo backend that keeps what it was given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    def outputs(self) -> int:
        (graph,) = self.graphs
        (node,) = graph.graph.find_nodes(op="output")
        return len(node.args[0])


@pytest.mark.timeout(300)  # Inductor calls g++, which shares the cores with whatever else runs
class TestCompiled:
    SHAPES = ((3, 10), (2, 7), (5, 33), (4, 16), (9, 9))

    def test_one_graph_without_breaks_or_more_outputs(self) -> None:
        module = Encoder(hf("bert"))
        fuse(module, runner(module), gelu=linear_gelu)
        explained = torch._dynamo.explain(module)(*rows(3, 10))
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
        backend = Graphs()
        program = torch.compile(module, backend=backend, dynamic=True, fullgraph=True)
        with torch.no_grad():
            for shape in self.SHAPES:
                expected = runner(module, *shape)()[0]
                assert difference(program(*rows(*shape))[0], expected) <= TOLERANCE
                assert [slot.offer for slot in slots(module)] == [None] * len(slots(module))
        assert backend.outputs() == 1
        linears = [n for n in backend.graphs[0].graph.nodes if "linear" in str(n.target)]
        assert len(linears) == 2 * 4 + 1  # q, k and v as one, output, up, down; the pooler

    @pytest.mark.parametrize("kind", ["bert", "distilbert", "qwen3"])
    def test_one_compile_serves_every_shape(self, kind: str) -> None:
        module = Encoder(hf(kind))
        fuse(module, runner(module), gelu=linear_gelu)
        monitor = self.monitor()
        with torch.no_grad():
            program = compiled(module, "fused", backend="eager", monitor=monitor)
            for shape in self.SHAPES:
                expected = runner(module, *shape)()[0]
                assert difference(program(*rows(*shape))[0], expected) <= TOLERANCE
        assert len(monitor.collect(CompilePhase.WARMUP)) == 1

    @pytest.mark.parametrize(
        "freeze",
        [
            # Both generate code for half a minute; packed weights are what a CPU serves.
            pytest.param(False, id="plain", marks=pytest.mark.slow),
            pytest.param(True, id="frozen", marks=pytest.mark.slow),
        ],
    )
    def test_inductor(self, freeze: bool) -> None:
        module = Encoder(hf("bert", layers=1))
        expected = {shape: runner(module, *shape)()[0] for shape in self.SHAPES}
        fuse(module, runner(module), gelu=linear_gelu)
        monitor = self.monitor()
        with torch.no_grad(), fresh_cache(), freezing(freeze):
            program = compiled(module, "fused", backend="inductor", monitor=monitor)
            for shape, answer in expected.items():
                assert difference(program(*rows(*shape))[0], answer) <= TOLERANCE
        assert len(monitor.collect(CompilePhase.WARMUP)) == 1

    def test_a_custom_op_is_called_by_the_program(self) -> None:
        calls: list[torch.Size] = []

        @torch.library.custom_op("shapeserve_test::linear_gelu", mutates_args=())
        def op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            calls.append(x.shape)
            return linear_gelu(x, weight, bias)

        @op.register_fake
        def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return x.new_empty((*x.shape[:-1], weight.shape[0]))

        module = Encoder(hf("bert"))
        named = torch.ops.shapeserve_test.linear_gelu
        assert fuse_verified(module, runner(module), TOLERANCE, gelu=named).active
        monitor = self.monitor()
        with torch.no_grad():
            program = compiled(module, "fused", backend="eager", monitor=monitor)
            calls.clear()
            for shape in self.SHAPES[1:]:
                program(*rows(*shape))
        assert calls[-2:] == [torch.Size([9, 9, 32])] * 2
        assert len(monitor.collect(CompilePhase.WARMUP)) == 1

    def monitor(self) -> CompileMonitor:
        metrics = Metrics()
        metrics.preset("m", ["batch=2,seq=8"], ("batch", "seq"))
        monitor = CompileMonitor(metrics, "m")
        monitor.collect(CompilePhase.WARMUP)
        return monitor


@pytest.mark.gpu
class TestCapture:
    def test_a_captured_fused_model_answers_as_the_original(self) -> None:
        module = Encoder(hf("bert")).to("cuda")
        inputs = [tuple(t.cuda() for t in rows(4, seq)) for seq in (16, 16)]
        inputs[1][0].copy_(inputs[1][0].flip(0))
        with torch.no_grad():
            expected = [module(*pair)[0] for pair in inputs]
            report = fuse_verified(module, lambda: module(*inputs[0]), 1e-4, gelu=linear_gelu)
            assert report.active
            static = tuple(t.clone() for t in inputs[0])
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                module(*static)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                (output,) = module(*static)
            for pair, answer in zip(inputs, expected, strict=True):
                for buffer, values in zip(static, pair, strict=True):
                    buffer.copy_(values)
                graph.replay()
                assert difference(output, answer) <= 1e-4
        assert [slot.offer for slot in slots(module)] == [None] * len(slots(module))


def test_the_real_model(minilm_dir: Path) -> None:
    config = ServeConfig.from_dict({"models": [{"path": str(minilm_dir)}]}).models[0]
    module = load(config, "cpu").module
    ids = torch.randint(1000, 20000, (2, 24))
    before = weight_bytes(module)
    report = fuse_verified(
        module, lambda: module(ids, torch.ones_like(ids)), TOLERANCE, gelu=linear_gelu
    )
    assert (len(report.projections), len(report.gelus), report.skipped) == (6, 6, ())
    assert report.active
    assert weight_bytes(module) == before
