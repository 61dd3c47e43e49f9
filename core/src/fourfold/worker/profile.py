"""A torch profile of one rank, from construction to ``stop``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profile:
    """Starts at once. Start and stop belong to one thread."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{rank}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> Path:
        """End it and write the trace, as chrome://tracing and Perfetto read it."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return self._path
