"""A parent for the tests of supervision: starts children, prints their pids, and waits to be killed."""

from __future__ import annotations

import sys
import threading

from fourfold.supervision.child_process import ChildCommand, ChildSupervisor


def main(behaviours: list[str]) -> None:
    supervisor = ChildSupervisor()
    for behaviour in behaviours:
        child = supervisor.start(ChildCommand(module="fake_child", label=behaviour, arguments=[behaviour]))
        print(child.pid, flush=True)
    threading.Event().wait(60)


if __name__ == "__main__":
    main(sys.argv[1:])
