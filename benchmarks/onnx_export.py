"""Export the model, pooling included, to ONNX with dynamic batch and sequence axes."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.encoder import SentenceModel
from benchmarks.environment import model_dir

INPUTS = ["input_ids", "attention_mask"]


def export(target: Path) -> Path:
    """Write the model to ``target`` and return it."""
    example = torch.ones(2, 16, dtype=torch.int64)
    torch.onnx.export(
        # Plain attention: the masking of sdpa exports to Where and IsNaN nodes that cost
        # onnxruntime a fifth of its speed.
        SentenceModel(model_dir(), attention="eager").eval(),
        (example, example),
        str(target),
        input_names=INPUTS,
        output_names=["sentence_embedding"],
        dynamic_axes={name: {0: "batch", 1: "seq"} for name in INPUTS},
        dynamo=False,  # the traced export needs no package besides onnx
    )
    return target
