"""The examples of images and audio run, and answer as the eager model does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"
sys.path.insert(0, str(EXAMPLES))  # as PYTHONPATH does for `shapeserve serve`

import run  # noqa: E402

SMALL = {
    "image_encoder": (
        {"max_length": 96, "hard_limit": 160},
        "t_s,height,width\n0,64,96\n1,96,64\n2,40,90\n3,16,17\n4,96,96\n5,97,130\n",
    ),
    "audio_encoder": (
        {"max_length": 96, "hard_limit": 160},
        "t_s,len\n0,96\n1,17\n2,40\n3,1\n4,90\n5,130\n",
    ),
}


def small(directory: Path, name: str, tier: str, backend: str = "eager") -> tuple[Path, Path]:
    """The example with short rows and a quick start, and a trace for it."""
    data = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    limits, rows = SMALL[name]
    (model,) = data["models"]
    model["limits"] |= {**limits, "max_batch_tokens": 2 * 96**2}
    model |= {"compile": {"tier": tier, "backend": backend}, "threads": 1}
    model["policy"]["batch"] = {"explicit": [1, 2]}
    config, trace = directory / f"{name}.yaml", directory / "trace.csv"
    config.write_text(yaml.safe_dump(data, sort_keys=False))
    trace.write_text(rows)
    return config, trace


@pytest.mark.parametrize(
    ("name", "tier"), [("image_encoder", "eager"), ("audio_encoder", "compiled")]
)
def test_i4_an_example_runs_and_gives_the_unpadded_eager_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, tier: str
) -> None:
    config, trace = small(tmp_path, name, tier)
    assert run.main([str(config), str(trace)]) == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rows", "6"] in cells
    assert ["recompiles", "on", "requests", "0"] in cells
    assert any(line[:2] == ["none", "fallback"] for line in cells)  # the row beyond the grid
    axes = {"image_encoder": ["height", "width"], "audio_encoder": ["frames"]}[name]
    assert all(any(line[:1] == [f"padding_{axis}"] for line in cells) for axis in axes)


def test_wrong_input_ends_with_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = small(tmp_path, "audio_encoder", "eager")
    assert run.main([str(config), str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err
