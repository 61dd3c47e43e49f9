"""Settings, the config check, and events: what a plugin may add to a run and be told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourfold.markers import hookspec

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.messages import EngineReady, EngineStats, RequestOutput


@hookspec
def fourfold_settings() -> type[Any]:
    """Give the plugin its own options: a frozen dataclass with a default for every field.

    Called once in every process, when plugins are loaded. Each field becomes ``--<plugin>-<field>``,
    ``FOURFOLD_<PLUGIN>_<FIELD>`` and a key of the config file, where ``<plugin>`` is the entry point's name; the
    string under a field is its help. The finished settings are ``config.plugins["<plugin>"]``.

    Returns the dataclass itself, not an instance.

    Example::

        from dataclasses import dataclass

        from fourfold import hookimpl


        @dataclass(frozen=True, kw_only=True, slots=True)
        class SlurmSettings:
            partition: str = "batch"
            '''The partition that ranks are started in.'''


        @hookimpl
        def fourfold_settings():
            return SlurmSettings
    """
    raise NotImplementedError


@hookspec
def fourfold_check_config(config: EngineConfig) -> None:
    """Look at the finished config and refuse what cannot work.

    Called once, in the process of the command or program, after ``auto`` is resolved and before anything starts.

    ``config`` is the whole engine's; raise ``fourfold.errors.ConfigError`` with the value and what to do about it.

    Returns nothing.

    Example::

        from fourfold import hookimpl
        from fourfold.errors import ConfigError


        @hookimpl
        def fourfold_check_config(config):
            replicas = config.parallel.data_parallel_size
            if config.backends.executor == "slurm" and replicas > 8:
                raise ConfigError(f"--data-parallel-size is {replicas}; slurm takes 8 at most")
    """


@hookspec
def fourfold_engine_started(info: EngineReady) -> None:
    """An engine has answered its first real forward pass and takes requests.

    Called in the engine process, once. ``info`` says what it runs on: device, dtype, blocks, backends, workers.

    Returns nothing. An exception is logged once, with the plugin's name, and changes nothing.

    Example::

        from fourfold import hookimpl

        started = []


        @hookimpl
        def fourfold_engine_started(info):
            started.append(f"engine {info.engine} runs on {info.device}")
    """


@hookspec
def fourfold_step_finished(stats: EngineStats) -> None:
    """One step of an engine is done.

    Called in the engine process after every step: be quick. ``stats`` are the engine's counters as they now stand.

    Returns nothing. An exception is logged once, with the plugin's name, and changes nothing.

    Example::

        from fourfold import hookimpl

        tokens = []


        @hookimpl
        def fourfold_step_finished(stats):
            tokens.append(stats.generation_tokens)
    """


@hookspec
def fourfold_request_finished(output: RequestOutput) -> None:
    """A request has ended, for whatever reason.

    Called in the engine process. ``output`` is the request's last one; ``finish_reason`` is set.

    Returns nothing. An exception is logged once, with the plugin's name, and changes nothing.

    Example::

        from fourfold import hookimpl

        reasons = []


        @hookimpl
        def fourfold_request_finished(output):
            reasons.append((output.request_id, output.finish_reason))
    """


@hookspec
def fourfold_worker_lost(rank: int, cause: str) -> None:
    """A worker has died or failed for good; its engine fails with it.

    Called in the engine process. ``rank`` is the worker's within its engine, ``cause`` one line.

    Returns nothing. An exception is logged once, with the plugin's name, and changes nothing.

    Example::

        from fourfold import hookimpl

        lost = []


        @hookimpl
        def fourfold_worker_lost(rank, cause):
            lost.append(f"rank {rank}: {cause}")
    """


@hookspec
def fourfold_engine_stopped(info: EngineReady) -> None:
    """An engine has ended its workers and is about to leave.

    Called in the engine process, once, after ``fourfold_engine_started``. ``info`` is what that hook was given.

    Returns nothing. An exception is logged once, with the plugin's name, and changes nothing.

    Example::

        from fourfold import hookimpl

        stopped = []


        @hookimpl
        def fourfold_engine_stopped(info):
            stopped.append(info.engine)
    """
