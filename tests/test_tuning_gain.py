"""The benchmark of the tuner, on the first rows of two traces."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import tuner_gain


def test_every_policy_is_judged_on_the_same_rows(tmp_path: Path) -> None:
    traces, results = tmp_path / "traces", tmp_path / "results"
    traces.mkdir()
    results.mkdir()
    for name in ("enc_rag_mix", "taco_phone_photos"):
        shutil.copy(tuner_gain.TRACES_DIR / f"{name}.csv.gz", traces)
    arguments = ["--traces-dir", traces, "--results-dir", results, "--rows", "200", "--out", "q"]
    assert tuner_gain.main([str(argument) for argument in arguments]) == 0
    result = json.loads((results / "q.json").read_text())
    texts, images = result["traces"]["enc_rag_mix"], result["traces"]["taco_phone_photos"]
    assert list(texts["policies"]) == list(tuner_gain.POLICIES)
    assert texts["rows"] == 100
    for shapes in tuner_gain.SHAPES:
        assert texts["policies"][tuner_gain.OURS[shapes]]["row_shapes"] <= shapes
    pow2 = texts["policies"]["powers of two"]
    assert pow2["offered_load"] == pytest.approx(tuner_gain.BUSY, rel=0.05)
    # What the simulator executes is what the sizes say, apart from filler rows.
    padded = pow2["simulated_waste"]
    assert padded["padding_seq"] / (1 - padded["padding_batch"]) == pytest.approx(pow2["waste"])
    assert "4096 buckets" in images["policies"]["multiples of 64"]["not_simulated"]
    table = (results / "q.md").read_text()
    assert all(policy in table for policy in tuner_gain.POLICIES)
