from __future__ import annotations

from typing import Any

import pytest

from fourfold.config.field_docs import field_docs
from fourfold.errors import ConfigError
from fourfold_server.config import ServerConfig


def test_defaults_are_local_and_every_field_has_a_doc() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.on_failure) == ("127.0.0.1", 8000, "restart")
    assert set(field_docs(ServerConfig)) == set(ServerConfig.__slots__)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"host": ""}, "--host is empty"),
        ({"port": -1}, "--port is -1"),
        ({"port": 65536}, "--port is 65536"),
        ({"api_key": "  "}, "--api-key is empty"),
        ({"api_key": "secret\n"}, "--api-key has control characters, or spaces at an end"),
        ({"api_key": "sec\x01ret"}, "--api-key has control characters"),
        ({"max_body_bytes": 10}, "--max-body-bytes is 10"),
        ({"ssl_keyfile": "/k"}, "HTTPS needs both"),
        ({"ssl_certfile": "/no/cert", "ssl_keyfile": "/no/key"}, "--ssl-certfile is '/no/cert', which is no file"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerConfig(**values)
