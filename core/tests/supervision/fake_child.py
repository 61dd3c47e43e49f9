"""A child for the tests of supervision: does what its first argument says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from fourfold.supervision.parent_watch import connect_to_parent


def main(behaviour: str) -> None:
    link = connect_to_parent()
    link.report(b"pid %d" % os.getpid())
    stopped = threading.Event()
    if behaviour == "exit-code":
        os._exit(9)
    if behaviour == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "last-words":
        for number in range(100):
            link.report(b"word %d" % number)
        os._exit(3)
    if behaviour == "polite":
        link.on_stop(stopped.set)
        stopped.wait(60)
        link.report(b"stopping")
        sys.exit(0)
    if behaviour == "deaf":  # neither the wish to stop nor SIGTERM ends it
        stopped.wait(60)
    if behaviour == "terminable":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stopped.wait(60)
    if behaviour == "inherit":
        link.report(b"fds " + ",".join(sorted(os.listdir("/proc/self/fd"), key=int)).encode())
    if behaviour == "busy":  # the interpreter's lock is held nearly all the time
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            sum(range(100_000))


if __name__ == "__main__":
    main(sys.argv[1])
