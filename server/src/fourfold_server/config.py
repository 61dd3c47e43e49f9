"""What the HTTP server is started with; the engine knows nothing of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fourfold.errors import ConfigError
from fourfold_server.adapter_name import fault_of_name

LogLevel = Literal["debug", "info", "warning", "error"]
OnFailure = Literal["restart", "exit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP server and what it does about failures."""

    host: str = "127.0.0.1"
    """Address to listen on; :: or 0.0.0.0 listen on all."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which the log names."""
    api_server_count: int | None = None
    """Processes that answer on the port; by default one a replica."""
    api_key: str | None = None
    """Key that clients must send as a bearer token; the probes stay open."""
    ssl_certfile: str | None = None
    """PEM file with the certificate chain; serves HTTPS."""
    ssl_keyfile: str | None = None
    """PEM file with the certificate's key."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters to begin with, each as NAME=FOLDER; clients name them as their model. Needs --enable-lora."""
    strict_fields: bool = False
    """Whether request fields that are not known are refused in place of ignored."""
    strict_max_tokens: bool = False
    """Whether a max_tokens beyond the context is refused in place of cut."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Bytes of a request body at most."""
    on_failure: OnFailure = "restart"
    """What to do when an engine dies: restart it, or exit with a status that is not 0."""
    log_level: LogLevel = "info"
    """The least severe messages that are logged."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("--host is empty; give an address such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; from 0 to 65535")
        if self.api_server_count is not None and self.api_server_count < 1:
            raise ConfigError(f"--api-server-count is {self.api_server_count}; 1 or more")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty; give a key, or leave the option out")
        if self.api_key is not None and (self.api_key != self.api_key.strip() or not self.api_key.isprintable()):
            # No HTTP header carries such a key. It is not shown, being a secret.
            raise ConfigError("--api-key has control characters, or spaces at an end (a line break, say); remove them")
        for item, (name, folder) in zip(self.lora_modules, self.adapters, strict=True):
            if not name or not folder:
                raise ConfigError(f"--lora-modules has {item!r}; a name and a folder, as in sql=/adapters/sql")
            fault = fault_of_name(name)
            if fault is not None:
                raise ConfigError(f"--lora-modules: the name {name!r:.100} {fault}")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes is {self.max_body_bytes}; 1024 or more")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
        for option, file in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"{option} is {file!r}, which is no file")

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Name and folder of each of ``lora_modules``."""
        parts = [item.partition("=") for item in self.lora_modules]
        return [(name.strip(), folder.strip()) for name, _, folder in parts]
