"""What a launcher such as torchrun tells a rank through its environment. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fourfold.errors import ConfigError

VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What every rank needs to have been given."""
_LOCAL_SIZE: Final = "LOCAL_WORLD_SIZE"
_NODE: Final = "GROUP_RANK"
"""The node's number; torchrun sets this and the one before, other launchers may not."""
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedRank:
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    local_rank: int
    hosts_store: bool
    """Whether the store that all ranks meet in lives in this process."""
    local_world_size: int = 0
    """Ranks of this node; 0: the launcher has not said, and all are taken to be on it."""
    node: str = ""
    """What the launcher calls this node; empty where all ranks are on one."""
    master_address: str = ""
    """Where the ranks meet."""


def read_launcher(environment: Mapping[str, str]) -> LaunchedRank:
    """This process' place. Raises ConfigError naming the variables that are missing or make no sense."""
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start every rank with torchrun, or "
            f"with another launcher that sets {', '.join(VARIABLES)}"
        )
    numbers = {name: _number(name, environment[name]) for name in VARIABLES if name != "MASTER_ADDR"}
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_size = _number(_LOCAL_SIZE, environment[_LOCAL_SIZE]) if environment.get(_LOCAL_SIZE) else 0
    several = 0 < local_size < world_size and bool(environment.get(_NODE))
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world_size}; ranks count from 0 to WORLD_SIZE - 1")
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        local_rank=numbers["LOCAL_RANK"],
        hosts_store=rank == 0 and environment.get(_AGENT_STORE) != str(True),
        local_world_size=local_size,
        node=f"node {environment[_NODE]}" if several else "",
        master_address=environment["MASTER_ADDR"],
    )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}, and the launcher should set it to a number from 0 on")
    return int(value)
