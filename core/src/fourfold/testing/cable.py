"""A cable with a delay and a loss: ``python -m fourfold.testing.cable NAME NAME``, between two TAP interfaces it makes.

For kernels without netem. It prints ``ready`` once both are there, wherever they are moved to afterwards, and ends when
its standard input does. Knows no host.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import Final

_SET_INTERFACE: Final = 0x400454CA  # TUNSETIFF of <linux/if_tun.h>
_TAP: Final = 0x0002
_NO_HEADER: Final = 0x1000
_LARGEST_FRAME: Final = 65535


class End:
    """One end of the cable, and what is on its way to it."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
        self.coming: deque[tuple[float, bytes]] = deque()
        """When each frame is there, oldest first."""

    def take(self, other: End, *, delay: float, loss: float, draw: random.Random) -> None:
        """Put every frame that waits here on its way."""
        while True:
            try:
                frame = os.read(self.descriptor, _LARGEST_FRAME)
            except OSError:  # no more, or the interface is down
                return
            if draw.random() >= loss:
                other.coming.append((time.monotonic() + delay, frame))

    def deliver(self) -> None:
        """Hand over what has arrived; a full or closed interface loses it, as a cable does."""
        now = time.monotonic()
        while self.coming and self.coming[0][0] <= now:
            try:
                os.write(self.descriptor, self.coming.popleft()[1])
            except OSError:
                return


def main() -> None:
    """Carry frames until nobody holds the other end of standard input."""
    parser = argparse.ArgumentParser(prog="python -m fourfold.testing.cable")
    parser.add_argument("names", nargs=2, metavar="NAME")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames")
    arguments = parser.parse_args()
    ends = [End(name) for name in arguments.names]
    draw = random.Random(0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        due = [end.coming[0][0] for end in ends if end.coming]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *(end.descriptor for end in ends)], [], [], wait)
        if 0 in ready and not os.read(0, 1):
            return
        for end, other in (ends, ends[::-1]):
            if end.descriptor in ready:
                end.take(other, delay=arguments.delay, loss=arguments.loss, draw=draw)
        for end in ends:
            end.deliver()


if __name__ == "__main__":
    main()
