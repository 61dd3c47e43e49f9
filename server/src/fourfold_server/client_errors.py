"""What went wrong between a command and the server it talks to, in words. Knows no HTTP library."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_SHOWN = 500
"""Characters of an answer that is no error object."""


def describe_answer(status: int, content: bytes) -> str:
    """An answer whose status is no success."""
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = content.decode(errors="replace").strip()[:_SHOWN] or "the answer is empty"
    return f"{message} (status {status})"


def describe_connection(error: BaseException, *, secure: bool) -> str:
    """A connection that did not come about, or broke; ``secure``: over https. No stop at the end."""
    if _find(error, ConnectionRefusedError) is not None:
        return "nothing listens there; start a server: fourfold serve"
    cause = _find(error, ssl.SSLError)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}); "
            "set SSL_CERT_FILE to a PEM file with the certificate that signed it"
        )
    if cause is not None:
        reason, _, _ = str(cause).partition(" (_ssl")
        return f"TLS failed ({reason}); is it an http:// server?"
    text = str(error).strip().rstrip(".;:") or type(error).__name__
    if isinstance(error, asyncio.IncompleteReadError) or text.startswith("Server disconnected"):
        return "it closed the connection before its answer ended" + ("" if secure else "; is it an https:// server?")
    return text


def _find(error: BaseException | None, kind: type[E]) -> E | None:
    """The first of ``kind`` among what led to ``error``: libraries wrap it, some more than once."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None
