"""A model runner without a model: tokens are a pure function of the previous tokens, and KV is checked when it is read.

It implements the worker's side of the contract strictly: it knows only plans, has its own rows, and appends its own
samples. The "KV" of a position is a fingerprint of all tokens up to it; before sampling, the runner reads every slot of
the row through the block table and checks the fingerprints. This detects a wrong block table, a stale cache hit, an
overwritten shared block or a confused row.

Each group of layers writes its own fingerprints, and reads only within its window.

A step without memory writes nothing. A request that reads a slot that this step should have written samples
`WRONG_TOKEN` and writes garbage, which must have no effect. The same holds for rows that compute without a missing
adapter.

The token of a row with a companion depends on the fingerprints of both. Both must sample in the same step, and get the
same token.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import PLACEHOLDER, ModelRunnerOutput, NewRequestData, SchedulerOutput

VOCAB_SIZE = 50

COMBINER, COMBINER_SETTINGS = "test", b"settings"
"""What companions name, see `pair_token`."""

GROUP = 1 << 40
"""Difference between the fingerprints of two groups of layers."""

SCRAWL = -2
"""Content of a slot written for a draft token."""

GARBAGE = -3
"""Content that a row writes after it has read slots of another request."""

WRONG_TOKEN = 10_000
"""Token that such a row samples."""

POISON = -1
"""Content that a failing row writes, and every row that reads it: like NaN, it spreads."""


def fingerprints(token_ids: list[int], start: int = 7) -> list[int]:
    """One number per position, which depends on all tokens up to it."""
    found = []
    for token in token_ids:
        start = (start * 1_000_003 + token + 1) % 2_147_483_647
        found.append(start)
    return found


def next_token(fingerprint: int) -> int:
    return fingerprint // 17 % VOCAB_SIZE


def pair_token(own: int, other: int) -> int:
    """The token of a pair with these fingerprints."""
    return next_token(3 * own + other)


def first_print(lora_int_id: int) -> int:
    """The initial fingerprint of an adapter, or of none."""
    return 7 + 100 * lora_int_id


def expected_tokens(
    prompt: list[int],
    params: SamplingParams,
    eos: list[int],
    max_model_len: int,
    lora_int_id: int = 0,
    companion: list[int] | None = None,
) -> list[int]:
    """The tokens that a request generates, independent of the schedule."""
    tokens, start = list(prompt), first_print(lora_int_id)
    longest = max_model_len - max(0, len(companion or []) - len(prompt))
    stops = {*([] if params.ignore_eos else eos), *(params.stop_token_ids or [])}
    while True:
        own = fingerprints(tokens, start)[-1]
        if companion is None:
            tokens.append(next_token(own))
        else:
            tokens.append(pair_token(own, fingerprints(companion + tokens[len(prompt) :], start)[-1]))
        num_output = len(tokens) - len(prompt)
        if tokens[-1] in stops and num_output >= params.min_tokens:
            break
        if len(tokens) == longest or num_output == params.max_tokens:
            break
    return tokens[len(prompt) :]


def vector_of(prompt: list[int]) -> bytes:
    """The embedding of a prompt in this runner."""
    return str(fingerprints(prompt)[-1]).encode()


def logprobs_of(token: int) -> PositionLogprobs:
    return PositionLogprobs(token_ids=[token], logprobs=[-float(token)], rank=token + 1)


class _Row:
    def __init__(self, data: NewRequestData, lora_int_id: int) -> None:
        self.data = data
        self.tokens = list(data.token_ids)
        self.prints = fingerprints(self.tokens, first_print(lora_int_id))
        self.reads_garbage = False
        self.has_failed = False
        self.tables = [list(table) for table in (data.block_ids, *data.more_block_ids)]
        self.num_computed = data.num_computed_tokens
        self.num_drafts = 0  # the last of `tokens`, while a step verifies them
        self.pooled: list[int] = []
        self.drafts: list[int] = []  # for a plan with placeholders

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.prints.extend(fingerprints([token], self.prints[-1]))

    def verify_drafts(self) -> list[int]:
        """The sampled token and the accepted draft tokens; drops the draft tokens."""
        known, drafts = len(self.tokens) - self.num_drafts, self.tokens[len(self.tokens) - self.num_drafts :]
        found = [next_token(self.prints[known - 1])]
        while len(found) <= len(drafts) and found[-1] == drafts[len(found) - 1]:
            found.append(next_token(self.prints[known - 1 + len(found)]))
        self.drop_drafts()
        self.num_computed += len(found) - 1
        return found

    def drop_drafts(self) -> None:
        known = len(self.tokens) - self.num_drafts
        del self.tokens[known:], self.prints[known:]
        self.num_computed, self.num_drafts = min(self.num_computed, known), 0


class FakeRunner:
    """Executes plans.

    Attributes:
        failing: Ids of requests whose row fails in every step, and writes garbage KV.
        steps_without_memory: Numbers of steps that fail completely.
        missing_adapters: Ids of adapters that cannot be loaded: their rows report it, and compute without the adapter.
        num_computed: Tokens computed so far, by request id.
        propose: Proposes draft tokens for a row; None without speculative decoding.
        keeps_drafts: Plans may have placeholders of the draft tokens.
        host: Contents of each host block.
        taken_host: Host blocks that a connector fills (True) or reads (False).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.windows = windows
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.failing: set[str] = set()
        self.steps_without_memory: set[int] = set()
        self.missing_adapters: set[int] = set()
        self.may_read_garbage = False
        self.num_computed: dict[str, int] = {}
        self.propose: Callable[[list[int]], list[int]] | None = None
        self.keeps_drafts = False
        self._most_drafts: int | None = None
        self.next_step = 0
        self.host: dict[int, list[int | None]] = {}
        self.taken_host: dict[int, bool] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._copy(plan)
        self._apply(plan)
        planned, plan = plan, self._fill_placeholders(plan)
        self._most_drafts = plan.max_draft_tokens
        if plan.step in self.steps_without_memory:
            return self._fail_step(plan)
        for position, drafts in plan.draft_token_ids.items():
            self._add_drafts(self.rows[plan.rows[position]], plan.num_scheduled_tokens[position], drafts)
        for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
            self._write(self.rows[row], count)
        self._spread_poison(plan)
        output = ModelRunnerOutput(step=plan.step)
        if plan is not planned:
            output.num_draft_tokens = {position: len(drafts) for position, drafts in plan.draft_token_ids.items()}
        sampling = {row for row in plan.rows if self.rows[row].num_computed == len(self.rows[row].tokens)}
        for row, state in self.rows.items():
            if state.data.guided_row is not None:
                assert (row in sampling) == (state.data.guided_row in sampling), "one side of a pair samples alone"
                assert (state.data.combiner, state.data.combiner_settings) == (COMBINER, COMBINER_SETTINGS)
            else:
                assert not state.data.combiner, "only companions have a combiner"
        for position, (row, count) in enumerate(zip(plan.rows, plan.num_scheduled_tokens, strict=True)):
            self._read_and_sample(position, self.rows[row], count, output)
        for data in plan.new_requests:
            if data.lora_request is not None and data.lora_request.lora_int_id in self.missing_adapters:
                if data.row in plan.rows:
                    output.errors[plan.rows.index(data.row)] = "no such adapter"
        self._sample_pairs(plan, sampling, output)
        return output

    def _fill_placeholders(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the rows' own drafts instead of placeholders."""
        drafts, counts = dict(plan.draft_token_ids), list(plan.num_scheduled_tokens)
        held = {row: self.rows[row].drafts for row in plan.rows}
        for row in plan.rows:
            self.rows[row].drafts = []
        for position, planned in plan.draft_token_ids.items():
            if PLACEHOLDER in planned:
                assert set(planned) == {PLACEHOLDER} and self.keeps_drafts
                own = drafts[position] = held[plan.rows[position]][: len(planned)]
                counts[position] += len(own) - len(planned)
        if PLACEHOLDER not in {token for each in plan.draft_token_ids.values() for token in each}:
            return plan
        drafts = {position: each for position, each in drafts.items() if each}
        return msgspec.structs.replace(plan, draft_token_ids=drafts, num_scheduled_tokens=counts)

    def _copy(self, plan: SchedulerOutput) -> None:
        """Saves and loads blocks."""
        size = self.block_size
        for blocks, host_blocks in (
            (plan.saved_blocks, plan.saved_host_blocks),
            (plan.loaded_blocks, plan.loaded_host_blocks),
        ):
            assert len(set(blocks)) == len(blocks) == len(host_blocks), "a block is copied twice"
        assert len(set(plan.saved_host_blocks)) == len(plan.saved_host_blocks), "two blocks in one host block"
        for block, index in zip(plan.saved_blocks, plan.saved_host_blocks):
            assert index not in self.taken_host, "a plan writes a host block that a connector uses"
            self.host[index] = self.slots[block * size : (block + 1) * size]
        for block, index in zip(plan.loaded_blocks, plan.loaded_host_blocks):
            assert not self.taken_host.get(index), "a plan reads a host block that a connector fills"
            self.slots[block * size : (block + 1) * size] = self.host[index]

    def _sample_pairs(self, plan: SchedulerOutput, sampling: set[int], output: ModelRunnerOutput) -> None:
        for row in [row for row in plan.rows if row in sampling and self.rows[row].data.guided_row is not None]:
            companion, primary = self.rows[row], self.rows[self.rows[row].data.guided_row]
            sides = plan.rows.index(primary.data.row), plan.rows.index(row)
            token = pair_token(primary.prints[-1], companion.prints[-1])
            if not output.errors.keys().isdisjoint(sides):
                token = -1
            elif primary.reads_garbage or companion.reads_garbage:
                token = WRONG_TOKEN
            if token >= 0 and primary.data.sampling_params.logprobs is not None:
                output.logprobs[sides[0]] = logprobs_of(token)
                output.conditional_logprobs[sides[0]] = -0.5 * token
            for side, state in zip(sides, (primary, companion), strict=True):
                output.sampled_token_ids[side] = token
                state.append(max(token, 0))

    def _fail_step(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Fails a step: nothing is written, and the rows have the lengths of the plan."""
        self.may_read_garbage = True
        for position, (row, count) in enumerate(zip(plan.rows, plan.num_scheduled_tokens, strict=True)):
            state = self.rows[row]
            state.num_computed += count - len(plan.draft_token_ids.get(position, ()))
            state.has_failed = True
            if state.data.pooling_params is None and state.num_computed == len(state.tokens):
                state.append(0)
        num_rows = len(plan.rows)
        return ModelRunnerOutput(plan.step, [-1] * num_rows, errors=dict.fromkeys(range(num_rows), "no memory"))

    def _apply(self, plan: SchedulerOutput) -> None:
        assert plan.step == self.next_step
        self.next_step += 1
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens) <= self.max_num_batched_tokens
        assert len(set(plan.rows)) == len(plan.rows) <= self.max_num_seqs
        for row in plan.freed_rows:
            del self.rows[row]  # KeyError: freed twice, or never used
        for data in plan.new_requests:
            assert data.row not in self.rows, f"row {data.row} is occupied"
            assert 0 <= data.row < self.max_num_seqs
            assert data.num_computed_tokens < len(data.token_ids)
            adapter = 0 if data.lora_request is None else data.lora_request.lora_int_id
            self.rows[data.row] = _Row(data, 0 if adapter in self.missing_adapters else adapter)
            self.may_read_garbage |= adapter in self.missing_adapters
            assert len(self.rows[data.row].tables) == len(self.windows)
        for row, block in zip(plan.new_block_rows, plan.new_block_ids, strict=True):
            group, row = divmod(row, self.max_num_seqs)
            self.rows[row].tables[group].append(block)
        blocks = [block for row in self.rows.values() for table in row.tables for block in table]
        assert all(0 <= block < self.num_blocks for block in blocks), "not a block"

    def _add_drafts(self, row: _Row, count: int, drafts: list[int]) -> None:
        assert drafts and count == 1 + len(drafts), "draft tokens are scheduled behind one known token"
        assert row.num_computed + 1 == len(row.tokens), "draft tokens behind tokens that are not computed"
        for token in drafts:
            row.append(token)
        row.num_drafts = len(drafts)

    def _slot(self, row: _Row, position: int, group: int) -> int:
        block = row.tables[group][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(self, row: _Row, count: int) -> None:
        assert count >= 1
        assert row.num_computed + count <= len(row.tokens), "scheduled past the known tokens"
        for position in range(row.num_computed, row.num_computed + count):
            for group in range(len(self.windows)):
                self.slots[self._slot(row, position, group)] = row.prints[position] + group * GROUP
        row.num_computed += count
        request_id = row.data.request_id
        self.num_computed[request_id] = self.num_computed.get(request_id, 0) + count

    def _spread_poison(self, plan: SchedulerOutput) -> None:
        """Makes every row of the step that reads poison write poison, until a fixed point."""
        spreading = True
        while spreading:
            spreading = False
            for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
                spreading |= self._poison_row(self.rows[row], count)

    def _poison_row(self, row: _Row, count: int) -> bool:
        first, written_now = row.num_computed - count, POISON
        if row.data.request_id not in self.failing:
            read = self._read(row, count)
            spoilt = [p for p, _, found in read if found == POISON]
            if not spoilt:
                spoilt = [p for p, group, found in read if found != row.prints[p] + group * GROUP]
                written_now = GARBAGE
                row.reads_garbage = bool(spoilt)
                assert not spoilt or self.may_read_garbage, f"{row.data.request_id} reads KV of other tokens"
            if not spoilt:
                return False
            first = max(first, min(spoilt))
        positions, groups = range(first, row.num_computed), range(len(self.windows))
        written = [self._slot(row, position, group) for position in positions for group in groups]
        changed = any(self.slots[slot] != written_now for slot in written)
        for slot in written:
            self.slots[slot] = written_now
        return changed

    def _pool(self, position: int, row: _Row, count: int, output: ModelRunnerOutput) -> None:
        """Like a real runner, keeps the pooling state of every position from the steps that computed it."""
        assert row.data.pooling_params is not None and row.data.pooling_params.pooling_type is not None
        row.pooled += row.prints[row.num_computed - count : row.num_computed]
        if row.num_computed == len(row.tokens):
            if row.data.pooling_params.pooling_type.needs_every_position:
                assert row.has_failed or len(row.pooled) == len(row.tokens), "positions were not computed, or twice"
            output.pooler_output[position] = b"wrong" if row.reads_garbage else vector_of(row.tokens)

    def _read(self, row: _Row, count: int) -> list[tuple[int, int, int | None]]:
        """Positions, groups and contents that the last `count` computed tokens attend to."""
        found = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.num_computed - count - window + 1)
            for position in range(first, row.num_computed):
                found.append((position, group, self.slots[self._slot(row, position, group)]))
        return found

    def _read_and_sample(self, position: int, row: _Row, count: int, output: ModelRunnerOutput) -> None:
        read = self._read(row, count)
        failed = row.data.request_id in self.failing or any(found == POISON for _, _, found in read)
        params, num_prompt = row.data.sampling_params, row.data.num_prompt_tokens
        first, last = row.num_computed - count, min(row.num_computed, num_prompt - 1)
        if params.prompt_logprobs is not None and first < last:
            output.prompt_logprobs[position] = [logprobs_of(t) for t in row.tokens[first + 1 : last + 1]]
        token = -1
        if failed:
            output.errors[position] = "not a number"
            row.has_failed = True
            row.drop_drafts()
            if row.data.pooling_params is None and row.num_computed == len(row.tokens) and not self._is_paired(row):
                row.append(0)
        elif row.data.pooling_params is not None:
            self._pool(position, row, count, output)
        elif row.num_computed == len(row.tokens) and not self._is_paired(row):
            token, *accepted = row.verify_drafts()
            if row.reads_garbage:
                token = WRONG_TOKEN
            if params.logprobs is not None:
                output.logprobs[position] = logprobs_of(token)
                if accepted:
                    output.further_logprobs[position] = [logprobs_of(each) for each in accepted]
            if accepted:
                output.further_token_ids[position] = accepted
            for each in (token, *accepted):
                row.append(each)
            if self.propose is not None:
                self._propose_drafts(position, row, output)
        output.sampled_token_ids.append(token)

    def _is_paired(self, row: _Row) -> bool:
        own = row.data.row
        return row.data.guided_row is not None or any(other.data.guided_row == own for other in self.rows.values())

    def _propose_drafts(self, position: int, row: _Row, output: ModelRunnerOutput) -> None:
        assert self.propose is not None
        if drafts := self.propose(row.tokens)[: self._most_drafts]:
            output.draft_token_ids[position] = drafts
            row.drafts = drafts if self.keeps_drafts else []
        for ahead in range(len(row.tokens) - 1, len(row.tables[0]) * self.block_size):
            if len(self.windows) == 1:
                self.slots[self._slot(row, ahead, 0)] = SCRAWL
