"""Names the part of a plugin that breaks, so that a stranger's traceback becomes an error that says what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.errors import FourfoldError, PluginError


@contextmanager
def blame(part: str) -> Iterator[None]:
    """Raise PluginError that names ``part``, as in ``tokenizer 'mine'``; what it refuses on purpose passes."""
    try:
        yield
    except FourfoldError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"{part} raised {type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno}, in "
            f"{frame.name}); repair or uninstall its plugin"
        ) from error
