"""What the executor, its driver and its ranks tell each other before calls can travel. Knows no Ray and no socket."""

from __future__ import annotations

import msgspec

from fourfold.supervision.run_directory import ProcessState


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """To the driver, first: what to place, and where."""

    address: str
    """Of the cluster; empty: start one."""
    placement: str
    group_name: str
    """Of a placement group that is there; empty: see ``group_id``."""
    group_id: str
    """The same as its id in hexadecimal; both empty: make one."""
    labels: tuple[str, ...]
    """Of all ranks, in order."""
    tp: int
    """Ranks of a stage."""
    timeout: float
    """Seconds for resources to come free."""
    folder: str
    """A private one, for what a new cluster writes."""
    log_level: str


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """From the driver, second: it is connected."""

    node: str
    """The id of the node that it is on."""
    address: str
    """That node's IP address, as the other nodes reach it."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True, tag="invitation"):
    """To the driver, third: where ranks come to."""

    door: str
    """The path of a Unix socket, for ranks of this host."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """To the driver: end all ranks."""

    grace: float
    """Seconds that they may take to end by themselves."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """From the driver: what it waits for, for the log."""

    text: str


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """From the driver: where ranks are, which are about to come."""

    nodes: tuple[str, ...]
    """The node of each rank, in rank order, as people call it."""


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """From the driver: a rank's actor has ended."""

    rank: int
    cause: str
    """One line, as it follows the rank's name; empty: Ray does not say."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """From the driver, last: it cannot go on."""

    config: bool
    """Whether the user can change it."""
    message: str


News = Joined | Waiting | Placed | Lost | Refused
"""From the driver."""
Order = Plan | Invitation | End
"""To the driver."""


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """To a rank's actor: who it is, and where it goes."""

    rank: int
    local_rank: int
    local_workers: int
    label: str
    node: str
    address: str
    door: str
    log_level: str
    variables: dict[str, str]
    """Of the executor's environment."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """From a rank, first on its stream."""

    rank: int
    process: ProcessState
