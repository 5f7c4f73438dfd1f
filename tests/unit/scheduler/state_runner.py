"""A fake runner of a model with sequence states.

A state slot holds the exact tokens that its state has consumed. A row that reads a slot whose tokens are not its own
tokens before its position has read a wrong state. Rows of one step run at the same time: none may write to a slot that
another row reads or writes.
"""

from __future__ import annotations

from typing import Any

from mvllm.messages.scheduler_output import SchedulerOutput
from tests.unit.scheduler.fake_runner import GARBAGE, POISON, FakeRunner, _Row


class StateRunner(FakeRunner):
    """Executes plans, and follows the states.

    Attributes:
        states: The adapter and the tokens in each slot; POISON if a failing row has written it, GARBAGE if a row that
            read a wrong state has.
        host_states: Likewise, in each host block of states.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.states: dict[int, object] = {}
        self.host_states: dict[int, object] = {}
        self.taken_host_states: dict[int, bool] = {}
        self._reads: dict[int, object] = {}  # row -> the state that it reads in this step
        self._writes: dict[int, list[int]] = {}  # row -> slots behind the known tokens and behind each draft token

    def _copy(self, plan: SchedulerOutput) -> None:
        super()._copy(plan)
        for slot, index in zip(plan.saved_states, plan.saved_host_states, strict=True):
            assert index not in self.taken_host_states, "a plan writes a host block that a connector uses"
            self.host_states[index] = self.states[slot]
        for slot, index in zip(plan.loaded_states, plan.loaded_host_states, strict=True):
            assert not self.taken_host_states.get(index), "a plan reads a host block that a connector fills"
            self.states[slot] = self.host_states[index]

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        reads, writes = plan.read_slots, [[slot] for slot in plan.write_slots]
        assert len(reads) == len(writes) == len(plan.rows)
        assert plan.draft_slots.keys() == plan.draft_token_ids.keys()
        for position, slots in plan.draft_slots.items():
            assert len(slots) == len(plan.draft_token_ids[position])
            writes[position] += slots
        every = [slot for slots in writes for slot in slots]
        assert all(slot >= 0 for slot in every) and len(set(every)) == len(every), "a slot is written twice"
        for i, slot in enumerate(reads):
            if slot in every:
                assert slot == plan.write_slots[i], f"slot {slot} is read, and written for other tokens"
        for slot, row in zip(reads, plan.rows, strict=True):
            assert slot >= 0 or not self.rows[row].num_computed, "the state in the middle of a sequence is zeros"
        self._reads = {
            row: self.states.get(slot) if slot >= 0 else (self._adapter(self.rows[row]), [])
            for slot, row in zip(reads, plan.rows, strict=True)
        }
        self._writes = dict(zip(plan.rows, writes, strict=True))

    def _adapter(self, row: _Row) -> int:
        return 0 if row.data.lora_request is None else row.data.lora_request.lora_int_id

    def _read(self, row: _Row, count: int) -> list[tuple[int, int, int | None]]:
        """Also the state, as an entry of the first computed position."""
        found, first = super()._read(row, count), row.num_computed - count
        state = self._reads[row.data.row]
        if state == POISON:
            found.append((first, 0, POISON))
        elif state != (self._adapter(row), row.tokens[:first]):
            found.append((first, 0, None))
        return found

    def _spread_poison(self, plan: SchedulerOutput) -> None:
        super()._spread_poison(plan)
        for number, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
            row, slots, content = self.rows[number], self._writes[number], None
            if row.data.request_id in self.failing or any(found == POISON for _, _, found in self._read(row, count)):
                content = POISON
            elif row.reads_garbage:
                content = GARBAGE
            for behind, slot in enumerate(slots, row.num_computed + 1 - len(slots)):
                self.states[slot] = content or (self._adapter(row), row.tokens[:behind])
