"""Block names given by plans whose results are not back, and the requests that found blocks by these names.

A block gets its name when a plan is made that writes it, so that requests planned next can share it. Until the results
of that plan are back the name is *unconfirmed*: the step may fail. Each plan has a record of the names given while it
was made and of the tables that read under them. The record is dropped with the results of its plan; if a request fails
before, the records say who depends on what it should have written.

    plan        5                6                  7, being made
    names       {4: A, 9: A}     {2: B}             {}
    readers     {A: [B]}         {B: [C]}           {}            A fails: B read A's blocks, and C read B's
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from mvllm.kv_cache.block_table import BlockTable


class _PlanBlockHashes:
    """Of one plan.

    Attributes:
        step: Its number.
        names: Block to the table that named it while the plan was made, or after the plan before.
        readers: Table to the tables that share a block of `names` that it named.
    """

    __slots__ = ("readers", "step", "writers")

    def __init__(self) -> None:
        self.step = -1
        self.writers: dict[int, BlockTable] = {}
        self.readers: dict[BlockTable, list[BlockTable]] = {}


class UnconfirmedBlockHashes:
    """The records of plans under way that gave names, and of the plan that is being made or comes next.

    Most steps of a decoding batch of few requests name nothing. They have no record, and cost a look at `names` and
    `under_way`.

    Attributes:
        names: Block to table, of the plan that is being made: whoever names a block writes it down here.
        under_way: The records, oldest first.
    """

    def __init__(self) -> None:
        self._current = _PlanBlockHashes()
        self.writers = self._current.writers
        self.pending_plans: deque[_PlanBlockHashes] = deque()

    def end_plan(self, step: int) -> None:
        """The plan of that number is complete and will be executed. Not needed where it gave no names."""
        self._current.step = step
        self.pending_plans.append(self._current)
        self._current = _PlanBlockHashes()
        self.writers = self._current.writers

    def confirm(self, step: int) -> None:
        """The results of the plan of that number are back, and what has failed in it was discarded."""
        while self.pending_plans and self.pending_plans[0].step <= step:
            self.pending_plans.popleft()

    @property
    def records(self) -> list[_PlanBlockHashes]:
        """All records, oldest first."""
        return [*self.pending_plans, self._current]

    def record_reader(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        """`table` shares these blocks, which it has found by their names."""
        for record in self.records:
            names = record.writers
            if not names.keys().isdisjoint(block_ids):
                for writer in {names[block] for block in block_ids if block in names}:
                    record.readers.setdefault(writer, []).append(table)

    def dependents(self, tables: Collection[BlockTable]) -> list[BlockTable]:
        """The tables that share unconfirmed blocks of `tables`, or of one of their dependents; without `tables`.

        In an order that every rank finds which makes the same plans.
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
