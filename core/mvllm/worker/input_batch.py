"""The worker's state of running requests: a row of host arrays per request, kept as long as the request runs.

A step changes a few integers. Its inputs are gathered from these arrays by NumPy, whole batches at a time.

    row   history.token_ids      num_tokens  num_computed  block_table
    0     [11, 40, 7, 9, ...]    4           3             [5, 2, ...]
    1     free
    2     [11, 40, 8, ...]       3           0             [5, 6, ...]

With groups of layers a row has a block table per group: row r in group g is `block_table[r + g * max_rows]`. Entries of
blocks outside of a group's window are not updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mvllm.messages.scheduler_output import NewRequestData, SchedulerOutput
from mvllm.pooling.pooler import PoolingState
from mvllm.sampling.logits_processor import RowTokens
from mvllm.sampling.sampling_state import SamplingState
from mvllm.sampling.token_history import TokenHistory
from mvllm.worker.item_rows import ItemRows
from mvllm.worker.non_causal_spans import NonCausalSpans
from mvllm.worker.request_pairs import PairRows
from mvllm.worker.space_logits import RowSpaces


@dataclass(frozen=True)
class RowLengths:
    """Copies of `num_computed` and `history.num_tokens` of an InputBatch, int32 [max_rows] each."""

    num_computed: np.ndarray
    num_tokens: np.ndarray


class InputBatch:
    """State of the running requests, by row.

    Args:
        max_rows: Most running requests.
        max_model_len: Longest sequence in tokens.
        block_size: Tokens per KV block.
        sampling: Sampling state of the rows.
        num_groups: Groups of layers.
        space_names: The model's token spaces beside text.
        has_non_causal_spans: Images attend in both directions, see `ModelConfig.has_non_causal_spans`.

    Attributes:
        history: Token ids, with `num_tokens` and `num_prompt_tokens` per row.
        num_computed: int32 [max_rows]; leading tokens whose KV is computed or scheduled.
        max_rows, num_groups: As given.
        max_pages: Blocks of the longest sequence.
        block_table: int32 [num_groups * max_rows, max_pages + 1]; the last entry is spare.
        num_blocks: int32 [num_groups * max_rows]; used entries of `block_table`.
        prompt_logprobs: Row to the requested number, for requests with `prompt_logprobs`.
        pooling: Pooling requests; their rows never sample.
        lora_ids: int64 [max_rows]; LoRA adapter of the row's request, 0 for none.
        pairs: Which rows are pairs.
        spaces: The token spaces of the rows.
        non_causal_spans: Spans of the rows' prompts that attend in both directions.
        items: Where the images, audio and embeddings of the rows stand.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        sampling: SamplingState,
        num_groups: int = 1,
        space_names: Sequence[str] = (),
        has_non_causal_spans: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self.num_groups = num_groups
        self.max_pages = -(-max_model_len // block_size)
        self.history = TokenHistory(max_rows, max_model_len + 1)
        self.num_computed = np.zeros(max_rows, dtype=np.int32)
        self.block_table = np.zeros((num_groups * max_rows, self.max_pages + 1), dtype=np.int32)
        self.num_blocks = np.zeros(num_groups * max_rows, dtype=np.int32)
        self.prompt_logprobs: dict[int, int] = {}
        self.pooling = PoolingState()
        self.lora_ids = np.zeros(max_rows, dtype=np.int64)
        self.pairs = PairRows(max_rows)
        self.spaces = RowSpaces(max_rows, list(space_names))
        self.non_causal_spans = NonCausalSpans()
        self._has_non_causal_spans = has_non_causal_spans
        self.items = ItemRows(max_rows)
        self.sampling = sampling

    def apply_plan(self, plan: SchedulerOutput) -> None:
        """Applies a plan to the rows: removes requests, adds new ones, appends blocks, and stores draft tokens."""
        for row in plan.freed_rows:
            self._remove_request(row)
        for request in plan.new_requests:
            self._add_request(request)
        num_blocks = self.num_blocks
        for row, block in zip(plan.new_block_rows, plan.new_block_ids, strict=True):
            self.block_table[row, num_blocks[row]] = block
            num_blocks[row] += 1
        for position, drafts in plan.draft_token_ids.items():
            self.history.set_draft_tokens(plan.rows[position], drafts)

    def append_sampled_tokens(
        self, rows: np.ndarray, token_ids: np.ndarray, accepted: Mapping[int, Sequence[int]]
    ) -> None:
        """Appends the tokens of a step.

        Args:
            rows: int [n]: distinct.
            token_ids: int [n]: the token sampled first for each of `rows`.
            accepted: Row to the tokens behind that one, whose positions the step has computed as draft tokens.
        """
        self.history.append(rows, token_ids)
        for row, draft_token_ids in accepted.items():
            self.history.extend(row, draft_token_ids)
            self.num_computed[row] += len(draft_token_ids)

    def give_only_greedy_tokens(self, plan: SchedulerOutput, sampling_rows: np.ndarray) -> bool:
        """Whether a step gives one greedy token for each row of logits, without masks, and nothing else.

        Args:
            plan: The step's plan, which was applied.
            sampling_rows: int [S]: the rows that sample.
        """
        if self.prompt_logprobs or self.pooling.params or self.pairs.num_pairs or plan.mask_rows:
            return False
        return len(sampling_rows) > 0 and not plan.masks_follow and self.sampling.samples_greedily(sampling_rows)

    def copy_lengths(self) -> RowLengths:
        """Copies the rows' lengths, for `advance_past_failed_step`."""
        return RowLengths(self.num_computed.copy(), self.history.num_tokens.copy())

    def advance_past_failed_step(self, plan: SchedulerOutput, before: RowLengths) -> None:
        """Sets the rows to the lengths after a step, which failed anywhere in it.

        Plans made meanwhile assume these lengths: a row that stayed behind would write to blocks that were freed and
        may belong to another row. Tokens that the step should have sampled are set to 0.

        Args:
            plan: The step's plan, which was applied.
            before: The rows' lengths before the step.
        """
        rows = np.array(plan.rows, dtype=np.int64)
        num_known = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        for position, drafts in plan.draft_token_ids.items():
            num_known[position] -= len(drafts)
        self.num_computed[rows] = before.num_computed[rows] + num_known
        self.history.num_tokens[rows] = before.num_tokens[rows]
        sampling_rows = rows[self.num_computed[rows] == before.num_tokens[rows]]
        sampling_rows = sampling_rows[~np.isin(sampling_rows, list(self.pooling.params))]
        self.history.append(sampling_rows, np.zeros(len(sampling_rows), dtype=np.int64))

    def _add_request(self, request: NewRequestData) -> None:
        row, params = request.row, request.sampling_params
        self.history.set_row(row, request.token_ids, request.num_prompt_tokens)
        self.num_computed[row] = request.num_computed_tokens
        for table, blocks in enumerate((request.block_ids, *request.more_block_ids)):
            number = row + table * self.max_rows
            self.block_table[number, : len(blocks)] = blocks
            self.num_blocks[number] = len(blocks)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = params.prompt_logprobs
        self.pooling.set_row(row, request.pooling_params)
        self.spaces.set_row(row, params.token_space)
        self.pairs.set_row(request)
        if request.items:
            self.items.set_row(row, request.items)
            if self._has_non_causal_spans:
                self.non_causal_spans.set_row(row, request.items)
        self.lora_ids[row] = 0 if request.lora_request is None else request.lora_request.lora_int_id
        self.sampling.set_row(
            row,
            params,
            eos_token_ids=request.eos_token_ids,
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            tokens=None if self.sampling.processors is None else RowTokens(self.history, row),
        )

    def _remove_request(self, row: int) -> None:
        self.history.clear_row(row)
        self.num_blocks[row :: self.max_rows] = 0
        self.prompt_logprobs.pop(row, None)
        self.pooling.clear_row(row)
        self.lora_ids[row] = 0
        self.pairs.clear_row(row)
        self.non_causal_spans.clear_row(row)
        self.items.clear_row(row)
        self.sampling.clear_row(row)
