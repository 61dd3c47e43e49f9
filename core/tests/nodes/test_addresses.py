"""Names of interfaces and addresses of this host."""

from __future__ import annotations

import pytest

from fourfold.errors import ConfigError
from fourfold.nodes.addresses import address_towards, own_address, tcp_url


def test_an_interface_or_an_address_of_this_host() -> None:
    assert own_address("lo", option="--x") == "127.0.0.1"
    assert own_address("127.0.0.2", option="--x") == "127.0.0.2"


@pytest.mark.parametrize("name", ["eth99", "203.0.113.7", "nonsense"])
def test_what_is_not_here_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--x is '{name}', no interface or address of this host, which has .*lo"):
        own_address(name, option="--x")


def test_the_way_to_a_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"no way to 'no\.such\.host\.invalid'"):
        address_towards("no.such.host.invalid")


def test_urls() -> None:
    assert tcp_url("10.0.0.1", 80) == "tcp://10.0.0.1:80"
    assert tcp_url("::1", 80) == "tcp://[::1]:80"
