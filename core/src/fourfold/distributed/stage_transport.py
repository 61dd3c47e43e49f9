"""Moves activations from stage to stage, and sampled ids from the last one back to the first.

Knows tensors and step numbers; decides nothing of what runs, and knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fourfold.distributed.stage_link import InLink, Layout, OutLink, describe
from fourfold.errors import EngineError

if TYPE_CHECKING:
    from fourfold.distributed.model_parallel import ModelParallel


class StageTransport:
    """One rank's ends. T tokens of a step, H hidden size, R sampled rows.

    Activations and ids have links of their own, so that neither waits for the other. Sending only waits for a stage
    that has left ``depth`` messages; receiving has the deadline of the communicator, and names whom it waits for.
    """

    def __init__(
        self,
        parallel: ModelParallel,
        device: torch.device,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
        depth: int,
        layout: Layout = Layout.REPLICATED,
    ) -> None:
        """Connect to the neighbours: all ranks must call this. ``depth`` is how many steps are in the air at most.

        ``hidden_size`` is that of the tensors that this rank sends and receives, ``layout`` what the others hold.
        """
        group, self._tp = parallel.pp, parallel.tp
        self.waited_seconds = 0.0
        """Spent on the links so far: on messages to come, and on stages that were behind."""
        self._layout = layout
        self._parts = parallel.tp.world_size if layout is Layout.REPLICATED else 1
        self._arrived = torch.zeros(2, max_tokens, hidden_size, dtype=dtype, device=device)
        nbytes, ids_nbytes = self._arrived.nbytes, max_tokens * torch.int64.itemsize
        self._input: InLink | None = None
        self._output: OutLink | None = None
        self._sampled_in: InLink | None = None
        self._sampled_out: OutLink | None = None
        if not group.is_first:
            self._input = InLink(group, group.rank - 1, nbytes=nbytes, depth=depth, what="activations")
        if not group.is_last:
            self._output = OutLink(group, group.rank + 1, nbytes=nbytes, depth=depth)
        if group.is_first:
            self._sampled_in = InLink(group, group.world_size - 1, nbytes=ids_nbytes, depth=depth, what="sampled ids")
        if group.is_last:
            self._sampled_out = OutLink(group, 0, nbytes=ids_nbytes, depth=depth)

    def send_activations(self, step: int, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """``hidden`` and ``residual`` [T, H], contiguous, to the next stage; they may change once this returns."""
        if self._output is None:
            raise EngineError("the last stage sends no activations")
        header = describe(step, hidden, layout=self._layout, parts=self._parts)
        if hidden.shape != residual.shape or hidden.dtype != residual.dtype:
            raise EngineError(f"hidden states are {_kind(hidden)}, and the residual is {_kind(residual)}")
        flat = (hidden.reshape(-1), residual.reshape(-1))
        if self._parts > 1:
            first, last = _part(2 * hidden.numel(), self._parts, self._tp.rank)
            flat = (flat[0][first:last], flat[1][max(0, first - hidden.numel()) : max(0, last - hidden.numel())])
        with self._waiting():
            self._output.send(header, flat)

    def receive_activations(self, step: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [T, H] from the stage before, as ``activations`` gives them, until the next call.

        Raises EngineError, saying what differs, where something else has come.
        """
        if self._input is None:
            raise EngineError("the first stage receives no activations")
        hidden, residual = self.activations(num_tokens)
        header = describe(step, hidden, layout=self._layout, parts=self._parts)
        if self._parts == 1:
            with self._waiting():
                self._input.receive(header, (hidden, residual))
            return hidden, residual
        spans = [_part(2 * hidden.numel(), self._parts, part) for part in range(self._parts)]
        sizes = [last - first for first, last in spans]
        mine = hidden.new_empty(sizes[self._tp.rank])
        with self._waiting():
            self._input.receive(header, (mine,))
        whole = self._tp.all_gather(mine, sizes=sizes).view(2, *hidden.shape)
        hidden.copy_(whole[0])
        residual.copy_(whole[1])
        return hidden, residual

    def activations(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [rows, H] at the addresses that ``receive_activations`` fills, for steps to be recorded.

        Rows that no step has filled are zero.
        """
        return self._arrived[0, :rows], self._arrived[1, :rows]

    def send_ids(self, step: int, ids: torch.Tensor) -> None:
        """int64 [R] from the last stage to the first, on each TP rank to its like."""
        if self._sampled_out is None:
            raise EngineError("only the last stage sends sampled ids")
        with self._waiting():
            self._sampled_out.send(describe(step, ids, layout=Layout.REPLICATED, parts=1), (ids,))

    def receive_ids(self, step: int, count: int) -> torch.Tensor:
        """int64 [count] on the first stage; once for every ``send_ids``, in order."""
        if self._sampled_in is None:
            raise EngineError("only the first stage receives sampled ids")
        ids = torch.empty(count, dtype=torch.int64, device=self._arrived.device)
        with self._waiting():
            self._sampled_in.receive(describe(step, ids, layout=Layout.REPLICATED, parts=1), (ids,))
        return ids

    def close(self) -> None:
        """Release the links; idempotent."""
        for link in (self._input, self._output, self._sampled_in, self._sampled_out):
            if link is not None:
                link.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.waited_seconds += time.perf_counter() - started


def _part(count: int, parts: int, part: int) -> tuple[int, int]:
    """First and last element of a part of ``count``, which are as even as they can be."""
    return count * part // parts, count * (part + 1) // parts


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
