"""Threads for text work, so that the event loop never waits for a tokenizer or a template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from fourfold.errors import RequestError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

NUM_THREADS = 2
MAX_WAITING = 1024
"""Jobs at once; one more refuses its request."""


class TextPool:
    """A bounded pool; each job belongs to one HTTP request."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_jobs = 0

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Call ``function`` in a thread. Raises RequestError with status 503 when too many calls wait."""
        if self._num_jobs >= MAX_WAITING:
            raise RequestError(f"{self._num_jobs} requests wait to be tokenized; try again later", status=503)
        self._num_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))
        finally:
            self._num_jobs -= 1

    def close(self) -> None:
        """End the threads; jobs that have not begun are dropped. Twice is harmless."""
        self._executor.shutdown(wait=True, cancel_futures=True)
