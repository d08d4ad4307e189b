"""``evaluate`` on a real GPU (`make test-gpu`): captures, kernels and copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from shapeserve.config import ServeConfig
from shapeserve.evaluate.account import account
from shapeserve.evaluate.result import Arm, Scope
from shapeserve.evaluate.session import Options, evaluate
from shapeserve.evaluate.timing import Timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize(
    ("layout", "policy", "grid"),
    [
        ("padded", {"seq": {"explicit": [16, 64]}, "batch": {"explicit": [2, 8]}}, "2x16,8x64"),
        ("packed", {"tokens": {"explicit": [128, 512]}}, "128,512"),
    ],
)
def test_captured_and_specialised_buckets_are_measured_with_their_kernels(
    tmp_path: Path, layout: str, policy: dict[str, object], grid: str
) -> None:
    model = {
        "path": str(tiny.write_model(tmp_path / "tiny", max_length=64, positions=64)),
        "layout": layout,
        "dtype": "bfloat16",
        "policy": policy,
        "limits": {"max_length": 64, "hard_limit": 64},
    }
    config = ServeConfig.from_dict({"models": [model]}).models[0]
    found = evaluate(config, Options(grid, timing=Timing(5, 20, 0.1)), lambda *_: None)
    assert found.errors == ()
    assert found.start.graph_bytes > 0
    for bucket in found.buckets:
        ways = {row.arm for row in found.rows if row.bucket == bucket and row.scope is Scope.MODULE}
        assert ways == {Arm.EAGER, Arm.COMPILED, Arm.CAPTURED, Arm.SPECIALIZED}
        eager = found.row(bucket, Arm.EAGER, Scope.MODULE)
        captured = found.row(bucket, Arm.CAPTURED, Scope.MODULE)
        assert eager is not None
        assert eager.kernels is not None
        assert captured is not None
        assert captured.kernels is not None
        assert captured.latency is not None
        assert captured.kernels.platform == "cuda"
        assert captured.kernels.launches == 1  # the replay of one graph
        assert captured.kernels.kernels < eager.kernels.kernels
        assert captured.kernels.generated
        program = next(iter(found.start.programs.values()))
        assert captured.latency.first.seconds > program.seconds
        request = found.row(bucket, Arm.CAPTURED, Scope.REQUEST)
        assert request is not None
        assert request.recompiles == 0
    assert account(found).serving is Arm.CAPTURED
