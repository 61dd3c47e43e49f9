"""The engine-core process: ``python -m fourfold.engine.process``, started by the supervisor of a deployment."""

from __future__ import annotations

from fourfold.supervision.parent_watch import MAX_REPORT_BYTES, ParentLink, connect_to_parent

# isort: split
import argparse
import gc
import logging
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path

import msgspec

from fourfold.errors import ConfigError, PluginError, RequestError
from fourfold.messages import EngineFailed
from fourfold.process_messages import EngineOrder
from fourfold.sleep_tags import TAGS
from fourfold.supervision.deployment_state import read_state
from fourfold.supervision.process_title import name_process
from fourfold.supervision.run_directory import CONFIG_FILE

logger = logging.getLogger(__name__)


def main() -> None:
    """Run one engine core until the parent asks it to stop; exits with status 1 on failure, which the parent hears."""
    started = time.monotonic()
    link = connect_to_parent()
    arguments = _parse_arguments()
    name_process("engine_core", f"DP{arguments.dp_rank}", log_level=arguments.log_level)
    status = 0
    try:
        _serve(link, arguments, started)
    except Exception as error:
        link.report(_describe_failure(error, arguments))
        status = 1
    logging.shutdown()
    # Everything is closed. Taking an interpreter with torch apart takes long, and libraries complain of what is left.
    os._exit(status)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fourfold.engine.process")
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--engine", type=int, required=True)
    parser.add_argument("--dp-rank", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--num-api-servers", type=int, required=True)
    parser.add_argument("--coordinated", action="store_true")
    parser.add_argument("--meeting", default="")
    parser.add_argument("--log-level", required=True)
    return parser.parse_args()


def _serve(link: ParentLink, arguments: argparse.Namespace, started: float) -> None:
    # Here, so that the parent is watched before anything heavy is imported.
    from fourfold.checkpoints.resolve import AUTO
    from fourfold.config.transport import decode_config
    from fourfold.engine.build import build_engine
    from fourfold.engine.engine_loop import EngineLoop
    from fourfold.plugins import load_plugins

    registry = load_plugins()
    config = decode_config((arguments.run_directory / CONFIG_FILE).read_bytes(), registry)
    if arguments.meeting:
        config = replace(config, parallel=replace(config.parallel, lockstep_meeting=arguments.meeting))
    wished = read_state(arguments.run_directory)
    if wished.weights:
        model = replace(config.model, model=wished.weights, revision=None, load_format=AUTO)
        config = replace(config, model=model)
    built = build_engine(config, registry, dp_rank=arguments.dp_rank, started=started)
    for adapter in wished.adapters:
        try:
            built.core.load_adapter(adapter.unique, adapter.folder)
        except (ConfigError, RequestError) as error:  # requests for others must not suffer
            logger.error("LoRA adapter %r is not served here: %s", adapter.name, error)
    if wished.paused or wished.asleep:
        built.core.pause("keep")
        built.core.confirm_pause()
    if wished.asleep:
        built.core.sleep(wished.sleep_level)
        awake = [tag for tag in TAGS if tag not in wished.asleep]
        if awake:
            built.core.wake_up(awake)
    loop = EngineLoop(
        built.core,
        run_directory=arguments.run_directory,
        engine=arguments.engine,
        incarnation=arguments.incarnation,
        num_api_servers=arguments.num_api_servers,
        coordinated=arguments.coordinated,
        lockstep=config.parallel.lockstep,
    )
    orders = msgspec.msgpack.Decoder(EngineOrder)
    link.on_message(lambda message: loop.order(orders.decode(message)))
    link.on_stop(loop.stop)
    built.core.on_failure(loop.fail)
    # What lives now lives for good: the collector need not look at it again in the middle of a step.
    gc.collect()
    gc.freeze()
    ready = msgspec.structs.replace(built.ready, engine=arguments.engine, incarnation=arguments.incarnation)
    link.report(msgspec.msgpack.encode(ready))
    registry.events.engine_started(ready)
    try:
        loop.run()
    except Exception as error:
        link.report(_describe_failure(error, arguments))  # clients must not wait for the workers to end
        raise
    finally:
        registry.events.engine_stopped(ready)
        loop.close()
        built.core.shutdown()


def _describe_failure(error: Exception, arguments: argparse.Namespace) -> bytes:
    # Half of what a report holds for the traceback, whose end matters most, and an eighth for the message.
    refused = isinstance(error, ConfigError | PluginError)  # what the user can change
    trace = "" if refused else "".join(traceback.format_exception(error))[-MAX_REPORT_BYTES // 2 :]
    message = str(error) if refused else f"{type(error).__name__}: {error}"
    return msgspec.msgpack.encode(
        EngineFailed(
            engine=arguments.engine,
            incarnation=arguments.incarnation,
            message=message[: MAX_REPORT_BYTES // 8],
            traceback=trace,
            refused=refused,
        )
    )


if __name__ == "__main__":
    main()
