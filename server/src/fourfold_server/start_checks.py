"""What ``serve`` refuses before it starts any process."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import NodePlan
from fourfold.config.resolution import resolve
from fourfold.errors import ConfigError
from fourfold.plugins import PluginRegistry
from fourfold_server.config import ServerConfig

if TYPE_CHECKING:
    from fourfold.models.description import ModelDescription

logger = logging.getLogger(__name__)


def check_config(config: EngineConfig, server_config: ServerConfig, registry: PluginRegistry) -> EngineConfig:
    """The config with ``auto`` resolved, after a look at the model's description."""
    from fourfold.checkpoints.progress import NoProgress
    from fourfold.checkpoints.resolve import describe_checkpoint
    from fourfold.models.parallel_limits import check_layout

    entry = registry.executors().get(config.backends.executor)
    if entry is not None and entry.offline_only:
        raise ConfigError(
            f"--executor {entry.name} is for the offline LLM alone: {entry.offline_only}; choose another one, or auto"
        )
    resolved = resolve(config, registry)
    logger.info("%s", "; ".join(resolved.reasons))
    description = describe_checkpoint(config.model, registry, NoProgress())
    check_layout(description, resolved.config)
    _check_adapters(config, server_config, description)
    return resolved.config


def check_lockstep(plan: NodePlan, config: EngineConfig) -> None:
    """Refuse replicas that step together but are on several nodes or behind several servers."""
    parallel = config.parallel
    here = len(plan.local) == plan.num_engines == parallel.data_parallel_size
    if parallel.lockstep and not (here and plan.ranks_per_engine == parallel.layout.engine_world_size):
        raise ConfigError(
            "replicas that share experts must all be on one node, behind one server; leave out "
            "--enable-expert-parallel, and each replica has all experts"
        )


def _check_adapters(config: EngineConfig, server_config: ServerConfig, description: ModelDescription) -> None:
    from fourfold.models.adapter_file import adapter_folder, read_adapter

    adapters, lora = server_config.adapters, config.lora
    if not adapters:
        return
    if not lora.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    names = [*config.model.served_names, *(name for name, _ in adapters)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--lora-modules: the name {twice!r} is there twice, as a model or an adapter")
    if len(adapters) > lora.max_loras:
        raise ConfigError(f"--lora-modules has {len(adapters)} adapters, and --max-loras is {lora.max_loras}; raise it")
    for _, folder in adapters:
        read_adapter(adapter_folder(folder), description, max_rank=lora.max_lora_rank)


def check_certificate(config: ServerConfig) -> None:
    """Refuse a certificate and key that do not go together."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile!r} and --ssl-keyfile {config.ssl_keyfile!r} do not go together: "
            f"{error}"
        ) from error
