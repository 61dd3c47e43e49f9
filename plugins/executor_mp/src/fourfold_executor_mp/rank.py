"""The process of one rank: ``python -m fourfold_executor_mp.rank``, started by the executor."""

from __future__ import annotations

from fourfold.supervision.parent_watch import connect_to_parent

# isort: split
import argparse
import logging
import os
import socket
import sys

from fourfold.rpc.rank_server import RankServer, Seat
from fourfold.supervision.process_title import name_process

logger = logging.getLogger(__name__)


def main() -> None:
    """Serve calls until the executor wishes the process to end."""
    link = connect_to_parent()
    arguments = _parse_arguments()
    name_process("worker", arguments.label, log_level=arguments.log_level)
    seat = Seat(
        rank=arguments.rank,
        local_rank=arguments.local_rank,
        local_workers=arguments.local_workers,
        node=arguments.node,
        address=arguments.address,
    )
    server = RankServer(socket.socket(fileno=arguments.channel), seat)
    link.on_stop(server.stop)
    status = 0
    try:
        server.run()
    except SystemExit as error:  # a worker method that ends its process
        status = _exit_status(error)
    except Exception:
        logger.exception("this rank cannot go on")
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Taking an interpreter with torch apart takes long, and libraries complain of what is left.
    os._exit(status)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fourfold_executor_mp.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--local-rank", type=int, required=True)
    parser.add_argument("--local-workers", type=int, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    return parser.parse_args()


def _exit_status(error: SystemExit) -> int:
    """What Python would exit with."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    logger.error("%s", error.code)
    return 1


if __name__ == "__main__":
    main()
