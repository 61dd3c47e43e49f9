"""Skewed routing for tests and benchmarks: how much each expert is asked for, and routers' decisions that follow it.

L layers, E experts, T tokens, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HOT_SHARE: Final = 0.5
"""Of all tokens, what the hot expert of a layer is asked for."""


def _zipf(generator: np.random.Generator, num_experts: int) -> NDArray[np.float64]:
    return generator.permutation(1.0 / np.arange(1, num_experts + 1))


def _lognormal(generator: np.random.Generator, num_experts: int) -> NDArray[np.float64]:
    return generator.lognormal(0.0, 1.0, num_experts)


def _hot(generator: np.random.Generator, num_experts: int) -> NDArray[np.float64]:
    load = np.full(num_experts, (1.0 - _HOT_SHARE) / max(1, num_experts - 1))
    load[generator.integers(num_experts)] = _HOT_SHARE
    return load


def _even(generator: np.random.Generator, num_experts: int) -> NDArray[np.float64]:
    return np.ones(num_experts)


LOADS: Final[Mapping[str, Callable[[np.random.Generator, int], NDArray[np.float64]]]] = {
    "even": _even,
    "hot": _hot,
    "lognormal": _lognormal,
    "zipf": _zipf,
}
"""Kinds of load; which experts are hot differs from layer to layer."""


def expert_load(kind: str, num_layers: int, num_experts: int, *, seed: int = 0) -> NDArray[np.float64]:
    """[L, E], the share of each expert in what a layer asks for; raises ConfigError for a ``kind`` not in ``LOADS``."""
    if kind not in LOADS:
        raise ConfigError(f"no load is called {kind!r}; there are {', '.join(LOADS)}")
    generator = np.random.default_rng(seed)
    load = np.stack([LOADS[kind](generator, num_experts) for _ in range(num_layers)])
    shares: NDArray[np.float64] = load / load.sum(axis=1, keepdims=True)
    return shares


class RoutingSimulator:
    """Decides as routers would whose experts are asked for in proportion to a load.

    A token's experts differ, so that none has more than a Kth: the hottest get less than their share where it is more.
    They are drawn without replacement by the Gumbel top-k trick (Kool, van Hoof and Welling 2019).
    """

    def __init__(self, load: NDArray[np.float64], *, top_k: int, seed: int = 0) -> None:
        """``load`` [L, E], of any scale. Raises ConfigError for one that is no share, or in which fewer than ``top_k``
        experts of a layer have any.
        """
        if not (np.isfinite(load).all() and (load >= 0).all()):
            raise ConfigError("a load is a number of 0 or more for each expert")
        asked = int((load > 0).sum(axis=1).min(initial=load.shape[1]))
        if not 1 <= top_k <= asked:
            raise ConfigError(f"a token asks for {top_k} experts that differ; from 1 to {asked}, which have any load")
        with np.errstate(divide="ignore"):
            self._logs = torch.from_numpy(np.log(load))
        self._top_k = top_k
        self._generator = torch.Generator().manual_seed(seed)

    def route(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int32 [T, K] of logical experts, weights fp32 [T, K] that add up to 1), other ones at each call."""
        noise = torch.rand(num_tokens, self._logs.shape[1], generator=self._generator, dtype=torch.float64)
        scores = self._logs[layer] - torch.log(-torch.log(noise.clamp_min(1e-300)))
        values, ids = scores.topk(self._top_k, dim=1)
        return ids.to(torch.int32), torch.softmax(values.float(), dim=1)
