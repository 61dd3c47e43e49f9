"""The operators, able to record decode steps as CUDA graphs that share one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fourfold.errors import Unsupported
from fourfold_kernels_triton.operators import TritonOperators

if TYPE_CHECKING:
    from fourfold.entries import ComputeContext

LARGEST_BATCH = 512
"""Beyond it a step takes longer on the device than its launches on the host."""


class GraphOperators(TritonOperators):
    """See ``fourfold.contracts.step_graph.StepRecorder``."""

    def __init__(self, context: ComputeContext) -> None:
        super().__init__(context)
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        """Close together where a step is short; the largest batch itself is always one."""
        if self._device.type != "cuda":
            return []
        largest = min(max_batch_size, LARGEST_BATCH)
        sizes = {
            1,
            2,
            4,
            8,
            16,
            24,
            *range(32, 129, 16),
            *range(160, 257, 32),
            *range(320, LARGEST_BATCH + 1, 64),
            largest,
        }
        return sorted(size for size in sizes if size <= largest)

    def capture(self, step: Callable[[], torch.Tensor]) -> RecordedStep:
        """Record ``step`` after running it once, which compiles its kernels and lets libraries allocate.

        Running out of memory is not Unsupported: it is raised as it is.
        The result lies in memory that all recorded steps share: the next replay of any of them overwrites it.
        """
        if self._device.type != "cuda":
            raise Unsupported(f"steps are recorded on a cuda device, not on {self._device}")
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Not torch.cuda.graph: it collects garbage and empties caches, a tenth of a second for each graph.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = step()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            self._pool = torch.cuda.graph_pool_handle()
            raise
        except RuntimeError as error:
            # The allocator takes a pool whose recording failed for one that still records.
            self._pool = torch.cuda.graph_pool_handle()
            raise Unsupported(f"the step cannot be recorded as a cuda graph: {error}") from error
        return RecordedStep(graph, _alias(output))


class RecordedStep:
    """One graph and where its result appears."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._output = output

    def replay(self) -> torch.Tensor:
        """Start the step on the current stream, on what its inputs hold then."""
        if self._graph is None:
            raise ValueError("this recorded step is closed")
        self._graph.replay()
        return self._output

    def close(self) -> None:
        """Let go of the graph; idempotent."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class _Memory:
    """Where a tensor lies, in the protocol by which libraries hand each other device memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int64: "<i8", torch.int32: "<i4"}[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a claim to it, so that graphs recorded later may use it between their own replays.

    A dtype that the protocol cannot name keeps its claim.
    """
    if tensor.dtype not in (torch.float32, torch.int64, torch.int32) or not tensor.is_contiguous():
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device)
