"""An engine process for tests: does what the file ``behaviours`` in the run directory says for its incarnation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from fourfold.messages import EngineFailed
from fourfold.supervision.parent_watch import connect_to_parent
from fourfold.testing.ready_engine import ready_engine


def main() -> None:
    link = connect_to_parent()
    folder = Path(sys.argv[1])
    incarnation = int(sys.argv[sys.argv.index("--incarnation") + 1])
    behaviours = (folder / "behaviours").read_text().split()
    behaviour = behaviours[min(incarnation, len(behaviours)) - 1]
    stopped = threading.Event()
    link.on_stop(stopped.set)
    engine = int(sys.argv[sys.argv.index("--engine") + 1])
    if behaviour == "ready-if-1" and engine != 1:
        os._exit(9)
    if behaviour == "drain":
        link.on_message(lambda message: stopped.set())
    if behaviour in {"refuse", "break"}:
        failed = EngineFailed(
            engine=0,
            incarnation=incarnation,
            message="no such model" if behaviour == "refuse" else "ValueError: boom",
            traceback="Traceback: boom",
            refused=behaviour == "refuse",
        )
        link.report(msgspec.msgpack.encode(failed))
        sys.exit(1)
    if behaviour == "exit-9":
        os._exit(9)
    if behaviour == "babble":
        link.report(b"\xc1")
        threading.Event().wait(60)
    if behaviour == "hang":
        threading.Event().wait(60)
    ready = ready_engine(engine, incarnation=incarnation, backends={"attention": "torch"})
    link.report(msgspec.msgpack.encode(ready))
    if behaviour == "fail-and-linger":
        for message in ("ValueError: boom", "an echo"):
            failed = EngineFailed(engine=0, incarnation=incarnation, message=message)
            link.report(msgspec.msgpack.encode(failed))
        threading.Event().wait(60)
    if behaviour == "die-when-ready":
        os.kill(os.getpid(), signal.SIGKILL)
    stopped.wait(60)


if __name__ == "__main__":
    main()
