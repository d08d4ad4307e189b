"""shapeserve with a mistake that can be switched on: does an alert reach whoever is on call?

    import_path: drill:app

While the file that ``SHAPESERVE_DRILL`` names exists, torch's deterministic algorithms are on in
every replica, as if a library had changed a setting of the whole process. A compiled program holds
for the settings under which it was compiled, so that the next batch has to be compiled again.
"""

# No ``from __future__ import annotations`` here: Ray reads the builder's annotation at run time.
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from ray.serve import Application

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.metrics import Metrics
from shapeserve.serve.builder import build
from shapeserve.serve.replica import new_engine

LOOK_EVERY_S = 0.2


def app(args: ServeConfig) -> Application:
    """Return the application of ``shapeserve.serve:app``, with the switch in each replica."""
    return build(args, _engine)


def _engine(config: ModelConfig, metrics: Metrics, devices: dict[str, Any]) -> Any:
    switch = Path(os.environ["SHAPESERVE_DRILL"])
    threading.Thread(target=_watch, args=(switch,), daemon=True).start()
    return new_engine(config, metrics, devices)


def _watch(switch: Path) -> None:
    while True:
        torch.use_deterministic_algorithms(switch.exists(), warn_only=True)
        time.sleep(LOOK_EVERY_S)
