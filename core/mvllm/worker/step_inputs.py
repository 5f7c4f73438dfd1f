"""Builds the inputs of one step on the host, in one buffer, and copies them to the device once.

    | token_ids T | positions T | slots T | query_start_loc R+1 | seq_lens R | logits_indices L | block_table R*P |
    | prompt_lens T, for models that read it | sample_rows S, where tokens stay on the device |  all int32
    | read_slots R | write_slots R, for models with sequence states |
    | slots T | block_table R*P | for each further group of layers
    | the parts of `state_passes.py` |, for models with sequence states in a step with draft tokens

T tokens, R requests, S rows that sample, P pages (width of the block table): each padded up to the platform's buckets,
S to those of requests. L is S plus the number of draft tokens: a draft token is verified with the logits of the token
before it. A step that fits one of the platform's captured shapes gets that shape; its L and S depend on the shape, too.

    row 4, known 11 40 8, drafts 7 9          computes 8 7 9, and L has the logits behind 8, behind 7 and behind 9

Token ids may be placeholders of tokens that only the device knows (see TokenHistory); SampledTokenBuffer replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mvllm.errors import ConfigError
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.attention import BatchLayout
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy, StepKind
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.platform.state import StateLayout
from mvllm.worker.capture_shapes import reachable_shapes
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.item_rows import StepItems
from mvllm.worker.state_passes import DraftSlots, StatePassInputs, part_sizes, pass_inputs, write_passes
from mvllm.worker.step_buffer import BufferLayout, LayoutBuffer, LayoutSizes


@dataclass
class StepInputs:
    """The inputs of one step.

    Attributes:
        rows: int64 [R], host: the rows in batch order.
        num_scheduled: int32 [R], host: tokens of each row in this step.
        first_positions: int32 [R], host: position of each row's first token in this step.
        sampling_positions: int64 [S], host: positions in the batch of the rows that sample, because the step reaches
            the end of their known tokens.
        num_draft_tokens: int32 [S], host: draft tokens of each sampling row that the step verifies. The history holds
            them behind the known tokens.
        token_ids, positions: int32 [T], device. Positions are those of the rotary embedding: behind images with
            three-dimensional positions they differ from the positions in the sequence.
        logits_indices: int32 [L], device: index among the T tokens of each sampling row's last known token and of its
            draft tokens. Padded (with index 0): S in steps without draft tokens, see StepInputBuilder, and L in steps
            that are captured.
        layouts: For the attention backends, one per group of layers; only block_table and slot_mapping differ.
        prompt_lens: int32 [T], device: prompt length of each token's request; None for models that do not read it.
        longest_partial_prompt: Length of the longest prompt of which the step has a token before the last one; 0 if
            there is none, or without `prompt_lens`.
        sample_rows: int32 [S], device: the rows that sample, padded with an unused row; None where tokens do not stay
            on the device.
        state_layout: For the state backend; None for models without sequence states. With `state_passes` that of the
            first pass.
        state_passes: The passes over the layers with sequence states; None in a step without draft tokens, and for
            models without sequence states.
        draft_slots: The state slots of the draft tokens; None without `state_passes`.
        visible_lens: int32 [T], host: how many leading positions each token sees; None in steps in which attention is
            causal. See BatchLayout.
        visible_lens_device: The same on the device.
        items: The items that the step reads; None in steps without any.
        host_positions: int32 [T], host: as `positions`; valid until the next step is built.
        num_logits: L without padding.
        selects_all: The L rows of logits are those of the T tokens, in order, without padding.
        built: `token_ids` and `positions` as they were built, and the same on the host; None if they are not known.
    """

    rows: np.ndarray
    num_scheduled: np.ndarray
    first_positions: np.ndarray
    sampling_positions: np.ndarray
    num_draft_tokens: np.ndarray
    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    layouts: list[BatchLayout]
    prompt_lens: torch.Tensor | None = None
    longest_partial_prompt: int = 0
    sample_rows: torch.Tensor | None = None
    state_layout: StateLayout | None = None
    state_passes: StatePassInputs | None = None
    draft_slots: DraftSlots | None = None
    visible_lens: np.ndarray | None = None
    visible_lens_device: torch.Tensor | None = None
    items: StepItems | None = None
    host_positions: np.ndarray | None = None
    num_logits: int = 0
    selects_all: bool = False
    built: tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray] | None = None

    @property
    def layout(self) -> BatchLayout:
        """The layout of the first group."""
        return self.layouts[0]

    @property
    def num_logits_rows(self) -> np.ndarray:
        """int32 [S]: rows of logits of each sampling row, L in total."""
        return self.num_draft_tokens + 1

    def host_ids_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """`token_ids` and `positions`, where the device shares the host's memory."""
        if self.built is not None and self.built[0] is self.token_ids and self.built[1] is self.positions:
            return self.built[2], self.built[3]
        return self.token_ids.numpy(), self.positions.numpy()


