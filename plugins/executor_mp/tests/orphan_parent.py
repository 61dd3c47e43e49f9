"""A program that starts ranks, prints their pids, and waits to be killed."""

from __future__ import annotations

import sys
import threading

import psutil

from fourfold.config.engine_config import EngineConfig
from fourfold.config.parallel_config import ParallelConfig
from fourfold.entries import ExecutorContext
from fourfold_executor_mp.executor import MpExecutor


def main(moment: str) -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2))
    context = ExecutorContext(config=config, layout=config.parallel.layout, worker="faulty_worker:FaultyWorker")
    if moment == "loading":  # FAULTY_WORKER lets a rank hang there
        threading.Thread(target=MpExecutor, args=(context,), daemon=True).start()
        while len(psutil.Process().children()) < 2:
            threading.Event().wait(0.01)
    else:
        executor = MpExecutor(context)
        if moment == "working":
            executor.collective_rpc("wait", args=(60, 0), non_block=True)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    threading.Event().wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
