from __future__ import annotations

import socket

import pytest

from fourfold.errors import ConfigError
from fourfold_server.listening_socket import listen, url_of


def test_a_used_port_is_refused_by_name() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: address already in use; stop what"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


def test_it_listens_at_once() -> None:
    with listen("localhost", 0) as listener, socket.create_connection(listener.getsockname()[:2], timeout=5):
        pass


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
def test_urls(host: str, url: str) -> None:
    try:
        listener = listen(host, 0)
    except ConfigError as error:
        pytest.skip(f"no such address here: {error}")
    with listener:
        assert url_of(listener, secure=False) == f"{url}{listener.getsockname()[1]}"
        assert url_of(listener, secure=True).startswith("https://")


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("no.such.host.invalid", "--host is 'no.such.host.invalid', which is no address of this machine"),
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: cannot assign requested address; choose a --host of this machine"),
    ],
)
def test_a_foreign_host_is_refused(host: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        listen(host, 0)


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="which is no host name; give an address"):
        listen(host, 0)
