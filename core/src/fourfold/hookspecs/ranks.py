"""Offers that place and connect work: executors, communicators, cuts, orders, and the parts of expert layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.markers import hookspec

if TYPE_CHECKING:
    from fourfold.entries import (
        AllToAllEntry,
        CommunicatorEntry,
        ExecutorEntry,
        ExpertPlacementEntry,
        ExpertsEntry,
        LoadBalancerEntry,
        ParallelLayerEntry,
        RebalancerEntry,
        SchedulerEntry,
    )


@hookspec
def fourfold_executors() -> list[ExecutorEntry]:
    """Offer executors, each under a name for ``--executor``: who starts and calls the ranks of one engine.

    Called once in every process, when plugins are loaded and before any device is touched. Import what an executor
    needs inside ``build(ExecutorContext)``; it returns a ``fourfold.contracts.executor.Executor``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ExecutorEntry


        def build(context):
            from my_plugin.executor import SlurmExecutor

            return SlurmExecutor(context)


        @hookimpl
        def fourfold_executors():
            return [ExecutorEntry(name="slurm", build=build, summary="one srun step a rank")]
    """
    raise NotImplementedError


@hookspec
def fourfold_communicators() -> list[CommunicatorEntry]:
    """Offer communicators, each under a name for ``--comm``: who moves tensors between the ranks of a group.

    Called once in every process, when plugins are loaded. ``build(CommunicatorContext)`` runs on every rank of a group
    at once and returns a ``fourfold.contracts.communicator.Communicator``. The capability ``one_host`` says that it
    connects ranks of one host alone; ``auto`` then takes another one for groups that span several. ``several_hosts``
    says that it is for those alone that have several ranks on one of them. One that can start a sum and wait for it
    later offers ``fourfold.contracts.split_sum.SplitSums`` too, for ``--enable-dbo``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import CommunicatorEntry


        def build(context):
            from my_plugin.communicator import UcxCommunicator

            return UcxCommunicator(context.store, context.rank, context.ranks)


        @hookimpl
        def fourfold_communicators():
            return [CommunicatorEntry(name="ucx", build=build, capabilities=frozenset({"deterministic"}))]
    """
    raise NotImplementedError


@hookspec
def fourfold_parallel_layers() -> list[ParallelLayerEntry]:
    """Offer parallel layers, by kind and name for ``--parallel-layer``: how a layer is cut over the ranks.

    Called once in every process, when plugins are loaded. ``build(ParallelLayerContext)`` runs once a layer and
    returns a ``fourfold.contracts.parallel_layer.ParallelLayer``. With ``--enable-expert-parallel`` a moe layer needs
    the capability ``expert_parallel``; with ``--enable-dbo`` rows and moe layers that add up need ``microbatches``.

    Returns a list of entries. Names are unique within a ``kind``.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ParallelLayerEntry


        def build(context):
            from my_plugin.moe import ExpertParallelLayer

            return ExpertParallelLayer(context)


        @hookimpl
        def fourfold_parallel_layers():
            return [
                ParallelLayerEntry(
                    name="spread",
                    kind="moe",
                    build=build,
                    summary="experts spread over TP x DP",
                    capabilities=frozenset({"expert_parallel"}),
                )
            ]
    """
    raise NotImplementedError


@hookspec
def fourfold_load_balancers() -> list[LoadBalancerEntry]:
    """Offer load balancers, each under a name for ``--load-balancer``: which engine takes a request.

    Called once in every process, when plugins are loaded. ``build(LoadBalancerContext)`` runs in every API server and
    returns a ``fourfold.contracts.load_balancer.LoadBalancer``, which chooses among engines by their loads and by marks
    of the prefixes that they hold. ``fourfold simulate balance`` compares it with the others.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import LoadBalancerEntry


        class FewestRequests:
            def __init__(self, context):
                self.first = context.seed  # API servers have different ones: they do not all begin with one engine

            def choose(self, request, loads):
                counts = loads.num_running + loads.num_waiting
                ready = loads.ready_engines()
                return int(min(ready, key=lambda engine: (counts[engine], (engine - self.first) % len(loads))))

            def learn_prefixes(self, engine, marks):
                pass  # prefixes make no difference


        @hookimpl
        def fourfold_load_balancers():
            claims = frozenset({"load_aware"})  # the kit tests what is claimed, and what is not
            return [LoadBalancerEntry(name="fewest-requests", build=FewestRequests, capabilities=claims)]
    """
    raise NotImplementedError


@hookspec
def fourfold_schedulers() -> list[SchedulerEntry]:
    """Offer scheduling policies, each under a name for ``--scheduler``: the order of requests.

    Called once in every process, when plugins are loaded. ``build(SchedulerContext)`` runs in the engine core and
    returns a ``fourfold.contracts.scheduling_policy.SchedulingPolicy``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import SchedulerEntry


        class LastComeFirstServed:
            def key(self, request):
                return (-request.arrival_time,)


        @hookimpl
        def fourfold_schedulers():
            return [SchedulerEntry(name="lcfs", build=lambda context: LastComeFirstServed())]
    """
    raise NotImplementedError


@hookspec
def fourfold_all_to_alls() -> list[AllToAllEntry]:
    """Offer all-to-alls: the wire that carries tokens to the ranks of their experts and back.

    Called once in every process, when plugins are loaded; ``build(AllToAllContext)`` runs on all ranks of an EP group
    at once and returns a ``fourfold.contracts.mixture.AllToAll``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import AllToAllEntry


        def build(context):
            from my_plugin.all_to_all import PeerMemoryAllToAll

            return PeerMemoryAllToAll(context)


        @hookimpl
        def fourfold_all_to_alls():
            return [AllToAllEntry(name="peer_memory", build=build, summary="writes to the peers' memory")]
    """
    raise NotImplementedError


@hookspec
def fourfold_experts() -> list[ExpertsEntry]:
    """Offer experts, each under a name for ``--experts``: the arithmetic of a rank's experts, on tokens that are there.

    Called once in every process, when plugins are loaded; ``build(ExpertsContext)`` runs once a layer on every rank and
    returns ``fourfold.contracts.mixture.Experts``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ExpertsEntry


        def build(context):
            from my_plugin.experts import GroupedExperts

            return GroupedExperts(context)


        @hookimpl
        def fourfold_experts():
            return [ExpertsEntry(name="one-product", build=build, summary="one grouped product for all experts")]
    """
    raise NotImplementedError


@hookspec
def fourfold_expert_placements() -> list[ExpertPlacementEntry]:
    """Offer expert placements: which rank holds which expert at the start.

    Called once in every process, when plugins are loaded; ``build(None)`` runs on every rank and returns a
    ``fourfold.contracts.mixture.ExpertPlacement``, which must give all of them the same answer.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ExpertPlacementEntry


        class RoundRobin:
            def place(self, num_physical, num_ranks):
                return tuple(expert % num_ranks for expert in range(num_physical))


        @hookimpl
        def fourfold_expert_placements():
            return [ExpertPlacementEntry(name="round_robin", build=lambda context: RoundRobin())]
    """
    raise NotImplementedError


@hookspec
def fourfold_rebalancers() -> list[RebalancerEntry]:
    """Offer rebalancers: who decides which experts get copies when some are hotter than others.

    Called once in every process, when plugins are loaded; ``build(context)`` runs on every rank with a
    ``fourfold.contracts.mixture.RebalancerContext`` and returns a ``fourfold.contracts.mixture.Rebalancer``; the first
    rank's is asked, for all of them.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import RebalancerEntry


        def build(context):
            from my_plugin.rebalancer import HottestFirst

            return HottestFirst(context)


        @hookimpl
        def fourfold_rebalancers():
            return [RebalancerEntry(name="hottest_first", build=build, summary="copies the hottest experts")]
    """
    raise NotImplementedError
