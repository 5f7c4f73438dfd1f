"""Which request has which row of the workers' state."""

from __future__ import annotations

import heapq


class RowAllocator:
    """Lends rows 0 .. num_rows - 1, the lowest free one first.

    A row given back may be lent again at once: the plan that lends it names it as freed, and workers apply that first.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be lent."""
        return len(self._free)

    def allocate(self) -> int:
        """Lends a row; there must be a free one."""
        return heapq.heappop(self._free)

    def free(self, row: int) -> None:
        """Takes a row back."""
        heapq.heappush(self._free, row)
        self._freed.append(row)

    def pop_freed(self) -> list[int]:
        """The rows given back since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def check_integrity(self, lent: list[int]) -> None:
        """Raises AssertionError unless every row is either free or in `lent`, once."""
        assert sorted([*self._free, *lent]) == list(range(self.num_rows)), f"free {self._free}, lent {lent}"
