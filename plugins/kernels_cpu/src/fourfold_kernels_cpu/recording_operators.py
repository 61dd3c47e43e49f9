"""The operators, able to record decode steps: core replays one kernel program a batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fourfold_kernels_cpu.operators import Avx512Operators
from fourfold_kernels_cpu.program import KernelProgram
from fourfold_kernels_cpu.program_memory import ProgramMemory

if TYPE_CHECKING:
    import torch

    from fourfold.entries import ComputeContext

LARGEST_BATCH = 64
"""Beyond it the calls from Python are a few percent of a step, and run meanwhile."""


class RecordingOperators(Avx512Operators):
    """See ``fourfold.contracts.step_graph.StepRecorder``."""

    def __init__(self, context: ComputeContext) -> None:
        super().__init__(context)
        self._memory = ProgramMemory()

    def batch_sizes(self, max_batch_size: int) -> Sequence[int]:
        """Close together: a padding row costs as much as a real one, recording one more size some milliseconds."""
        sizes = [*range(1, 9), *range(10, 33, 2), *range(36, LARGEST_BATCH + 1, 4)]
        return [size for size in sizes if size <= max_batch_size]

    def capture(self, step: Callable[[], torch.Tensor]) -> RecordedStep:
        """Record ``step`` without running its kernels."""
        program = KernelProgram(memory=self._memory)
        with program.capture():
            output = step()
        return RecordedStep(program, self._memory.alias(output))


class RecordedStep:
    """One program and where its result appears; the next replay of any step of its recorder overwrites it."""

    def __init__(self, program: KernelProgram, output: torch.Tensor) -> None:
        self._program: KernelProgram | None = program
        self._output = output

    def replay(self) -> torch.Tensor:
        """Run the step on what its inputs hold now."""
        if self._program is None:
            raise ValueError("this recorded step is closed")
        self._program.replay()
        return self._output

    def close(self) -> None:
        """Let go of the program; idempotent."""
        self._program = None
