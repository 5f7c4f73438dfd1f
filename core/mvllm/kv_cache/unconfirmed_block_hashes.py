"""Block hashes set by plans whose results are not back, and the requests that share blocks by these hashes.

A block gets its hash when a plan is made that writes it, so that requests planned next can share it. Until the results
of that plan are back the hash is *unconfirmed*: the step may fail. Each plan has a record of the hashes set while it
was made and of the tables that read by them. The record is dropped with the results of its plan; if a request fails
before, the records tell which tables depend on it.

    plan        5                6                  7, being made
    writers     {4: A, 9: A}     {2: B}             {}
    readers     {A: [B]}         {B: [C]}           {}            A fails: B read A's blocks, and C read B's

State slots with snapshots (`state_slots.py`) are recorded like blocks: slot s has the number ~s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from mvllm.kv_cache.block_table import BlockTable


class _PlanBlockHashes:
    """The record of one plan.

    Attributes:
        step: The plan's step.
        writers: Block to the table that set its hash while the plan was made, or after the previous plan.
        readers: Writer table to the tables that share its blocks of `writers`.
    """

    __slots__ = ("readers", "step", "writers")

    def __init__(self) -> None:
        self.step = -1
        self.writers: dict[int, BlockTable] = {}
        self.readers: dict[BlockTable, list[BlockTable]] = {}


class UnconfirmedBlockHashes:
    """The records of plans in flight that set hashes, and of the plan that is being made or comes next.

    Most decode steps of few requests set no hash. They have no record, and cost a check of `writers` and
    `pending_plans`.

    Attributes:
        writers: Block to table, of the plan that is being made. KVCacheManager adds each hashed block.
        pending_plans: The records, oldest first.
    """

    def __init__(self) -> None:
        self._current = _PlanBlockHashes()
        self.writers = self._current.writers
        self.pending_plans: deque[_PlanBlockHashes] = deque()

    def end_plan(self, step: int) -> None:
        """Closes the record of a complete plan. Not needed if the plan set no hash."""
        self._current.step = step
        self.pending_plans.append(self._current)
        self._current = _PlanBlockHashes()
        self.writers = self._current.writers

    def pop_confirmed(self, step: int) -> Iterator[Mapping[int, BlockTable]]:
        """Drops the records up to a plan whose results are back and whose failed requests were discarded.

        Yields:
            The `writers` of each, when it has been dropped.
        """
        while self.pending_plans and self.pending_plans[0].step <= step:
            yield self.pending_plans.popleft().writers

    @property
    def records(self) -> list[_PlanBlockHashes]:
        """All records, oldest first."""
        return [*self.pending_plans, self._current]

    def record_reader(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        """Records that `table` shares these blocks."""
        for record in self.records:
            names = record.writers
            if not names.keys().isdisjoint(block_ids):
                for writer in {names[block] for block in block_ids if block in names}:
                    record.readers.setdefault(writer, []).append(table)

    def dependents(self, tables: Collection[BlockTable]) -> list[BlockTable]:
        """Tables that share unconfirmed blocks of `tables`, or of one of their dependents; without `tables`.

        The order is the same on all ranks that make the same plans.
        """
        known = set(tables)
        writers, found = list(tables), []
        for writer in writers:  # which gets longer
            for record in self.records:
                for reader in record.readers.get(writer, ()):
                    if reader not in known:
                        known.add(reader)
                        writers.append(reader)
                        found.append(reader)
        return found
