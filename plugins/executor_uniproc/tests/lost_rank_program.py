"""One rank that goes on until another is lost: ``lost_rank_program.py RANK WORLD_SIZE MOMENT``.

The last rank believes to be on another host: it sees no process of the others.
"""

from __future__ import annotations

import sys
import threading

from fourfold.config.options import build_engine_config
from fourfold.entries import ExecutorContext
from fourfold.errors import EngineError
from fourfold_executor_uniproc import external
from fourfold_executor_uniproc.external import ExternalExecutor
from fourfold_executor_uniproc.launcher import LaunchedRank


def main(rank: int, world_size: int, moment: str) -> None:
    if rank == world_size - 1:
        external.host_identity = lambda: "elsewhere"  # type: ignore[assignment]
    config = build_engine_config(
        tensor_parallel_size=world_size, seed=0, executor="external", stall_timeout=1.0, rpc_timeout=60.0
    )
    executor = ExternalExecutor(
        ExecutorContext(config=config, layout=config.parallel.layout, worker="fourfold.testing.workers:EchoWorker"),
        LaunchedRank(rank=rank, world_size=world_size, local_rank=rank, hosts_store=rank == 0 and moment == "hosting"),
    )
    told = threading.Event()
    executor.on_failure(lambda error: told.set())
    executor.collective_rpc("who")
    print("ready", flush=True)
    try:
        if moment == "idle":
            told.wait(3 if rank == world_size - 1 else 30)
            executor.collective_rpc("who")
        else:
            executor.collective_rpc("wait", args=(30, 0 if moment == "hosting" else 1))
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    executor.shutdown()


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
