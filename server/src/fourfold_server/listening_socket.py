"""The port that the server listens on: bound once, early, and kept."""

from __future__ import annotations

import errno
import os
import socket

from fourfold.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen. Raises ConfigError naming host and port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(
            address[:2],  # of either family: host and port
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6(),
        )
    except socket.gaierror as error:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine: {error.strerror}") from error
    except ValueError as error:  # a name that cannot be written in the DNS
        raise ConfigError(f"--host is {host!r}, which is no host name; give an address such as 127.0.0.1") from error
    except OSError as error:
        # create_server puts the address into the text; the bare reason is enough beside ours.
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = {
            errno.EADDRINUSE: "stop what uses it, or choose another --port",
            errno.EACCES: "choose a --port from 1024 on",
            errno.EADDRNOTAVAIL: "choose a --host of this machine",
        }.get(error.errno or 0, "choose another --host or --port")
        raise ConfigError(f"cannot listen on {_join(host, port)}: {reason.lower()}; {hint}") from error


def url_of(listener: socket.socket, *, secure: bool) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # compared with, not bound to
    return f"{'https' if secure else 'http'}://{_join(local, port)}"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
