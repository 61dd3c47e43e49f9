"""The size table of an earlier start, in the user's cache folder; one that cannot be kept is no error."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Final

from fourfold.errors import EngineError
from fourfold_comm_nccl.size_table import SizeTable

log = logging.getLogger(__name__)

_KERNELS: Final = ("all_reduce_kernels.py", "autotune.py", "custom_all_reduce.py", "region.py", "signal_kernels.py")
"""What a table measured; when one of them changes, it is measured anew."""


class TableCache:
    """One table, for one setting."""

    def __init__(self, *setting: object) -> None:
        """``setting``: what else the times depend on, such as the device's name and the number of ranks."""
        digest = hashlib.sha256("\0".join(map(str, setting)).encode())
        for name in _KERNELS:
            digest.update((Path(__file__).parent / name).read_bytes())
        self._path: Path | None = None
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            folder = Path(base) if base else Path.home() / ".cache"
        except RuntimeError:  # no HOME, and a user id without a name, as in a container
            return
        self._path = folder / "fourfold" / "all_reduce" / f"{digest.hexdigest()[:20]}.json"

    def read(self) -> SizeTable | None:
        """None: not measured yet, or not readable."""
        if self._path is None:
            return None
        try:
            return SizeTable.decode(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, EngineError) as error:
            log.warning("the table of all-reduce times in %s is not used: %s", self._path, error)
            return None

    def write(self, table: SizeTable) -> None:
        """Keep it; several may do so at once."""
        if self._path is None:
            return
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(table.encode(), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            log.warning("the table of all-reduce times is not kept: %s", error)
