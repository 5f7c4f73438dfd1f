"""Sampling state between steps: parameters and tokens of each batch row, in host arrays.

All fields of a row are written when a request gets the row, so that nothing of the previous request remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.bad_words import BadWords
from mvllm.sampling.forced_tokens import ForcedTokens, ThinkingBudgets
from mvllm.sampling.penalties import DeviceTokenCounts, TokenCounts
from mvllm.sampling.token_masks import mask_from_token_ids
from mvllm.sampling.uniforms import stream_seed

if TYPE_CHECKING:
    from mvllm.sampling.logits_processor import RowTokens
    from mvllm.sampling.logits_processor_set import LogitsProcessorSet

RANDOM, PENALTIES, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8
BIAS, ALLOWED, BAD_WORDS, PROCESSED, READS_TOKENS = 16, 32, 64, 128, 256
"""Bits of `SamplingState.flags`: what a row needs beyond the argmax."""

MAX_VOCAB_SIZE = 1 << 24
"""Token ids are copied to and from the device as float32, which represents integers exactly up to here."""

_MAX_REPETITION_PENALTY = 1e6
"""Larger repetition penalties would overflow float32, and change no distribution any more."""


class SamplingState:
    """Sampling parameters by row, as arrays from which batches are gathered.

    Args:
        max_rows: Rows are 0 to max_rows - 1.
        vocab_size: Tokens in a row of logits.
        engine_seed: With the request ids, determines the samples of requests without a seed.
        processors: Logits processors, to which rows are added; None without any.
        device_counts: Token counts on the device, if sampled tokens stay there; None if the host counts.

    Attributes:
        flags: uint16 [max_rows]; the bits above. READS_TOKENS: the host needs the token ids of the row, not only their
            number, to sample the next one.
        temperature, top_p, min_p, presence, frequency, repetition: float32 [max_rows].
        top_k: int64 [max_rows]; 0 if off.
        seeds: uint64 [max_rows].
        min_length: int64 [max_rows]; length, prompt included, below which end tokens are blocked.
        end_tokens: End tokens of the rows with MIN_TOKENS.
        num_logprobs: int64 [max_rows]; most probable tokens to return, for rows with LOGPROBS.
        counts: Token counts of the rows with PENALTIES, if the host counts.
        biases: Token ids, int64 [b], and amounts, float32 [b], of the rows with BIAS.
        allowed: Masks of the rows with ALLOWED, from `mask_from_token_ids`.
        bad_words: Of the rows with BAD_WORDS.
        thinking: Thinking budgets.
        forced: Forced tokens.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        engine_seed: int,
        processors: LogitsProcessorSet | None = None,
        device_counts: DeviceTokenCounts | None = None,
    ) -> None:
        if vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE}, not {vocab_size}")
        self.vocab_size = vocab_size
        self.engine_seed = engine_seed
        self.processors = processors
        self.device_counts = device_counts
        self.flags = np.zeros(max_rows, dtype=np.uint16)
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.presence = np.zeros(max_rows, dtype=np.float32)
        self.frequency = np.zeros(max_rows, dtype=np.float32)
        self.repetition = np.ones(max_rows, dtype=np.float32)
        self.seeds = np.zeros(max_rows, dtype=np.uint64)
        self.min_length = np.zeros(max_rows, dtype=np.int64)
        self.num_logprobs = np.zeros(max_rows, dtype=np.int64)
        self.end_tokens: dict[int, np.ndarray] = {}
        self.counts: dict[int, TokenCounts] = {}
        self.biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.allowed: dict[int, np.ndarray] = {}
        self.bad_words: dict[int, BadWords] = {}
        self.thinking = ThinkingBudgets(max_rows)
        self.forced = ForcedTokens()

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        request_id: str,
        num_prompt_tokens: int,
        tokens: RowTokens | None = None,
    ) -> None:
        """Writes all fields of `row` for a request, new or resumed after preemption.

        Args:
            tokens: For logits processors, if there are any.
        """
        self.clear_row(row)
        self.temperature[row] = min(params.temperature, 1e30)
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0) if params.top_k < self.vocab_size else 0
        self.min_p[row] = params.min_p
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = min(max(params.repetition_penalty, 1 / _MAX_REPETITION_PENALTY), _MAX_REPETITION_PENALTY)
        self.seeds[row] = stream_seed(params.seed, engine_seed=self.engine_seed, request_id=request_id)
        self.flags[row] = self._flags(params)
        if self.flags[row] & PENALTIES and self.device_counts is None:
            self.counts[row] = TokenCounts()
        if self.flags[row] & MIN_TOKENS:
            self.min_length[row] = num_prompt_tokens + params.min_tokens
            self.end_tokens[row] = self._end_tokens(params, eos_token_ids)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, dtype=np.int64, count=len(params.logit_bias))
            known = ids < self.vocab_size
            amounts = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(ids))
            self.biases[row] = ids[known], amounts[known]
        if params.allowed_token_ids is not None:
            self.allowed[row] = mask_from_token_ids(params.allowed_token_ids, self.vocab_size)
        if params.bad_words_token_ids:
            self.bad_words[row] = words = BadWords(params.bad_words_token_ids, self.vocab_size)
            self.flags[row] |= READS_TOKENS * words.reads_tokens
        if self.processors is not None and tokens is not None:
            acts, reads = self.processors.add_row(row, params, tokens)
            self.flags[row] |= PROCESSED * acts | READS_TOKENS * reads
        if params.thinking_token_budget is not None and params.thinking_tokens is not None:
            self.thinking.set_row(row, params.thinking_token_budget, params.thinking_tokens, num_prompt_tokens)
        if params.forced_token_ids:
            self.forced.set_row(row, params.forced_token_ids, num_prompt_tokens)
        if params.logprobs is not None:
            wanted = self.vocab_size if params.logprobs == -1 else params.logprobs
            self.num_logprobs[row] = min(wanted, self.vocab_size)

    def clear_row(self, row: int) -> None:
        """Resets a row to greedy sampling."""
        self.flags[row] = 0
        self.num_logprobs[row] = 0
        self.min_length[row] = 0
        self.end_tokens.pop(row, None)
        for by_row in (self.counts, self.biases, self.allowed, self.bad_words):
            by_row.pop(row, None)
        if self.thinking:
            self.thinking.clear_row(row)
        if self.forced:
            self.forced.clear_row(row)
        if self.processors is not None:
            self.processors.clear_row(row)

    def samples_greedily(self, rows: np.ndarray) -> bool:
        """Whether the next token of each of these rows is that of its largest logit, and nothing else is returned."""
        if self.device_counts is not None and self.device_counts.is_allocated:
            return False  # every sampled token is counted
        return not (self.thinking or self.forced or self.flags[rows].any())

    def rows_reading_tokens(self, rows: np.ndarray, seq_lens: np.ndarray | None = None) -> np.ndarray:
        """Those of `rows` for which the host needs the token ids.

        Args:
            seq_lens: int [n]: tokens before the next one; needed for thinking budgets.
        """
        reads = (self.flags[rows] & READS_TOKENS) != 0
        if self.thinking and seq_lens is not None:
            reads |= self.thinking.are_due(rows, seq_lens)
        return rows[reads]

    def _flags(self, params: SamplingParams) -> int:
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return (
            RANDOM * (not params.is_greedy and params.top_k != 1)
            | (PENALTIES | READS_TOKENS * (self.device_counts is None)) * (penalties != (0.0, 0.0, 1.0))
            | MIN_TOKENS * (params.min_tokens > 0 and params.structured_outputs is None)  # grammar masks include it
            | LOGPROBS * (params.logprobs is not None)
            | BIAS * bool(params.logit_bias)
            | ALLOWED * (params.allowed_token_ids is not None)
            | BAD_WORDS * bool(params.bad_words_token_ids)
        )

    def _end_tokens(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> np.ndarray:
        """The tokens that `min_tokens` blocks. With `ignore_eos` end-of-sequence tokens are not among them."""
        ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        return np.array(sorted(i for i in ids if 0 <= i < self.vocab_size), dtype=np.int64)
