"""A fake runner of a model with sequence states.

A state slot holds the exact tokens that its state has consumed. A row that reads a slot whose tokens are not its own
tokens before its position has read a wrong state. Rows of one step run at the same time: none may write to a slot that
another row reads or writes.
"""

from __future__ import annotations

from typing import Any

from mvllm.messages.scheduler_output import BEHIND_ACCEPTED, SchedulerOutput
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
        self._behind: dict[int, dict[int, int]] = {}  # row -> the slots of its last step, by the tokens before them
        self._writes: dict[int, list[int]] = {}  # row -> slots behind the known tokens and behind each draft token

    def _copy(self, plan: SchedulerOutput) -> None:
        super()._copy(plan)
        for slot, index in zip(plan.saved_states, plan.saved_host_states, strict=True):
            assert index not in self.taken_host_states, "a plan writes a host block that a connector uses"
            self.host_states[index] = self.states[slot]
        for slot, index in zip(plan.loaded_states, plan.loaded_host_states, strict=True):
            assert not self.taken_host_states.get(index), "a plan reads a host block that a connector fills"
            self.states[slot] = self.host_states[index]

    def _fill_placeholders(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Also the slots, of which it checks how rows use them."""
        assert plan.draft_slots.keys() == plan.draft_token_ids.keys()
        for position, slots in plan.draft_slots.items():
            assert len(slots) == len(plan.draft_token_ids[position])
        every = [*plan.write_slots, *(slot for slots in plan.draft_slots.values() for slot in slots)]
        assert all(slot >= 0 for slot in every) and len(set(every)) == len(every), "a slot is written twice"
        assert len(plan.read_slots) == len(plan.write_slots) == len(plan.rows)
        filled = super()._fill_placeholders(plan)
        reads = list(plan.read_slots)
        for i, number in enumerate(plan.rows):
            if reads[i] == BEHIND_ACCEPTED:
                assert self.keeps_drafts
                reads[i] = self._behind[number][self.rows[number].num_computed]
            if reads[i] in every:
                assert reads[i] == plan.write_slots[i], f"slot {reads[i]} is read, and written for other tokens"
            assert reads[i] >= 0 or not self.rows[number].num_computed, "the state in the middle of a sequence is zeros"
        slots = {at: plan.draft_slots[at][: len(drafts)] for at, drafts in filled.draft_token_ids.items()}
        self._reads = {
            row: self.states.get(slot) if slot >= 0 else (self._adapter(self.rows[row]), [])
            for slot, row in zip(reads, plan.rows, strict=True)
        }
        self._writes = {
            row: [slot, *slots.get(at, ())]
            for at, (row, slot) in enumerate(zip(plan.rows, plan.write_slots, strict=True))
        }
        return filled

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
            self._behind[number] = {}
            for behind, slot in enumerate(slots, row.num_computed + 1 - len(slots)):
                self.states[slot] = content or (self._adapter(row), row.tokens[:behind])
                self._behind[number][behind] = slot
