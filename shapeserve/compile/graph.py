"""CUDA graph capture of one bucket.

All graphs of a grid share one memory pool, are captured largest first by the one device thread on
one long-lived stream, and are freed together. A replay writes into the graph's own output tensors,
which the next replay of any graph of the pool may overwrite; the layout copies rows out before
that.

No two grids that live at the same time share a stream, be they of one model or of several. Torch
keeps a cuBLAS workspace for each stream, whose address is in the graphs captured there, and since
2.12 it frees the workspace with the first of these graphs (pytorch#193402): freeing the old grid of
one model would break the graphs of another.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar
from weakref import WeakSet

import torch

from shapeserve.layout import Forward

# Calls before a capture: compile, autotune, library handles and lazy module loads happen here and
# must not happen inside (PyTorch's CUDA graph notes use 3).
_WARM_CALLS = 3
# Torch has so many streams on a device and hands them out in turn (c10/cuda/CUDAStream.cpp).
_STREAMS = 32


class GraphPool:
    """The memory pool and the stream shared by all captures of a grid."""

    # Of the process, because torch's streams are.
    _living: ClassVar[WeakSet[GraphPool]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._left: list[tuple[int, int]] = []  # pools before a capture that failed
        self._device = device
        self._stream = self._own_stream()
        self._living.add(self)

    def _own_stream(self) -> torch.cuda.Stream:
        taken = {pool._stream for pool in self._living}
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if stream not in taken:
                return stream
        raise RuntimeError(
            f"{len(taken)} grids hold graphs on {self._device}, and torch has {_STREAMS} streams; "
            "serve fewer models in one process"
        )

    @property
    def bytes(self) -> int:
        """Device memory of the segments that belong to the pools."""
        segments = (
            segment
            for pool in (*self._left, self._pool)
            for segment in torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
        )
        return sum(int(segment["total_size"]) for segment in segments)

    def capture(self, program: Forward, inputs: tuple[torch.Tensor, ...]) -> Forward:
        """Capture ``program`` on these static input tensors.

        Args:
            program: a warm program; it must not compile, allocate on the host or synchronise.
            inputs: views of the layout's static buffers; the replay reads their addresses.

        Returns:
            A callable with the program's signature that replays the graph and ignores its
            arguments, because the layout has written them in place.

        Raises:
            RuntimeError: what torch raises when the program cannot be captured.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_CALLS):
                program(*inputs)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                outputs = program(*inputs)
        except BaseException:
            torch.cuda.set_stream(before)  # where the end of a capture raises, torch does not
            self._start_afresh()
            raise

        def replay(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            graph.replay()
            return outputs

        return replay

    def _start_afresh(self) -> None:
        """Let the next bucket be captured after one that could not be.

        A capture that CUDA calls invalid ends before torch takes its allocator back from the pool
        (CUDAGraph::capture_end, torch 2.11), and every later capture into that pool would be
        refused for it. Graphs that are there keep their memory.
        """
        index = self._device.index or 0
        with contextlib.suppress(RuntimeError):  # torch did take it back
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)  # what the graph does not do any more
        self._left.append(self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = self._own_stream()
