"""`fourfold serve --headless` with ranks of an engine that is on another node (`--nnodes`, `--node-rank`)."""

from __future__ import annotations

import signal

from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import plan_nodes
from fourfold.entries import ExecutorContext
from fourfold.errors import ConfigError
from fourfold.plugins import PluginRegistry
from fourfold.supervision.parent_watch import ParentLink
from fourfold.supervision.run_directory import RunDirectory
from fourfold_server.process_table import ProcessTable

ROLE = "node"


def follow(config: EngineConfig, registry: PluginRegistry, parent: ParentLink | None) -> None:
    """Serve until a signal or the end of the engine; on the main thread. Raises what the follower raises."""
    entry = registry.executors()[config.backends.executor]
    if entry.follow is None:
        raise ConfigError(f"--nnodes is {config.nodes.nnodes}, and no other node joins executor {entry.name!r}")
    context = ExecutorContext(
        config=config, layout=config.parallel.layout, first_local_rank=0, local_workers=plan_nodes(config).local_workers
    )
    follower = entry.follow(context)
    if parent is None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: follower.stop())
    else:
        parent.on_stop(follower.stop)
    with RunDirectory.create() as run_directory:
        ProcessTable(run_directory).set(ROLE, follower.name, "running")
        follower.run()
