"""The communicator ``shm-gloo``: for groups on several hosts that have several ranks on one.

A sum is taken in the memory of each host first, then between one rank of each host over TCP. All else goes over
TCP, sums that are started and waited for later too: nobody works on one in shared memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from fourfold.distributed.process_group_communicator import ProcessGroupCommunicator
from fourfold.distributed.store import scoped
from fourfold.errors import RpcTimeout, Unsupported
from fourfold_comm_cpu import gloo, shm

if TYPE_CHECKING:
    from fourfold.entries import CommunicatorContext

_EXCHANGED_BYTES: Final = 256 << 10
"""Up to which hosts send each other whole sums: one trip over the network, where cutting them takes two and more."""


def build(context: CommunicatorContext) -> LayeredCommunicator:
    """The communicator of this rank; raises Unsupported for other groups, and where one of its parts cannot connect."""
    members = _members(context.hosts)
    if len(members) < 2 or len(members) == len(context.ranks):
        raise Unsupported(
            f"shared memory inside hosts and gloo between them connect groups on several hosts with several ranks on "
            f"one, and group {context.group} has its ranks on hosts {list(context.hosts) or [0]}"
        )
    own = members[context.hosts[context.rank]]
    leaders = [ranks[0] for ranks in members.values()]
    whole = gloo.connect(replace(context, store=scoped(context.store, "whole")))
    inside = between = None
    if len(own) > 1:
        inside = shm.build(_part(context, own, f"inside {own[0]}", one_host=True))
    if context.rank == own[0]:
        between = gloo.connect(_part(context, leaders, "between", one_host=False))
    return LayeredCommunicator(whole, context, inside=inside, between=between, num_hosts=len(members))


class LayeredCommunicator(ProcessGroupCommunicator):
    """See ``fourfold.contracts.communicator.Communicator``."""

    def __init__(
        self,
        whole: Any,
        context: CommunicatorContext,
        *,
        inside: shm.ShmCommunicator | None,
        between: Any | None,
        num_hosts: int,
    ) -> None:
        """``whole`` and ``between`` are process groups, of all ranks and of the first rank of each host, which alone
        has ``between``; ``inside`` connects this host's, None where there is one.
        """
        super().__init__(whole, context, graph_safe=False, deterministic=True, scatters_sums=False)
        self._inside = inside
        self._between = between
        self._num_hosts = num_hosts

    def all_reduce(self, tensor: torch.Tensor, *, channel: int = 0) -> torch.Tensor:
        """See Communicator; every host adds the sums of all in the same order."""
        self._open()
        dense = self._dense("all_reduce", tensor, channel)
        try:
            if self._inside is not None:
                dense = self._inside.all_reduce(dense)
            if self._between is not None:
                self._add_hosts(self._between, dense)
            if self._inside is not None:
                self._inside.broadcast(dense)
        except (RpcTimeout, RuntimeError) as error:
            # Whoever is missing on one host keeps the others waiting, so only all ranks together know who it is.
            peers = [place for place in range(self.world_size) if place != self.rank]
            raise self.timed_out("all_reduce", error, peers) from error
        return dense

    def close(self) -> None:
        """See Communicator."""
        if self._inside is not None:
            self._inside.close()
        between, self._between = self._between, None
        if between is not None and hasattr(between, "shutdown"):
            between.shutdown()
        super().close()

    def _add_hosts(self, between: Any, dense: torch.Tensor) -> None:
        """Into ``dense``, the sum of this host, add those of the others."""
        if dense.numel() * dense.element_size() > _EXCHANGED_BYTES:
            between.allreduce([dense]).wait()
            return
        sums = [torch.empty_like(dense) for _ in range(self._num_hosts)]
        between.allgather([sums], [dense]).wait()
        torch.add(sums[0], sums[1], out=dense)
        for one in sums[2:]:
            dense += one


def _members(hosts: Sequence[int]) -> dict[int, list[int]]:
    """Host -> its ranks in the group, in order."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return members


def _part(context: CommunicatorContext, ranks: Sequence[int], name: str, *, one_host: bool) -> CommunicatorContext:
    """The same for some of the group's ranks, this one among them."""
    return replace(
        context,
        ranks=tuple(context.ranks[rank] for rank in ranks),
        rank=ranks.index(context.rank),
        store=scoped(context.store, name),
        hosts=tuple(context.hosts[rank] for rank in ranks),
        one_host=one_host,
    )
