"""What sampling remembers between steps: one entry per row, in host arrays.

A row's entry is written whole when a request takes the row, so that nothing of the request before it is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.bad_words import BadWords
from mvllm.sampling.penalties import DeviceTokenCounts, TokenCounts
from mvllm.sampling.token_masks import mask_from_token_ids
from mvllm.sampling.uniforms import stream_seed

if TYPE_CHECKING:
    from mvllm.sampling.logits_processor import RowTokens
    from mvllm.sampling.logits_processor_set import LogitsProcessorSet

RANDOM, PENALTIES, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8
BIAS, ALLOWED, BAD_WORDS, PROCESSED, READS_TOKENS = 16, 32, 64, 128, 256
"""Bits of `SamplingState.flags`: what a row needs beyond the most probable token."""

MAX_VOCAB_SIZE = 1 << 24
"""Token ids travel to and from the device beside float32 parameters; up to here float32 holds every integer."""

_MAX_REPETITION_PENALTY = 1e6
"""Repetition penalties beyond this factor change no distribution any more, but would overflow float32."""


@dataclass(frozen=True)
class PlaceholderTokens:
    """Where tokens are missing in a TokenHistory: arrays [n] of rows, positions in them, and their `begun`."""

    rows: np.ndarray
    positions: np.ndarray
    row_generation: np.ndarray


class TokenHistory:
    """All known tokens of each row: the prompt, then what was generated.

    Whoever runs the model owns it and writes it; sampling reads it.

    A token that was sampled but has not come from the device yet is counted like any other. In its place stands a mark,
    `-1 - row`, until it is filled in.

    Attributes:
        token_ids: int32 [max_rows, max_len]; the first `num_tokens` of a row are its own. Those that were guessed stand
            behind them until the step that checks them is over.
        num_tokens: int32 [max_rows].
        num_prompt_tokens: int32 [max_rows]; how many of them are the prompt.
        begun: int64 [max_rows]; how many requests have had the row.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.token_ids = np.zeros((max_rows, max_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self.row_generation = np.zeros(max_rows, dtype=np.int64)

    def set_row(self, row: int, token_ids: Sequence[int] | np.ndarray, num_prompt_tokens: int) -> None:
        """Begins a row with its known tokens."""
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.row_generation[row] += 1

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds one token to each of `rows`, which are distinct."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Adds tokens to one row."""
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def set_draft_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Notes tokens that may come next, behind those of the row, whose number stays as it is."""
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids

    def append_placeholders(self, rows: np.ndarray) -> PlaceholderTokens:
        """Adds to each of `rows`, which are distinct, a token that only the device knows. `fill` takes the result."""
        places = PlaceholderTokens(rows, self.num_tokens[rows], self.row_generation[rows])
        self.append(rows, -1 - rows)
        return places

    def fill_placeholders(self, places: PlaceholderTokens, token_ids: np.ndarray) -> None:
        """Puts the tokens where their marks are; rows that another request has by now are left alone."""
        same = self.row_generation[places.rows] == places.row_generation
        self.token_ids[places.rows[same], places.positions[same]] = token_ids[same]

    def ends_in_placeholder(self, rows: np.ndarray) -> bool:
        """Whether the last token of any of `rows` is not known here."""
        return bool((self.token_ids[rows, self.num_tokens[rows] - 1] < 0).any())

    def clear_row(self, row: int) -> None:
        """Forgets a row."""
        self.num_tokens[row] = 0
        self.num_prompt_tokens[row] = 0


class SamplingState:
    """Sampling settings by row, ready to be gathered for a batch.

    Args:
        max_rows: Rows are 0 to max_rows - 1.
        vocab_size: Tokens in a row of logits.
        engine_seed: Decides the samples of requests without a seed, together with their ids.
        processors: Logits processors, which are told of rows; None where there are none.
        device_counts: Counts tokens on the device, where they stay there; None where the host counts them.

    Attributes:
        flags: uint16 [max_rows]; of the bits above. READS_TOKENS is in those whose next token depends on which tokens
            they have, not only on how many, in a way that only the host can compute.
        temperature, top_p, min_p, presence, frequency, repetition: float32 [max_rows].
        top_k: int64 [max_rows]; 0 where off.
        seeds: uint64 [max_rows].
        min_length: int64 [max_rows]; no token that ends the sequence before it has this many, prompt included.
        end_tokens: The tokens that would end it, for rows with MIN_TOKENS.
        num_logprobs: int64 [max_rows]; most probable tokens to report, for rows with LOGPROBS.
        counts: Token counts of the rows with PENALTIES, where the host counts.
        biases: Token ids, int64 [b], and what to add to their logits, float32 [b], of the rows with BIAS.
        allowed: Masks of the rows with ALLOWED, as `mask_from_token_ids` makes them.
        bad_words: Of the rows with BAD_WORDS.
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
            raise ValueError(f"the sampler handles vocabularies of up to {MAX_VOCAB_SIZE} tokens, not {vocab_size}")
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
        """Gives `row` to a request, new or resumed after preemption; every field of the row is written.

        Args:
            tokens: For logits processors, where there are any.
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
        if params.logprobs is not None:
            wanted = self.vocab_size if params.logprobs == -1 else params.logprobs
            self.num_logprobs[row] = min(wanted, self.vocab_size)

    def clear_row(self, row: int) -> None:
        """Takes the row back; until it is set again it samples greedily."""
        self.flags[row] = 0
        self.num_logprobs[row] = 0
        self.min_length[row] = 0
        self.end_tokens.pop(row, None)
        for by_row in (self.counts, self.biases, self.allowed, self.bad_words):
            by_row.pop(row, None)
        if self.processors is not None:
            self.processors.clear_row(row)

    def rows_reading_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` whose next token the host computes from which tokens they have, not only from how many."""
        return rows[(self.flags[rows] & READS_TOKENS) != 0]

    def _flags(self, params: SamplingParams) -> int:
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return (
            RANDOM * (not params.is_greedy and params.top_k != 1)
            | (PENALTIES | READS_TOKENS * (self.device_counts is None)) * (penalties != (0.0, 0.0, 1.0))
            | MIN_TOKENS * (params.min_tokens > 0 and params.structured_outputs is None)  # else the masks see to it
            | LOGPROBS * (params.logprobs is not None)
            | BIAS * bool(params.logit_bias)
            | ALLOWED * (params.allowed_token_ids is not None)
            | BAD_WORDS * bool(params.bad_words_token_ids)
        )

    def _end_tokens(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> np.ndarray:
        """With `ignore_eos` the end-of-sequence tokens end nothing, so there is no reason to hold them back."""
        ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        return np.array(sorted(i for i in ids if 0 <= i < self.vocab_size), dtype=np.int64)
