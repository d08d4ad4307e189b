"""From the guard that failed to a class of reason and a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from shapeserve.compile.monitor import classify_recompile
from shapeserve.explain.report import Recompile
from shapeserve.metrics import RecompileReason

SIZE_REMEDY = (
    "work on the axis with tensor operators (torch.arange(x.shape[1]) instead of range or a list), "
    "and keep no table by size; or compile.eager_islands for the sub-module"
)
_ATTRIBUTE_REMEDY = (
    "compute it from the inputs, not from what earlier calls left in the module; or "
    "compile.eager_islands for the sub-module. Torch gives up after 8 compiles of one function"
)
_TORCHS_REMEDY = "none needed: torch's own choice, compiled while warming up"
# "0/0: the guard    # its line of code  # file.py:12 in function (HINT: ...)"
_COMMENT = re.compile(r"# ([^\s#]+\.py):\d+ in ")
_TORCH = Path(torch.__file__).parent


def read_recompiles(texts: Iterable[str]) -> tuple[Recompile, ...]:
    """Return one for each guard text; the same text again says nothing new."""
    return tuple(_read(text) for text in dict.fromkeys(texts))


def _read(text: str) -> Recompile:
    reason = classify_recompile(text)
    # Torch leaves its own directory out of the names of its files.
    files = [match[1] for match in _COMMENT.finditer(text)]
    torchs = bool(files) and all((_TORCH / file).is_file() for file in files)
    what = re.sub(r"\s+", " ", text.splitlines()[0]).strip()
    return Recompile(reason, what, torchs, _remedy(reason, torchs=torchs))


def _remedy(reason: RecompileReason, *, torchs: bool) -> str:
    if torchs:
        return _TORCHS_REMEDY
    return SIZE_REMEDY if reason is RecompileReason.SHAPE else _ATTRIBUTE_REMEDY
