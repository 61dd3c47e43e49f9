"""Whether this machine can run the kernels. Knows nothing of torch, and does not load triton."""

from __future__ import annotations

from importlib.util import find_spec

from fourfold.config.resolution import accelerator


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, with what to do; None where they can."""
    if accelerator() != "cuda":
        return "runs on a cuda device, and this host has none"
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return None
