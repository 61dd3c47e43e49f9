"""The coordinator process: ``python -m fourfold.coordinator.process``, started by the supervisor of a deployment."""

from __future__ import annotations

from fourfold.supervision.parent_watch import connect_to_parent

# isort: split
import argparse
import gc
import logging
import os
import traceback
from pathlib import Path

import msgspec

from fourfold.process_messages import ProcessFailed, ProcessReady
from fourfold.supervision.process_title import name_process

MAX_MESSAGE = 4096


def main() -> None:
    """Collect and publish until the parent asks it to stop."""
    link = connect_to_parent()
    parser = argparse.ArgumentParser(prog="python -m fourfold.coordinator.process")
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--num-engines", type=int, required=True)
    parser.add_argument("--num-api-servers", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    arguments = parser.parse_args()
    name_process("coordinator", log_level=arguments.log_level)
    status = 0
    try:
        # Here, so that the parent is watched before anything else is imported.
        from fourfold.coordinator.coordinator_loop import CoordinatorLoop

        loop = CoordinatorLoop(
            arguments.run_directory, num_engines=arguments.num_engines, num_clients=arguments.num_api_servers
        )
        link.on_stop(loop.stop)
        gc.collect()
        gc.freeze()
        link.report(msgspec.msgpack.encode(ProcessReady()))
        loop.run()
        loop.close()
    except Exception as error:
        failed = ProcessFailed(
            message=f"{type(error).__name__}: {error}"[:MAX_MESSAGE], traceback=traceback.format_exc()[-MAX_MESSAGE:]
        )
        link.report(msgspec.msgpack.encode(failed))
        status = 1
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
