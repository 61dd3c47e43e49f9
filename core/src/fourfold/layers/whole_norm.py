"""The rms norm of queries over all heads of the model together, and of keys, where a rank holds some of the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourfold.layers.partition import cut_heads

if TYPE_CHECKING:
    from fourfold.contracts.communicator import Communicator
    from fourfold.contracts.parallel_layer import TensorSlices
    from fourfold.distributed.group_coordinator import GroupCoordinator


class WholeNorm:
    """Norms the fused rows of queries, keys and values in place. Parameters are ``q.weight`` and ``k.weight``.

    The ranks add up the squares of their own heads; a key head that neighbours share counts once.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        group: GroupCoordinator,
        *,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``heads`` are the whole model's (heads, kv heads, head_dim)."""
        num_heads, num_kv_heads, self._head_dim = heads
        cut = cut_heads(num_heads, num_kv_heads, group.rank, group.world_size)
        self._held = {"q": cut.heads, "k": cut.kv_heads}
        self._keys_start = len(cut.heads) * self._head_dim
        self._keys_stop = self._keys_start + len(cut.kv_heads) * self._head_dim
        shared = cut.kv_heads.start * (num_heads // num_kv_heads) < cut.heads.start
        self._own_keys_start = self._keys_start + shared * self._head_dim
        self._communicator: Communicator | None = group.communicator
        self._epsilon = epsilon
        self._weight = torch.empty(self._keys_stop, dtype=dtype, device=device)
        widths = (num_heads * self._head_dim, num_kv_heads * self._head_dim)
        self._widths = torch.tensor(widths, dtype=torch.float32, device=device)

    def load(self, parameter: str, tensor: TensorSlices) -> None:
        """Take this rank's heads."""
        part = parameter.removesuffix(".weight")
        held, first = self._held[part], 0 if part == "q" else self._keys_start
        values = tensor[held.start * self._head_dim : held.stop * self._head_dim]
        self._weight[first : first + len(values)].copy_(values)

    def __call__(self, qkv: torch.Tensor) -> None:
        """[T, this rank's queries, keys, values], changed in place; values stay."""
        rows = qkv[:, : self._keys_stop].float()
        squares = rows.square()
        sums = torch.stack((squares[:, : self._keys_start].sum(-1), squares[:, self._own_keys_start :].sum(-1)), dim=-1)
        if self._communicator is not None:
            sums = self._communicator.all_reduce(sums)
        scales = torch.rsqrt(sums / self._widths + self._epsilon)
        rows[:, : self._keys_start] *= scales[:, :1]
        rows[:, self._keys_start :] *= scales[:, 1:]
        qkv[:, : self._keys_stop].copy_(rows * self._weight)
