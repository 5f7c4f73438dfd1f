"""What the workers' encoder caches hold: results of encoders by the content hash of their items, sized in rows.

    in use    at least one user; never dropped
    unused    nobody's; the least recently used is dropped first when room is needed

The scheduler decides, and workers follow (`SchedulerOutput.encoder_inputs`, `freed_encoder_outputs`), so all of them
hold the same.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection


class EncoderCache:
    """Owner of the encoder cache's contents.

    Args:
        num_rows: Most rows of all results together.

    Attributes:
        num_rows: As given.
        num_available: Rows that new results may take: free ones, and those of unused results.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_available = num_rows
        self._rows: dict[bytes, int] = {}
        self._num_users: dict[bytes, int] = {}  # of results in use
        self._unused: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._num_held = 0
        self._freed: list[bytes] = []

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._rows

    @property
    def num_held(self) -> int:
        """Rows of all results."""
        return self._num_held

    def is_unused(self, content_hash: bytes) -> bool:
        """Whether the result is there and nobody's, so that its rows are among those available."""
        return content_hash in self._unused

    def add(self, content_hash: bytes, num_rows: int) -> None:
        """Adds a result with one user, and drops unused ones until it fits. `num_rows` must be available."""
        assert content_hash not in self._rows and num_rows <= self.num_available
        while self._num_held + num_rows > self.num_rows:
            self._remove(next(iter(self._unused)))
        self._rows[content_hash] = num_rows
        self._num_users[content_hash] = 1
        self._num_held += num_rows
        self.num_available -= num_rows

    def acquire(self, content_hash: bytes) -> None:
        """Adds a user of a result that is there."""
        if content_hash in self._unused:
            del self._unused[content_hash]
            self._num_users[content_hash] = 1
            self.num_available -= self._rows[content_hash]
        else:
            self._num_users[content_hash] += 1

    def release(self, content_hash: bytes) -> None:
        """Removes a user."""
        self._num_users[content_hash] -= 1
        if not self._num_users[content_hash]:
            del self._num_users[content_hash]
            self._unused[content_hash] = None
            self.num_available += self._rows[content_hash]

    def drop(self, content_hash: bytes) -> None:
        """Drops an unused result."""
        self._remove(content_hash)

    def drop_unused(self) -> bool:
        """Drops all unused results. Returns whether none is left."""
        for content_hash in list(self._unused):
            self._remove(content_hash)
        return not self._rows

    def clear(self) -> None:
        """Drops all results. Nobody uses any after that, and must not release them."""
        self._freed += self._rows
        self._rows.clear()
        self._num_users.clear()
        self._unused.clear()
        self._num_held, self.num_available = 0, self.num_rows

    def pop_freed(self) -> list[bytes]:
        """The results dropped since the last call. Some of them may have been added again."""
        freed, self._freed = self._freed, []
        return freed

    def check_integrity(self, users: Counter[bytes], named: Collection[bytes] = ()) -> None:
        """Raises AssertionError unless counts and sizes agree, `users` are those of each result, and those `named` are
        here or freed."""
        assert set(named) <= self._rows.keys() | set(self._freed)
        assert self._num_users == dict(users), f"users {dict(users)}, counted {self._num_users}"
        assert self._rows.keys() == self._num_users.keys() | self._unused.keys()
        assert not self._num_users.keys() & self._unused.keys()
        assert self._num_held == sum(self._rows.values()) <= self.num_rows
        assert self.num_available == self.num_rows - sum(self._rows[each] for each in self._num_users)

    def _remove(self, content_hash: bytes) -> None:
        del self._unused[content_hash]
        self._num_held -= self._rows.pop(content_hash)
        self._freed.append(content_hash)