class _StepSizes(NamedTuple):
    """The sizes of one step.

    Attributes:
        kind, num_decodes: See BatchLayout.
        num_tokens, num_logits_rows: T and L without padding.
        max_query_len, max_seq_len: The largest of a request.
        captured_query_len: The largest of the captured shape that the step gets; 0 if it is not captured.
        layout: The sizes of its buffer.
    """

    kind: StepKind
    num_decodes: int
    num_tokens: int
    num_logits_rows: int
    max_query_len: int
    max_seq_len: int
    captured_query_len: int
    layout: LayoutSizes


class StepInputBuilder:
    """Builds StepInputs from plans.

    Args:
        rows: The worker's rows.
        block_size: Tokens per KV block.
        max_tokens: Most tokens in one step.
        max_rows: Most requests in one step.
        runtime: The device.
        shapes: The platform's buckets, and its captured shapes if steps are to be captured.
        with_prompt_lens: The model reads `prompt_lens`.
        with_sample_rows: Build `sample_rows`.
        max_draft_tokens: Most draft tokens of a row in one step.
        is_static: The platform has static shapes: S is padded to the size of R, so that shapes depend on one size less.
        with_states: The model has sequence states.
        is_causal: The model takes token ids only: non-causal spans of the rows do not concern it, and steps may cut
            them.
        token_offset: The token at a position of the step is that so many positions behind it in the history.

    Attributes:
        staging: The buffers of the step that `build` has begun. The caller ends the step there after submitting it.
    """

    def __init__(
        self,
        rows: InputBatch,
        *,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        runtime: DeviceRuntime,
        shapes: ShapePolicy,
        with_prompt_lens: bool = False,
        with_sample_rows: bool = False,
        max_draft_tokens: int = 0,
        is_static: bool = False,
        with_states: bool = False,
        is_causal: bool = False,
        token_offset: int = 0,
    ) -> None:
        self._runtime = runtime
        self._token_offset = token_offset
        self._is_causal = is_causal
        self._is_static = is_static
        self._with_states = with_states
        self._rows = rows
        self._block_size = block_size
        self._shapes = shapes
        self._with_prompt_lens = with_prompt_lens
        self._with_sample_rows = with_sample_rows
        max_tokens = _largest("max_num_batched_tokens", max_tokens, "tokens", shapes.tokens)
        max_rows = _largest("max_num_seqs", max_rows, "requests", shapes.requests)
        max_pages = _largest("max_model_len in blocks", rows.max_pages, "pages", shapes.pages)
        self._max_draft_tokens = max_draft_tokens
        if shapes.capture is not None:
            for shape in reachable_shapes(
                shapes.capture, max_tokens=max_tokens, max_rows=max_rows, num_draft_tokens=max_draft_tokens
            ):
                max_tokens, max_rows = max(max_tokens, shape.tokens), max(max_rows, shape.requests)
        groups = rows.num_groups
        per_row = 4 + 2 * with_states + max_draft_tokens + groups * max_pages
        if with_states and max_draft_tokens:
            passes = (max_tokens, *[max_rows] * max_draft_tokens)
            per_row += -(-sum(part_sizes(max_tokens, max_rows, passes)) // max_rows)
        capacity = (3 + groups + (shapes.capture is not None)) * max_tokens + per_row * max_rows + 1
        self.staging = StagingBuffers(runtime)
        self.staging.reserve(capacity, torch.int32)
        one = ShapePolicy.pad(1, shapes.tokens) == ShapePolicy.pad(1, shapes.requests) == 1
        adds = with_prompt_lens or with_sample_rows or with_states or is_static
        self._decodes_one = one and not adds and shapes.capture is None
        self._kept: dict[int, LayoutBuffer] = {}  # by the turn of the staging buffer
        self._counting = np.arange(max(max_tokens, max_rows) + 1, dtype=np.int32)

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """The inputs of `plan`, which has been applied to the rows."""
        table, history = self._rows, self._rows.history
        if self._decodes_one and plan.num_scheduled_tokens == [1] and not plan.draft_token_ids:
            inputs = None if table.items.is_used else self._build_decode(plan.rows[0])
            if inputs is not None:
                return inputs
        rows = np.array(plan.rows, dtype=np.int64)
        num_scheduled = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        first = table.num_computed[rows]
        seq_lens = first + num_scheduled
        num_draft_tokens = None
        if plan.draft_token_ids:
            num_draft_tokens = np.zeros(len(rows), dtype=np.int32)
            for position, drafts in plan.draft_token_ids.items():
                num_draft_tokens[position] = len(drafts)
            seq_lens -= num_draft_tokens
        sampling_positions = (seq_lens == history.num_tokens[rows]).nonzero()[0]
        if pooled := table.pooling.params:
            sampling_positions = sampling_positions[[row not in pooled for row in rows[sampling_positions].tolist()]]
        return self.build_rows(
            rows,
            first,
            num_scheduled,
            sampling_positions,
            None if num_draft_tokens is None else num_draft_tokens[sampling_positions],
            np.array([plan.read_slots, plan.write_slots], dtype=np.int32) if self._with_states else None,
            plan.draft_slots if self._with_states else None,
            items=table.items.of_step(rows, first, num_scheduled) if table.items.is_used else None,
        )

    def _build_decode(self, row: int) -> StepInputs | None:
        """What `build` gives for a step that decodes one row, with few calls of NumPy; None if the row does not sample.

        Such a step is that of a single stream, where each call counts.
        """
        table, history, block_size = self._rows, self._rows.history, self._block_size
        position = table.num_computed.item(row)
        if position + 1 != history.num_tokens.item(row) or row in table.pooling.params:
            return None
        page, offset = divmod(position, block_size)
        pages = ShapePolicy.pad(page + 1, self._shapes.pages)
        self.staging.begin_step()
        buffer = self._buffer_of((1, 1, 1, pages, 0, 0, table.num_groups, 0, ()))
        parts = buffer.parts
        token_ids, positions, _, query_start_loc, lens, logits_indices = parts[:6]
        token_ids[0], positions[0], lens[0] = history.token_ids.item(row, position), position, position + 1
        query_start_loc[0], query_start_loc[1], logits_indices[0] = 0, 1, 0
        for group, (slot_mapping_index, block_table_index) in enumerate(buffer.layout.slot_and_table_indices):
            blocks = table.block_table[group * table.max_rows + row]
            known = min(pages, len(blocks))
            parts[block_table_index][:known] = blocks[:known]
            parts[block_table_index][known:] = 0
            parts[slot_mapping_index][0] = blocks.item(page) * block_size + offset
        views, arrays = buffer.arrays_on(self.staging.copy_to_device(buffer.host))
        layouts = buffer.layout.layouts(
            arrays,
            block_size=block_size,
            max_query_len=1,
            max_seq_len=position + 1,
            kind=StepKind.DECODE,
            num_decodes=1,
        )
        return StepInputs(
            np.array([row]),
            np.array([1], dtype=np.int32),
            np.array([position], dtype=np.int32),
            np.array([0]),
            np.array([0], dtype=np.int32),
            token_ids=views[0],
            positions=views[1],
            logits_indices=views[5],
            layouts=layouts,
            host_positions=positions,
            num_logits=1,
            selects_all=True,
            built=(views[0], views[1], token_ids, positions),
        )

    def _buffer_of(self, sizes: LayoutSizes) -> LayoutBuffer:
        """The staging buffer of this step, with the layout of these sizes; the last one of each buffer is kept."""
        kept = self._kept.get(self.staging.turn)
        if kept is None or kept.sizes != sizes:
            layout = BufferLayout(*sizes)
            staging = self.staging.buffer(layout.size, torch.int32)
            kept = self._kept[self.staging.turn] = LayoutBuffer(layout, staging, sizes)
        return kept

    def build_rows(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        num_scheduled: np.ndarray,
        sampling_positions: np.ndarray,
        num_draft_tokens: np.ndarray | None = None,
        state_slots: np.ndarray | None = None,
        draft_slots: Mapping[int, Sequence[int]] | None = None,
        *,
        items: StepItems | None = None,
    ) -> StepInputs:
        """The inputs of a step over tokens in the history, draft tokens included.

        Args:
            rows: int64 [R], at least one.
            first: int32 [R]: first position of each row in the step.
            num_scheduled: int32 [R]: positions of each row in the step, at least one.
            sampling_positions: int64 [S]: positions among `rows`, rising.
            num_draft_tokens: int32 [S]; None without draft tokens.
            state_slots: int32 [2, R]: the state slots that each row reads and writes; None without sequence states.
            draft_slots: The state slots behind draft tokens, by position, as in SchedulerOutput.
            items: The items that the step reads. It is not captured then.
        """
        seq_lens = first + num_scheduled
        drafts = DraftSlots.of(state_slots[1], draft_slots) if draft_slots and state_slots is not None else None
        sizes = self._sizes_of(
            num_scheduled, seq_lens, sampling_positions, num_draft_tokens, drafts, can_capture=items is None
        )
        self.staging.begin_step()
        buffer = self._buffer_of(sizes.layout)
        layout, parts = buffer.layout, buffer.parts
        parts[4][: len(rows)] = seq_lens
        row_of_token, position = self._write_tokens(
            parts, sizes, rows, first, num_scheduled, sampling_positions, num_draft_tokens
        )
        self._write_block_tables(buffer, sizes, rows, row_of_token, position)
        longest = self._write_prompt_lens(parts[7], row_of_token, position) if self._with_prompt_lens else 0
        if self._with_sample_rows:
            self._write_sample_rows(parts[8], rows[sampling_positions])
        most_known = 0 if state_slots is None else _write_states(buffer, len(rows), state_slots, drafts)

        views, arrays = buffer.arrays_on(self.staging.copy_to_device(buffer.host))
        layouts = layout.layouts(
            arrays,
            block_size=self._block_size,
            max_query_len=sizes.captured_query_len or sizes.max_query_len,
            max_seq_len=sizes.max_seq_len,
            kind=sizes.kind,
            num_decodes=sizes.num_decodes,
            capture=bool(sizes.captured_query_len),
        )
        spans = self._rows.non_causal_spans
        seen = None if self._is_causal else spans.visible_lens(rows, first, num_scheduled, layout.tokens)
        return StepInputs(
            rows,
            num_scheduled,
            first,
            sampling_positions,
            np.zeros(len(sampling_positions), dtype=np.int32) if num_draft_tokens is None else num_draft_tokens,
            token_ids=views[0],
            positions=views[1],
            logits_indices=views[5],
            layouts=layouts,
            prompt_lens=views[7] if self._with_prompt_lens else None,
            longest_partial_prompt=longest,
            sample_rows=views[8] if self._with_sample_rows else None,
            state_layout=layout.state_layout(
                parts, views, layouts[0], is_static=self._is_static, most_known=most_known
            ),
            state_passes=None if drafts is None else _passes_of(buffer, views, capture=layouts[0].capture),
            draft_slots=drafts,
            visible_lens=seen,
            visible_lens_device=None if seen is None else self._runtime.from_numpy(seen),
            items=items,
            host_positions=parts[1],
            num_logits=sizes.num_logits_rows,
            selects_all=sizes.num_logits_rows == layout.logits_rows == layout.tokens and not self._is_static,
            built=(views[0], views[1], parts[0], parts[1]),
        )

    def _sizes_of(
        self,
        num_scheduled: np.ndarray,
        seq_lens: np.ndarray,
        sampling_positions: np.ndarray,
        num_draft_tokens: np.ndarray | None,
        drafts: DraftSlots | None,
        *,
        can_capture: bool,
    ) -> _StepSizes:
        """The sizes of a step, padded to the platform's buckets, or to a captured shape if one fits."""
        num_requests, num_sampling = len(seq_lens), len(sampling_positions)
        max_query_len, max_seq_len = int(np.maximum.reduce(num_scheduled)), int(np.maximum.reduce(seq_lens))
        num_tokens = num_requests if max_query_len == 1 else int(np.add.reduce(num_scheduled))
        num_logits_rows = num_sampling if num_draft_tokens is None else num_sampling + int(num_draft_tokens.sum())
        kind, num_decodes = _kind_of(num_scheduled, max_query_len, sampling_positions, num_draft_tokens)
        shapes, captured = self._shapes, None
        if shapes.capture is not None and can_capture:
            captured = shapes.capture.shape_of(kind, num_tokens, num_requests, self._max_draft_tokens)
        captured_query_len = 0
        if captured is None:
            tokens, requests = (
                ShapePolicy.pad(num_tokens, shapes.tokens),
                ShapePolicy.pad(num_requests, shapes.requests),
            )
            sampling = ShapePolicy.pad(num_sampling, shapes.requests) if num_sampling else 0
        else:
            tokens, requests = captured
            sampling = requests if num_sampling else 0
            largest = {StepKind.DECODE: 1, StepKind.VERIFY: 1 + self._max_draft_tokens, StepKind.MIXED: tokens}
            captured_query_len = largest[kind]
        if self._is_static:
            sampling = requests
        logits_rows = sampling
        if num_draft_tokens is not None:
            logits_rows = num_logits_rows
            if captured is not None:
                logits_rows = sampling if num_logits_rows <= sampling else tokens
        passes: tuple[int, ...] = ()
        if drafts is not None:
            first_pass = requests if kind is StepKind.VERIFY else tokens
            fixed = None if captured is None else (first_pass, requests, self._max_draft_tokens)
            passes = drafts.sizes(num_tokens, shapes, fixed)
        layout = (
            tokens,
            requests,
            logits_rows,
            ShapePolicy.pad(-(-max_seq_len // self._block_size), shapes.pages),
            tokens if self._with_prompt_lens else 0,
            sampling if self._with_sample_rows else 0,
            self._rows.num_groups,
            requests if self._with_states else 0,
            passes,
        )
        return _StepSizes(
            kind, num_decodes, num_tokens, num_logits_rows, max_query_len, max_seq_len, captured_query_len, layout
        )

    def _write_tokens(
        self,
        parts: list[np.ndarray],
        sizes: _StepSizes,
        rows: np.ndarray,
        first: np.ndarray,
        num_scheduled: np.ndarray,
        sampling_positions: np.ndarray,
        num_draft_tokens: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Writes token ids and positions, where each row begins and ends, and the indices of the rows of logits.

        Returns:
            [T] each: the row of each token, and its position in its sequence.
        """
        items, history = self._rows.items, self._rows.history
        num_requests, num_tokens, num_logits_rows = len(rows), sizes.num_tokens, sizes.num_logits_rows
        token_ids, positions, _, query_start_loc, lens, logits_indices = parts[:6]
        if sizes.max_query_len == 1:  # a step of nothing but decoding: token i is request i
            row_of_token, position = rows, first
            query_start_loc[: num_requests + 1] = self._counting[: num_requests + 1]
            logits_indices[:num_logits_rows] = sampling_positions
        else:
            query_start_loc[0] = 0
            num_scheduled.cumsum(out=query_start_loc[1 : num_requests + 1])
            last = query_start_loc[sampling_positions + 1] - 1
            logits_indices[:num_logits_rows] = (
                last if num_draft_tokens is None else ragged_ranges(last - num_draft_tokens, num_draft_tokens + 1)
            )
            row_of_token = rows.repeat(num_scheduled)
            offsets = self._counting[:num_tokens] - query_start_loc[:num_requests].repeat(num_scheduled)
            position = first.repeat(num_scheduled) + offsets
        token_ids[:num_tokens] = history.token_ids[row_of_token, position + self._token_offset]
        positions[:num_tokens] = position
        if items.has_shifts:
            positions[:num_tokens] += items.shifts_of(rows, first, num_scheduled, position)
        if len(logits_indices) > num_logits_rows:
            logits_indices[num_logits_rows:] = 0
        if len(token_ids) > num_tokens:
            token_ids[num_tokens:] = 0
            positions[num_tokens:] = 0
        if len(lens) > num_requests:
            query_start_loc[num_requests + 1 :] = num_tokens
            lens[num_requests:] = 0
        return row_of_token, position

    def _write_block_tables(
        self, buffer: LayoutBuffer, sizes: _StepSizes, rows: np.ndarray, row_of_token: np.ndarray, position: np.ndarray
    ) -> None:
        """Writes the block table of each group, and the slots of the tokens.

        Args:
            row_of_token, position: As `_write_tokens` returns them.
        """
        table, block_size, parts = self._rows, self._block_size, buffer.parts
        num_requests, num_tokens = len(rows), len(position)
        padded_tokens, padded_requests, _, pages = sizes.layout[:4]
        page, offset = np.divmod(position, block_size)
        for group, (slot_mapping_index, block_table_index) in enumerate(buffer.layout.slot_and_table_indices):
            slots, block_table = parts[slot_mapping_index], parts[block_table_index].reshape(padded_requests, pages)
            tables = table.block_table[group * table.max_rows :]
            known = block_table[:num_requests, : tables.shape[1]]  # a bucket may be wider than any sequence
            known[:] = tables[rows, :pages]  # `take` would first copy all rows of what is not contiguous
            if known.shape[1] < pages:
                block_table[:num_requests, known.shape[1] :] = 0
            if padded_requests > num_requests:
                block_table[num_requests:] = 0
            in_order = sizes.max_query_len == 1
            block = known[self._counting[:num_requests], page] if in_order else tables[row_of_token, page]
            slots[:num_tokens] = block * block_size + offset
            if padded_tokens > num_tokens:
                slots[num_tokens:] = -1

    def _write_sample_rows(self, sample_rows: np.ndarray, rows: np.ndarray) -> None:
        """Writes `sample_rows`, see StepInputs; `rows` are those that sample."""
        sample_rows[: len(rows)] = rows
        sample_rows[len(rows) :] = self._rows.max_rows

    def _write_prompt_lens(self, prompt_lens: np.ndarray, row_of_token: np.ndarray, position: np.ndarray) -> int:
        """Writes `prompt_lens`; returns `longest_partial_prompt`. See StepInputs."""
        known = prompt_lens[: len(position)]
        known[:] = self._rows.history.num_prompt_tokens[row_of_token]
        prompt_lens[len(position) :] = 0
        return int(known.max(initial=0, where=known > position + 1))


def _write_states(buffer: LayoutBuffer, num_rows: int, slots: np.ndarray, drafts: DraftSlots | None) -> int:
    """Writes the state slots, int32 [2, R], and the passes over the layers with states.

    Returns:
        The most known tokens of a row; 0 without draft tokens.
    """
    parts, layout = buffer.parts, buffer.layout
    for part, of_rows in zip(parts[9:11], slots, strict=True):
        part[:num_rows] = of_rows
        part[num_rows:] = -1
    if drafts is None:
        return 0
    return write_passes(parts[layout.first_pass_part :], layout.state_passes, drafts, parts[3][: num_rows + 1])


def _passes_of(buffer: LayoutBuffer, views: Sequence[torch.Tensor], *, capture: bool) -> StatePassInputs:
    """The passes over the layers with states that `_write_states` has written; `views` are the parts on the device."""
    layout, first = buffer.layout, buffer.layout.first_pass_part
    return pass_inputs(buffer.parts[first:], views[first:], layout.state_passes, capture=capture)


def ragged_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int [sum of counts]: for each i the `counts[i]` numbers from `starts[i]` on."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)


def _kind_of(
    num_scheduled: np.ndarray,
    max_query_len: int,
    sampling_positions: np.ndarray,
    num_draft_tokens: np.ndarray | None,
) -> tuple[StepKind, int]:
    """The kind of a step, and the number of its leading decode rows. Arguments as in StepInputBuilder.build_rows."""
    num_requests = len(num_scheduled)
    if max_query_len == 1:
        return StepKind.DECODE, num_requests
    num_known = num_scheduled
    if num_draft_tokens is not None:
        num_known = num_scheduled.copy()
        num_known[sampling_positions] -= num_draft_tokens
    others = (num_known != 1).nonzero()[0]
    return (StepKind.MIXED, int(others[0])) if len(others) else (StepKind.VERIFY, num_requests)


def _largest(limit: str, value: int, dimension: str, buckets: tuple[int, ...] | None) -> int:
    """The bucket of the largest step.

    Raises:
        ConfigError: No bucket is large enough.
    """
    try:
        return ShapePolicy.pad(value, buckets)
    except ValueError as e:
        found = max(buckets) if buckets else "none"
        raise ConfigError(
            f"{limit} is {value}, but the platform's largest bucket for {dimension} is {found}. Lower the limit."
        ) from e
