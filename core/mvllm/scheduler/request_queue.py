"""The queue of waiting requests, in service order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mvllm.scheduler.request import Request


class RequestQueue:
    """A heap by `Request.order` from which any request can be removed.

    A removed request stays in the heap as a dead entry until it reaches the top, or until dead entries outnumber the
    others.

    Attributes:
        num_tokens: Tokens of all requests together.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._heap: list[tuple[tuple[int, int], Request]] = []  # (order, request): compared without a call of Python
        self._alive: set[Request] = set()

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._alive)

    def push(self, request: Request) -> None:
        """Adds a request that is not in the queue."""
        assert request not in self._alive
        heapq.heappush(self._heap, (request.order, request))
        self._alive.add(request)
        self.num_tokens += request.num_tokens

    def peek(self) -> Request:
        """The first request; the queue must not be empty."""
        while self._heap[0][1] not in self._alive:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Removes and returns the first request; the queue must not be empty."""
        request = self.peek()
        heapq.heappop(self._heap)
        self._alive.remove(request)
        self.num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Removes any request."""
        self._alive.remove(request)
        self.num_tokens -= request.num_tokens
        if len(self._heap) > 2 * len(self._alive) + 16:
            self._heap = [(request.order, request) for request in self._alive]
            heapq.heapify(self._heap)
