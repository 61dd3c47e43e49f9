from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from fourfold.distributed.store import host_store, open_store
from fourfold.nodes.addresses import tcp_url


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_may_come_before_the_store_is_there(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    url = tcp_url(address, listener.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(open_store, url, world_size=2, timeout=10.0)
        hosted = host_store(listener, timeout=10.0)
        hosted.set("key", "value")
        assert early.result(10).get("key") == b"value"
