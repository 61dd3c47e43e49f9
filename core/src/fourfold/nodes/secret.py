"""The secret that all nodes of a deployment share, as keys for what travels between them. Knows no socket.

Whoever has the secret can derive the listener's public key, which is never sent, and so can open a connection; nobody
else can, nor read what travels (CurveZMQ, https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cached_property
from typing import Final

import zmq
from zmq.utils import z85

from fourfold.config.engine_config import EngineConfig
from fourfold.errors import ConfigError

MIN_LENGTH: Final = 16
"""Characters; fewer could be tried one by one."""
_SALT: Final = b"fourfold nodes"
_COST: Final = 1 << 14
"""Of scrypt: 50 ms and 16 MiB a guess."""


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_urlsafe(32)


def required_secret(config: EngineConfig) -> ClusterSecret:
    """The secret of a deployment over several nodes. Raises ConfigError where there is none."""
    if config.nodes.cluster_secret is None:
        raise ConfigError(
            "several nodes need a secret that nobody else has; give all of them the same --cluster-secret, by the "
            "variable FOURFOLD_CLUSTER_SECRET for example"
        )
    return ClusterSecret(config.nodes.cluster_secret)


class ClusterSecret:
    """Keys from a text. It is never shown, not even in an error."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for a text that is too short to be one."""
        if len(text) < MIN_LENGTH:
            raise ConfigError(
                f"--cluster-secret has {len(text)} characters; give {MIN_LENGTH} or more, the same on every node"
            )
        self._text = text

    def __repr__(self) -> str:
        return "ClusterSecret(...)"

    def secure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Let only those connect to ``socket`` who have the secret."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key

    def secure_connection(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket`` connect only to a listener that has the secret."""
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(self._secret_key)

    @cached_property
    def _secret_key(self) -> bytes:
        key = hashlib.scrypt(self._text.encode(), salt=_SALT, n=_COST, r=8, p=1, dklen=32)
        return bytes(z85.encode(key))
