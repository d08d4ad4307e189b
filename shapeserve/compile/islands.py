"""Eager islands: sub-modules that stay outside the compiled graphs because the config says so."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shapeserve.compile.breaks import ISLAND_MARK
from shapeserve.errors import ConfigError

log = logging.getLogger("shapeserve.compile")

_OURS = Path(__file__).resolve().parent.parent
_TORCH = Path(torch.__file__).resolve().parent


def make_islands(root: nn.Module, paths: Sequence[str]) -> None:
    """Keep sub-modules out of every graph: Dynamo breaks before them and goes on behind them.

    Args:
        root: the model.
        paths: sub-modules, as ``root.get_submodule`` knows them.

    Raises:
        ConfigError: there is no such sub-module.
    """
    for path in paths:
        island = _submodule(root, path)
        why = f"{ISLAND_MARK} {path}"
        # Of the instance, so that others of its class stay compiled.
        island.forward = torch.compiler.disable(island.forward, reason=why)  # type: ignore[no-untyped-call]


def _submodule(root: nn.Module, path: str) -> nn.Module:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        first = ", ".join(name for name, _ in root.named_children()) or "none"
        raise ConfigError(
            f"compile.eager_islands: {path} is no sub-module of {type(root).__name__} ({error}); "
            f"its own are {first}"
        ) from error


@dataclass(frozen=True, slots=True)
class HostWait:
    """An operator that waits for the device, because Python wants a value or a size from it.

    Attributes:
        op: as torch names it.
        place: ``file:line`` of the user's code, or empty.
    """

    op: str
    place: str


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that runs inside it: which, how often, and which ones wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[torch._ops.OpOverload] = Counter()
        self.waits: dict[HostWait, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        if _waits(func, args):
            self.waits[HostWait(str(func), _place(traceback.extract_stack()))] = None
        return func(*args, **(kwargs or {}))


def _waits(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operator makes a value or a size on the host, which a capture cannot hold."""
    if op is torch.ops.aten.index.Tensor:  # waits for the size of a mask only
        indices = [i for i in args[1] if i is not None]
        return any(i.dtype in (torch.bool, torch.uint8) for i in indices)
    return torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags


def user_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither torch's nor ours; None if there is none."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        if not (path.is_relative_to(_TORCH) or path.is_relative_to(_OURS)) and path.exists():
            return frame
    return None


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    frame = user_frame(stack)
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def island_waits(
    root: nn.Module, paths: Sequence[str], run: Callable[[], object]
) -> tuple[HostWait, ...]:
    """Run the model once and return where an island waits for the device.

    Such an island cannot be part of a CUDA graph; the others can, because what they launch is
    captured between the graphs of their neighbours.
    """
    watch = OpWatch()
    with ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(_watched(_submodule(root, path), watch))
        run()
    return tuple(watch.waits)


@contextmanager
def _watched(module: nn.Module, watch: OpWatch) -> Iterator[None]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with watch:
            return inner(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        module.forward = inner
