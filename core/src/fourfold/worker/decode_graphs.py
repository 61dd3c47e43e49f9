"""Recorded decode steps, one a batch size, where the operators can record; replayed on the input buffers.

Knows no request: batch sizes and buffers only.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fourfold.contracts.step_graph import StepGraph, StepRecorder
from fourfold.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.operators import Operators
    from fourfold.distributed.group_coordinator import GroupCoordinator
    from fourfold.worker.step_inputs import StepInputs

log = logging.getLogger(__name__)


class _Recorded(NamedTuple):
    graph: StepGraph
    others: tuple[torch.Tensor, ...]
    """Results besides the graph's own; they keep their memory, so each replay writes them anew."""


class DecodeGraphs:
    """Records all at once, or each at the first use of its size; empty where the operators cannot record this model.

    The ranks of ``group``, which share the layers, record the same sizes: all of them, or none records.
    """

    def __init__(
        self, operators: Operators, *, max_batch_size: int, group: GroupCoordinator, enabled: bool = True
    ) -> None:
        self._group = group
        self._recorder = operators if enabled and isinstance(operators, StepRecorder) else None
        self._sizes = sorted(self._recorder.batch_sizes(max_batch_size)) if self._recorder is not None else []
        self._recorded: dict[int, _Recorded] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that are or will be recorded, ascending."""
        return tuple(self._sizes)

    def size_for(self, num_requests: int) -> int | None:
        """The batch size to pad ``num_requests`` to; None: run it plainly."""
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else None

    def record_all(
        self, inputs: Callable[[int], StepInputs], step: Callable[[StepInputs], tuple[torch.Tensor, ...]]
    ) -> None:
        """Record every size now, the largest first, whose memory the others can use; see ``run``."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            recorded = self._capture(inputs(size), step)
            if recorded is None:
                return
            self._recorded[size] = recorded
        if self._recorded:
            log.info("%d sizes of decode steps recorded in %.1f s", len(self._sizes), time.perf_counter() - started)

    def run(
        self, size: int, inputs: Callable[[], StepInputs], step: Callable[[StepInputs], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """What ``step`` computes from the padded batch in the buffers; overwritten by the next run of this size.

        ``inputs`` gives the buffers' views of ``size`` requests.
        """
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._capture(inputs(), step)
            if recorded is None:
                return step(inputs())
            self._recorded[size] = recorded
        return (recorded.graph.replay(), *recorded.others)

    def close(self) -> None:
        """Release all recorded steps; idempotent."""
        while self._recorded:
            self._recorded.popitem()[1].graph.close()

    def _capture(self, inputs: StepInputs, step: Callable[[StepInputs], tuple[torch.Tensor, ...]]) -> _Recorded | None:
        if self._recorder is None:
            return None
        graph, problem = None, "another rank cannot record them"
        others: tuple[torch.Tensor, ...] = ()

        def run() -> torch.Tensor:
            nonlocal others
            first, *rest = step(inputs)
            others = tuple(rest)
            return first

        try:
            with self._group.capture():
                graph = self._recorder.capture(run)
        except Unsupported as error:
            problem = str(error)
        # One rank that pads its batches and one that does not would exchange other shapes.
        if self._group.all_agree(graph is not None):
            return None if graph is None else _Recorded(graph, others)
        log.info("decode steps run one operation at a time: %s", problem)
        if graph is not None:
            graph.close()
        self.close()
        self._sizes.clear()
        return None
