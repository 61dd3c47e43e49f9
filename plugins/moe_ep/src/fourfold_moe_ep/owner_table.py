"""Which ranks a token goes to, and which of its experts are there. T tokens, K experts a token, W ranks."""

from __future__ import annotations

import torch


class OwnerTable:
    """Looks up the rank of each physical expert; an id of -1 is nobody's."""

    def __init__(self, owners: torch.Tensor, world_size: int, device: torch.device) -> None:
        """``owners`` int32 [P]: the rank of each physical expert."""
        # -1 indexes the last entry, which is nobody.
        self._owners = torch.cat([owners, owners.new_full((1,), -1)]).to(device)
        self._ranks = torch.arange(world_size, dtype=torch.int32, device=device)[:, None, None]

    def ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 [T, K] physical experts -> int32 [T, K], the rank of each."""
        return self._owners[ids]

    def receivers(self, ranks: torch.Tensor) -> torch.Tensor:
        """What ``ranks`` gave -> bool [W, T]: whether rank w has an expert of token t."""
        return (ranks == self._ranks).any(-1)
