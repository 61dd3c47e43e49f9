"""Moves activations from stage to stage, and sampled ids from the last one back to the first.

Knows tensors and step numbers; decides nothing of what runs, and knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from fourfold.errors import EngineError

if TYPE_CHECKING:
    from fourfold.distributed.model_parallel import ModelParallel

_MAGIC: Final = 0x66664F4C44
_HEADER_ITEMS: Final = 8
_HEADER_BYTES: Final = 8 * _HEADER_ITEMS


class StageTransport:
    """One rank's ends. T tokens of a step, H hidden size, R sampled rows."""

    def __init__(
        self,
        parallel: ModelParallel,
        device: torch.device,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
        depth: int,
    ) -> None:
        """``depth`` is how many steps are in the air at most."""
        self._group = parallel.pp
        self._device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._stable = torch.zeros(2, max_tokens, hidden_size, dtype=dtype, device=device)
        self._counts: dict[str, int] = {}

    def send_activations(self, step: int, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """``hidden`` and ``residual`` [T, H] to the next stage; they may change once this returns."""
        self._send("activations", step, torch.stack([hidden, residual]), self._group.rank + 1)

    def receive_activations(self, step: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [T, H] from the stage before, always at the same addresses, until the next call."""
        whole = torch.empty(2, num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        self._receive("activations", step, whole, self._group.rank - 1)
        hidden, residual = self.activations(num_tokens)
        hidden.copy_(whole[0])
        residual.copy_(whole[1])
        return hidden, residual

    def activations(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [rows, H] at the addresses that receive_activations fills, for steps to be recorded."""
        return self._stable[0, :rows], self._stable[1, :rows]

    def send_ids(self, step: int, ids: torch.Tensor) -> None:
        """int64 [R] from the last stage to the first."""
        self._send("ids", step, ids, 0)

    def receive_ids(self, step: int, count: int) -> torch.Tensor:
        """int64 [R] on the first stage; steps come in order."""
        ids = torch.empty(count, dtype=torch.int64, device=self._device)
        self._receive("ids", step, ids, self._group.world_size - 1)
        return ids

    def close(self) -> None:
        """Idempotent."""

    def _send(self, what: str, step: int, tensor: torch.Tensor, destination: int) -> None:
        header = torch.tensor([_MAGIC, step, self._count(what), *_shape(tensor)], dtype=torch.int64)
        whole = torch.cat([header.view(torch.uint8).to(tensor.device), tensor.contiguous().view(-1).view(torch.uint8)])
        self._group.isend(whole, destination).wait()

    def _receive(self, what: str, step: int, out: torch.Tensor, source: int) -> None:
        payload = out.view(-1).view(torch.uint8)
        whole = torch.empty(_HEADER_BYTES + payload.numel(), dtype=torch.uint8, device=out.device)
        self._group.irecv(whole, source).wait()
        header = whole[:_HEADER_BYTES].cpu().view(torch.int64).tolist()
        expected = [_MAGIC, step, self._count(what), *_shape(out)]
        if header != expected:
            raise EngineError(f"{what} from stage {source} have header {header}, not {expected}")
        payload.copy_(whole[_HEADER_BYTES:])

    def _count(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, -1) + 1
        return self._counts[what]


def _shape(tensor: torch.Tensor) -> list[int]:
    return [*([0] * (_HEADER_ITEMS - 3 - tensor.dim())), *tensor.shape]
