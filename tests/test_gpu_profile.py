"""``profile`` on a real GPU (`make test-gpu`): graphs, their memory, packed rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.evaluate.timing import Timing
from shapeserve.profile.session import Options, profile
from shapeserve.tuning import CostTable, Limits
from shapeserve.tuning.limits import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

QUICK = Timing(least=5, most=20, budget_s=0.05)
LAYOUTS = {
    "padded": {"seq": {"explicit": [16, 32, 64]}, "batch": {"explicit": [2, 8, 16]}},
    "packed": {"tokens": {"explicit": [64, 256, 512, 1024]}},
}


def model(directory: Path, layout: str) -> ModelConfig:
    data = {
        "path": str(tiny.write_model(directory / "tiny", max_length=64, positions=64)),
        "layout": layout,
        "dtype": "bfloat16",
        "policy": LAYOUTS[layout],
        "limits": {"max_length": 64, "hard_limit": 64},
    }
    return ServeConfig.from_dict({"models": [data]}).models[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_are_measured_with_what_their_captures_took(tmp_path: Path, layout: str) -> None:
    options = Options(points=8, specialized=1, timing=QUICK)
    table = profile(model(tmp_path, layout), options, lambda *_: None)
    expected = {"tier": "graph", "device_kind": "cuda", "layout": layout, "dtype": "bfloat16"}
    assert expected.items() <= table.conditions.items()
    assert table.conditions["device"] == torch.cuda.get_device_name()
    assert table.held_out is not None
    # A replay is timed on the device: it takes microseconds, not what the host needs around it.
    assert all(0 < point.seconds < 0.05 for point in table.points)
    assert all(point.peak_bytes for point in table.points)
    costs = table.variants
    assert costs is not None
    buckets = 9 if layout == "padded" else 4
    assert len(costs.captured) == len(costs.points) == buckets
    assert all(point.capture_s for point in costs.points)
    assert (costs.captured[0].graph_bytes or 0) > 0  # the largest, captured first
    whole = sum(point.graph_bytes or 0 for point in costs.captured)
    grid = [dict(point.sizes) for point in costs.points]
    assert costs.graph_bytes(grid) == pytest.approx(whole)
    (special,) = costs.specialized
    assert special.compile_s > special.specialized_s > 0
    path = tmp_path / "costs.json"
    table.write(path)
    assert CostTable.read(path) == table


def test_a_limit_on_graph_memory_is_judged_by_what_was_measured(tmp_path: Path) -> None:
    table = profile(model(tmp_path, "padded"), Options(points=4, timing=QUICK), lambda *_: None)
    Limits(graph_bytes=MIB).check(table.variants)
    with pytest.raises(ConfigError, match="--max-graph-mb needs"):
        Limits(graph_bytes=MIB).check(None)
