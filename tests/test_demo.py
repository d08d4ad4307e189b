import io
import re

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from shapeserve import demo
from shapeserve.metrics import parse_samples

EXPOSITION = """
shapeserve_rows_total{model="m",mode="compiled",bucket="batch=1,seq=8",replica="a"} 2
shapeserve_rows_total{model="m",mode="compiled",bucket="batch=1,seq=8",replica="b"} 3
shapeserve_rows_total{model="m",mode="compiled",bucket="batch=2,seq=8",replica="a"} 0
shapeserve_rows_total{model="m",mode="fallback",bucket="none",replica="a"} 1
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="real"} 50
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="padding_batch"} 20
shapeserve_tokens_total{model="m",bucket="batch=1,seq=8",kind="padding_seq"} 10
shapeserve_tokens_total{model="m",bucket="none",kind="padding_seq"} 20
shapeserve_fallbacks_total{model="m",reason="over_max"} 1
shapeserve_compiles_total{model="m",stage="dynamo",phase="warmup"} 2
shapeserve_compiles_total{model="m",stage="inductor",phase="warmup"} 2
shapeserve_recompiles_total{model="m",reason="shape"} 0
"""


def lines_of(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_metrics_are_added_up_over_replicas_and_empty_buckets_left_out() -> None:
    rows, costs = demo.metric_tables(parse_samples(EXPOSITION))
    text = lines_of(rows)
    assert "compiled batch=1,seq=8 5" in text
    assert "fallback none 1" in text
    assert not any("batch=2" in line for line in text)
    text = lines_of(costs)
    for line in (
        "padding waste, batch 20.0%",
        "padding waste, seq 30.0%",
        "fallbacks, over_max 1",
        "compiles, warmup 2",
        "recompiles 0",
    ):
        assert line in text


def test_similarities_are_the_cosines_of_the_texts() -> None:
    vectors = np.eye(len(demo.TEXTS), dtype=np.float32)
    vectors[1] = vectors[0]
    text = lines_of(demo.similarities(vectors))
    assert any(line.startswith("1 query: Paris 1.00 1.00 0.00") for line in text)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules, at their import
def test_the_demo_ends_with_0_and_has_used_bucket_and_fallback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.main() == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "recompiles 0" in lines
    assert any(line.startswith("speech: Gettysburg 331 fallback none over_max") for line in lines)
    # Whether one row has a program of its own is measured at start, hence batch 1 or 2.
    assert any(re.match(r"query: Paris 5 compiled batch=[12],seq=8", line) for line in lines)
    assert lines[-1] == "stopped"
