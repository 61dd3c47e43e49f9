"""What nodes with replicas and the node that answers requests say to each other. Typed msgpack; knows no socket."""

from __future__ import annotations

from typing import Any

import msgspec

from fourfold.manifest import Fingerprint
from fourfold.process_messages import EngineNotice, ForgetClient, RestartEngine
from fourfold.supervision.deployment_state import DeploymentState

# --- a node with replicas -> the head --------------------------------------------------------------------------------


class ReplicaNode(msgspec.Struct, frozen=True, kw_only=True):
    """How a node introduces itself."""

    first: int
    """The first of its replicas."""
    count: int
    fingerprint: Fingerprint


class NoticeSent(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """What becomes of one of its engines."""

    notice: EngineNotice


class ProcessesShown(msgspec.Struct, frozen=True, kw_only=True, tag="processes"):
    """All of its processes; each a ``ProcessState`` as plain values."""

    processes: list[dict[str, Any]]


class NodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Why it ends; fields as those of a Failure."""

    message: str
    status: int
    traceback: str = ""


class Relayed(msgspec.Struct, frozen=True, array_like=True, tag="to"):
    """A message for a socket of the other node's run directory. Either way."""

    name: str
    message: bytes


FromNode = NoticeSent | ProcessesShown | NodeFailed

# --- the head -> a node with replicas --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What it needs to know before it starts."""

    num_api_servers: int
    incarnations: list[int]
    """Of each of its replicas the last one that has been heard of; 0: none."""
    state: DeploymentState


class StateTold(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """How engines are to be, for one that starts now and has yet to look."""

    state: DeploymentState


FromHead = ForgetClient | RestartEngine | StateTold

_RELAYED = b"r"
_CONTROL = b"c"


def pack(message: FromNode | FromHead) -> bytes:
    """As it travels."""
    return _CONTROL + msgspec.msgpack.encode(message)


def pack_relayed(name: str, message: bytes) -> bytes:
    """A message for the socket ``name``, as it travels."""
    encoded = name.encode()
    return _RELAYED + bytes([len(encoded)]) + encoded + message


def unpack(content: bytes) -> Relayed | bytes:
    """What was relayed, or the encoded message. Raises ValueError for anything else."""
    kind = content[:1]
    if kind == _CONTROL:
        return content[1:]
    if kind != _RELAYED or len(content) < 2:
        raise ValueError("it is of no kind that nodes send")
    end = 2 + content[1]
    return Relayed(content[2:end].decode(), content[end:])
