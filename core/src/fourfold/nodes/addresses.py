"""Addresses of this host and of others, as they are written in options and in URLs. Opens no connection."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from fourfold.errors import ConfigError

_ANY_PORT = 9
"""No packet is sent to it; the kernel only has to say which way it would take."""


def own_address(name: str, *, option: str) -> str:
    """The address of the interface ``name``, its first IPv4 one if it has any; an address of this host is its own.

    Raises ConfigError, naming ``option`` and what there is, for a name that is none of this host's.
    """
    addresses = _interfaces()
    if name in addresses:
        if not addresses[name]:
            raise ConfigError(f"{option} is {name!r}, an interface without an IP address; choose another one")
        first: str = min(addresses[name], key=lambda address: ":" in address)
        return first
    try:
        with socket.socket(_family(name), socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except (OSError, ValueError) as error:
        there = ", ".join(sorted(addresses))
        raise ConfigError(f"{option} is {name!r}, no interface or address of this host, which has {there}") from error
    return name


def listening_address(given: str, interface: str | None, *, option: str) -> str:
    """Where the node that others find by ``given``, the value of ``option``, listens: at its ``interface``, if it has
    one to choose.

    Raises ConfigError for a name that nobody has, for an interface that is none of this host's, and for one that does
    not have that address.
    """
    given = _bare(given)
    if interface is None:
        try:
            return given if _is_address(given) else _find(given)[1]
        except OSError as error:
            raise ConfigError(f"{option} is {given!r}, which is no known host: {_reason(error)}") from error
    own = own_address(interface, option="--node-interface")
    if given == own or given in _interfaces().get(interface, ()):
        return given
    if _is_address(given):
        raise ConfigError(
            f"--node-interface is {interface!r}, with the address {own}, and other nodes look for this one at {given} "
            f"({option}); give them the same"
        )
    return own


def address_towards(host: str) -> str:
    """This host's address as ``host`` sees it. Raises ConfigError for a host that is not known or has no route."""
    try:
        family, address = _find(host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way to {host!r}: {_reason(error)}") from error


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is reached by IPv6, having no IPv4 address; False for one that is not known."""
    try:
        return _find(host)[0] == socket.AF_INET6
    except OSError:
        return False


def node_name(address: str, *, joins: str | None = None) -> str:
    """What messages call this node. ``joins`` is the host of the node that it joins, where it is not the first one:
    where both are one, their processes tell them apart.
    """
    host = socket.gethostname()
    if joins is not None and address in _addresses_of(joins):
        host = f"{host} process {os.getpid()}"
    return f"{host} ({address})"


def tcp_url(host: str, port: int | str) -> str:
    """``tcp://HOST:PORT``, with an IPv6 address in brackets, which it may have already."""
    host = _bare(host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _addresses_of(host: str) -> set[str]:
    """None for one that is not known."""
    try:
        return {address for _, address in _find_all(host)}
    except OSError:
        return set()


def _find(host: str) -> tuple[socket.AddressFamily, str]:
    """The address that all nodes mean by ``host``: the first IPv4 one, or the first. Raises OSError."""
    return min(_find_all(host), key=lambda found: found[0] == socket.AF_INET6)


def _find_all(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(_bare(host), _ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # with a part that is empty or too long
        raise OSError("it cannot be a host's name") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _bare(host: str) -> str:
    """Without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _interfaces() -> dict[str, list[str]]:
    """This host's interfaces, and their IP addresses."""
    return {
        name: [one.address.partition("%")[0] for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    """Raises ValueError for what is no IP address."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
