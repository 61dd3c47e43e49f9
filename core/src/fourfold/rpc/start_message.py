"""What every rank is told first, and what its command line says. The same for all ranks but for their numbers."""

from __future__ import annotations

import msgspec

from fourfold.layout import ParallelLayout
from fourfold.manifest import Fingerprint

DISCOVERY = "plugin discovery"
"""The first call: the payload is a StartMessage, the reply an Introduction."""
CONSTRUCTION = "worker construction"
"""The second call, made when all fingerprints fit: the payload says where ranks meet, and each builds its worker."""


class StartMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank builds its worker from; plugins, devices and backends travel as names in ``config``."""

    config: bytes
    """As ``fourfold.config.transport.encode_config`` writes it."""
    layout: ParallelLayout
    worker: str
    """``module:qualname``."""
    dp_rank: int
    store_timeout: float
    """Seconds that a rank waits for another one where they meet."""
    several_nodes: bool = False
    """Whether the first rank is to host that place, for ranks that reach each other only over the network."""


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself."""

    fingerprint: Fingerprint
    rendezvous: str = ""
    """Where ranks meet, if this one hosts that place."""
