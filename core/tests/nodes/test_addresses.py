"""Names of interfaces and addresses of this host."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.nodes.addresses import address_towards, is_ipv6, listening_address, node_name, own_address, tcp_url


def test_an_interface_or_an_address_of_this_host() -> None:
    assert own_address("lo", option="--x") == "127.0.0.1"
    assert own_address("127.0.0.2", option="--x") == "127.0.0.2"


@pytest.mark.parametrize("name", ["eth99", "203.0.113.7", "nonsense"])
def test_what_is_not_here_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--x is '{name}', no interface or address of this host, which has .*lo"):
        own_address(name, option="--x")


def test_who_is_found_by_an_address_listens_there() -> None:
    def listen(given: str, interface: str | None) -> str:
        return listening_address(given, interface, option="--x")

    assert listen("127.0.0.3", None) == "127.0.0.3"
    assert listen("localhost", None) == "127.0.0.1"
    for name in ("no.such.host.invalid", "head..of.all"):
        with pytest.raises(ConfigError, match=f"--x is '{name}', which is no known host"):
            listen(name, None)
    assert listen("127.0.0.1", "lo") == "127.0.0.1"
    assert listen("localhost", "127.0.0.2") == "127.0.0.2"
    with pytest.raises(ConfigError, match=r"with the address 127.0.0.2, and other nodes look for this one at 10.9.8.7"):
        listen("10.9.8.7", "127.0.0.2")
    with pytest.raises(ConfigError, match="--node-interface is 'eth99', no interface or address of this host"):
        listen("127.0.0.1", "eth99")


def test_the_way_to_a_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for name in ("no.such.host.invalid", "head..of.all"):
        with pytest.raises(ConfigError, match=f"no way to '{name}'"):
            address_towards(name)


def test_ipv4_comes_before_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"both": [socket.AF_INET6, socket.AF_INET], "new": [socket.AF_INET6]}
    loopback = {socket.AF_INET: ("127.0.0.1", 9), socket.AF_INET6: ("::1", 9, 0, 0)}

    def find(host: str, *args: object, **kwargs: object) -> list[tuple[Any, ...]]:
        return [(family, socket.SOCK_DGRAM, 0, "", loopback[family]) for family in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    assert [listening_address(host, None, option="--x") for host in hosts] == ["127.0.0.1", "::1"]
    assert [is_ipv6(host) for host in hosts] == [False, True]


def test_nodes_of_one_host_have_names_of_their_own() -> None:
    first = node_name("127.0.0.1")
    for host in ("127.0.0.1", "localhost"):
        second = node_name("127.0.0.1", joins=host)
        assert second != first
        assert f"process {os.getpid()} (127.0.0.1)" in second
    for host in ("127.0.0.2", "192.0.2.1", "no.such.host.invalid"):
        assert node_name("127.0.0.1", joins=host) == first


def test_urls() -> None:
    assert tcp_url("10.0.0.1", 80) == "tcp://10.0.0.1:80"
    for host in ("::1", "[::1]"):
        assert tcp_url(host, 80) == "tcp://[::1]:80"
        assert listening_address(host, None, option="--x") == "::1"
        assert address_towards(host) == "::1"
        assert is_ipv6(host)
