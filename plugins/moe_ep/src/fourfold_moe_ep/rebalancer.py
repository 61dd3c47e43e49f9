"""The rebalancer ``greedy``: copies the hottest experts, then packs copies on ranks, heaviest first. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fourfold.errors import ConfigError
from fourfold_moe_ep.expert_copies import map_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fourfold.contracts.mixture import ExpertMap, RebalancerContext


class GreedyRebalancer:
    """See ``fourfold.contracts.mixture.Rebalancer``.

    The policies of DeepSeek's expert-parallel load balancer ("DeepSeek-V3 Technical Report", 2024, section 3.4). The
    global one: each further copy goes to the expert with the most load a copy; each copy then to the lightest rank that
    has room, largest first. The hierarchical one, where groups of experts and ranks share out evenly over hosts: groups
    go to hosts like copies to ranks, and each host then is solved alone, so that the experts of one group, of which a
    token takes several, are on one host. All layers are solved at once.
    """

    def __init__(self, context: RebalancerContext) -> None:
        self._num_groups = context.num_groups
        self._num_hosts = _blocks(context.hosts)

    def balance(self, load: NDArray[np.float64], num_ranks: int, num_slots: int) -> ExpertMap:
        """``load`` [L, E] -> the map; of its ``num_slots`` places the first are rank 0's, then rank 1's, and so on."""
        num_experts = load.shape[1]
        if num_slots < num_experts:
            raise ConfigError(f"{num_experts} experts do not fit {num_slots} slots; one each at least")
        hosts = self._num_hosts
        if hosts == 1 or self._num_groups % hosts or num_slots % num_ranks:
            return map_of(_solve(load, num_ranks, num_slots), num_experts)
        found = []
        for experts in np.split(_on_hosts(load, self._num_groups, hosts), hosts, axis=1):
            solved = _solve(np.take_along_axis(load, experts, 1), num_ranks // hosts, num_slots // hosts)
            found.append(np.take_along_axis(experts, solved, 1))
        return map_of(np.concatenate(found, axis=1), num_experts)


def balancedness(load: NDArray[np.float64], expert_map: ExpertMap, owners: Sequence[int], num_ranks: int) -> float:
    """Mean load of a rank over the largest, layers weighted by their largest: 1 is perfect.

    ``load`` [L, E] of logical experts, which their copies share evenly; ``owners`` is the rank of each physical expert.
    """
    ranks = rank_loads(load, expert_map, owners, num_ranks)
    largest = float(ranks.max(axis=1).sum())
    return float(ranks.mean(axis=1).sum()) / largest if largest > 0 else 1.0


def rank_loads(
    load: NDArray[np.float64], expert_map: ExpertMap, owners: Sequence[int], num_ranks: int
) -> NDArray[np.float64]:
    """What ``load`` [L, E] makes of the ranks: [L, R]."""
    layers = np.arange(len(load))[:, None]
    logical = expert_map.physical_to_logical
    share = load[layers, logical] / expert_map.counts[layers, logical]
    ranks = np.zeros((num_ranks, len(load)))
    np.add.at(ranks, np.asarray(owners), share.T)
    return ranks.T


def _blocks(hosts: Sequence[int]) -> int:
    """How many hosts there are, where each has as many neighbouring ranks as every other; 1 anywhere else."""
    count = len(set(hosts))
    if count == 0 or len(hosts) % count:
        return 1
    each = len(hosts) // count
    even = all(len(set(hosts[first : first + each])) == 1 for first in range(0, len(hosts), each))
    return count if even else 1


def _on_hosts(load: NDArray[np.float64], num_groups: int, num_hosts: int) -> NDArray[np.int32]:
    """Groups of experts on hosts, as many on each: [L, E] experts in the order of hosts."""
    num_layers, num_experts = load.shape
    size = num_experts // num_groups
    groups = np.tile(np.arange(num_groups, dtype=np.int32), (num_layers, 1))
    packed = _pack(groups, load.reshape(num_layers, num_groups, size).sum(axis=2), num_hosts)
    experts: NDArray[np.int32] = packed[:, :, None] * size + np.arange(size, dtype=np.int32)
    return experts.reshape(num_layers, num_experts)


def _solve(load: NDArray[np.float64], num_ranks: int, num_slots: int) -> NDArray[np.int32]:
    """The global policy: the expert of each place, [L, S]."""
    logical, counts = _copy_hottest(load, num_slots)
    layers = np.arange(len(load))[:, None]
    share = load[layers, logical] / counts[layers, logical]
    return _pack(logical, share, num_ranks)


def _copy_hottest(load: NDArray[np.float64], num_slots: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Logical expert of each copy [L, S], and copies of each expert [L, E]."""
    num_layers, num_experts = load.shape
    logical = np.empty((num_layers, num_slots), np.int32)
    logical[:, :num_experts] = np.arange(num_experts)
    counts = np.ones((num_layers, num_experts), np.int32)
    layers = np.arange(num_layers)
    for slot in range(num_experts, num_slots):
        hottest = (load / counts).argmax(axis=1)
        logical[:, slot] = hottest
        counts[layers, hottest] += 1
    return logical, counts


def _pack(logical: NDArray[np.int32], share: NDArray[np.float64], num_ranks: int) -> NDArray[np.int32]:
    """``logical`` and the load of each copy [L, S] -> [L, S] in the order of ranks, which differ by one at most."""
    num_layers, num_slots = logical.shape
    each, left = divmod(num_slots, num_ranks)
    room = np.full(num_ranks, each)
    room[:left] += 1
    first = np.concatenate([[0], np.cumsum(room)[:-1]])
    weight = np.zeros((num_layers, num_ranks))
    filled = np.zeros((num_layers, num_ranks), np.int64)
    packed = np.empty_like(logical)
    layers = np.arange(num_layers)
    for copy in np.argsort(-share, axis=1, kind="stable").T:
        rank = np.where(filled < room, weight, np.inf).argmin(axis=1)
        packed[layers, first[rank] + filled[layers, rank]] = logical[layers, copy]
        weight[layers, rank] += share[layers, copy]
        filled[layers, rank] += 1
    return packed
