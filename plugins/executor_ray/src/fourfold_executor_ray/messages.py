"""What the executor, its driver and its ranks tell each other before calls can travel. Knows no Ray and no socket."""

from __future__ import annotations

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """To the driver, first: what to place, and where."""

    address: str
    """Of the cluster; empty: start one."""
    placement: str
    namespace: str
    """That names are looked up in; empty: a new one."""
    group_name: str
    """Of a placement group that is there; empty: see ``group_id``."""
    group_id: str
    """The same as its id in hexadecimal; both empty: make one."""
    labels: tuple[str, ...]
    """Of all ranks, in order."""
    tp: int
    """Ranks of a stage."""
    replica: int
    """Which of the engines this is."""
    replicas: int
    """Engines that place their ranks like this one."""
    timeout: float
    """Seconds for resources to come free."""
    started: float
    """The ``time.monotonic`` of this host from which they count."""
    folder: str
    """To make, for what a new cluster writes."""
    log_level: str


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """From the driver, first: it is connected."""

    address: str
    """The IP address of the executor's node, as the other nodes reach it."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True, tag="invitation"):
    """To the driver, after ``Placed``: where ranks come to."""

    door: str
    """The name of a ``Door``, for ranks of the executor's node; empty: there are none."""
    url: str = ""
    """Where other nodes connect; empty: there are none."""
    secret: str = ""
    """What lets them in."""
    config: bytes = b""
    """As ``fourfold.config.transport.encode_config`` writes it."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """To the driver: end all ranks."""

    grace: float
    """Seconds that they may take to end by themselves."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """From the driver: what it waits for, for the log."""

    text: str


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """From the driver: where ranks will be."""

    nodes: tuple[str, ...]
    """The node of each rank, in rank order, as people call it."""
    places: tuple[int, ...]
    """The same as numbers; 0 is the executor's own."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """From the driver: a node is connected to the executor."""

    place: int


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


News = Joined | Waiting | Placed | Opened | Lost | Refused
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
    log_level: str
    variables: dict[str, str]
    """Of the executor's environment."""


class NodeOrders(msgspec.Struct, frozen=True, kw_only=True):
    """To one actor of a node that is not the executor's: connect it."""

    place: int
    node: str
    ranks: tuple[int, ...]
    invitation: Invitation
    timeout: float
    """Seconds."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """From a rank, first on its stream."""

    rank: int
