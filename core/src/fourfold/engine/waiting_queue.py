"""Waiting requests in policy order. An operation's cost grows with the logarithm of the queue, not with the queue."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from fourfold.engine.request import Request, Status


class WaitingQueue:
    """A heap whose withdrawn entries are dropped when they surface, or all at once when they outnumber the rest."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._num_withdrawn = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_withdrawn

    def push(self, request: Request) -> None:
        """Add a waiting request."""
        heappush(self._heap, (request.order, request))

    def first(self) -> Request | None:
        """The request to admit next; it stays."""
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.status is Status.WAITING:
                return request
            heappop(heap)
            self._num_withdrawn -= 1
        return None

    def pop(self) -> None:
        """Take out what ``first`` returned."""
        heappop(self._heap)

    def withdraw(self) -> None:
        """Account for a request of the queue whose status was just changed to something else."""
        self._num_withdrawn += 1
        if self._num_withdrawn > 64 + len(self):
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapify(self._heap)
            self._num_withdrawn = 0
