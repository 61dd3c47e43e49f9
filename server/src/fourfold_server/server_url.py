"""The URL of a server as users write it, for the commands that talk to one. Opens no connection."""

from __future__ import annotations

from urllib.parse import urlsplit

from fourfold.errors import ConfigError

_API = "/v1"
"""The API's root, which OpenAI's clients want at the end and we add ourselves."""


def read_url(text: str) -> str:
    """``--url`` without what follows the server's own path: no slash, no /v1. Raises ConfigError."""
    url = text.strip()
    if "://" not in url:
        raise ConfigError(f"--url is {text!r}, without http:// or https://; write http://{url or '127.0.0.1:8000'}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # a port that is no number, brackets that do not close
        raise ConfigError(f"--url is {text!r}: {error}; such as http://127.0.0.1:8000") from error
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"--url is {text!r}; such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix(_API).rstrip("/")
