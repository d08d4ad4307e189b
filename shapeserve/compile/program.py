"""One callable of the model: eager, or compiled once for a family of shapes."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from shapeserve.compile.decompose import Table, decomposing
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.layout import Forward
from shapeserve.metrics import EagerFrameReason

_SERIAL = itertools.count()
# Two programs of a model with up to 32 layers of one class; below torch's bound of 256 in all.
_LIMIT_WITH_BREAKS = 64


def compiler_backend(name: str, decompositions: Table | None = None) -> Callable[..., Any]:
    """Return torch's compiler function for ``inductor`` or ``eager`` (trace and guard only).

    Only Inductor decomposes.
    """
    if name == "eager":
        return lambda gm, example_inputs: gm.forward
    from torch._inductor.compile_fx import compile_fx

    return decomposing(compile_fx, decompositions) if decompositions else compile_fx


class Program:
    """A compiled program with a code object of its own; called with the tensors in spec order."""

    def __init__(self, run: Forward, code: types.CodeType, monitor: CompileMonitor) -> None:
        self._run = run
        self._code = code
        self._monitor = monitor

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run, and compile where no earlier compile holds for these inputs."""
        self._monitor.running()
        return self._run(*inputs)

    def run_only(self, eager: Forward, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run what is compiled; where nothing holds for these inputs, run ``eager``, counted.

        Torch has no public switch for one program (``set_stance`` is one for the whole process).
        """
        set_code_exec_strategy(self._code, _RUN_ONLY)
        try:
            return self._run(*inputs)
        except torch.AcceleratorError:
            raise
        except RuntimeError:  # torch has no type for "nothing compiled"; other errors come again
            outputs = eager(*inputs)
            self._monitor.count_eager_frame(EagerFrameReason.NOT_COMPILED)
            return outputs
        finally:
            set_code_exec_strategy(self._code, _DEFAULT)


_RUN_ONLY = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.RUN_ONLY)
_DEFAULT = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)


def compiled(
    module: torch.nn.Module,
    name: str,
    *,
    backend: str,
    monitor: CompileMonitor,
    fullgraph: bool = True,
    decompositions: Table | None = None,
    dynamic: bool = True,
) -> Program:
    """Wrap ``module`` as a program with a code object of its own: of any shape if ``dynamic``.

    The code object is copied because Dynamo keeps its cache entries, and counts its
    ``recompile_limit`` of 8, on it: programs that shared one would push each other into eager
    without a word. ``fullgraph`` turns graph breaks into errors; without it they are allowed, and
    ``fail_on_recompile_limit_hit`` keeps the inner frames from going eager silently.

    Guards on the module's weights and attributes are dropped where torch allows it: a serving
    module is frozen, and checking a few hundred of them costs 0.3-0.6 ms a call on the CPU. Those
    on shapes, dtypes and the global state (grad mode, threads) stay. With graph breaks all of them
    stay: layers of one class then share a compiled frame, and only the guards tell them apart; for
    the same reason such a frame may be compiled once for each layer.

    The compiles are those of the model that ``monitor`` counts for.
    """

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = module(*inputs)
        return outputs

    if not fullgraph:
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        limit = max(torch._dynamo.config.recompile_limit, _LIMIT_WITH_BREAKS)
        torch._dynamo.config.recompile_limit = limit
    own = with_own_code(forward, f"{name}_{next(_SERIAL)}")
    keep = served_guards() if fullgraph else None
    run: Forward = torch.compile(
        own,
        backend=monitor.counting(
            compiler_backend(backend, decompositions), f"shapeserve_{backend}"
        ),
        dynamic=dynamic,
        fullgraph=fullgraph,
        options={"guard_filter_fn": keep} if keep else None,
    )
    return Program(run, own.__code__, monitor)


def served_guards() -> Callable[[Sequence[Any]], Sequence[bool]] | None:
    """Return what chooses the guards that a program of one graph keeps; None keeps all."""
    return getattr(torch.compiler, "keep_portable_guards_unsafe", None)


def with_own_code(fn: Callable[..., Any], name: str) -> types.FunctionType:
    """Copy ``fn`` with a fresh code object called ``name`` (it names every torch record)."""
    code = fn.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


@contextlib.contextmanager
def freezing(enabled: bool) -> Iterator[None]:
    """Compile with the weights as packed constants.

    Both Dynamo (parameters as attributes) and Inductor (constant folding, packed linear layers)
    read this option from the global configuration; given through ``options=`` it packs nothing.
    """
    import torch._inductor.config as inductor_config

    options: dict[str, bool] = {"freezing": enabled}
    if hasattr(inductor_config.cpp, "enable_concat_linear"):
        # Projections of one input (q, k, v) as one wide product: 14-35 % less time for MiniLM in
        # fp32 on two Xeon cores, from 2x8 to 2x256 tokens (torch 2.13).
        options["cpp.enable_concat_linear"] = enabled
    with inductor_config.patch(options):
        yield
