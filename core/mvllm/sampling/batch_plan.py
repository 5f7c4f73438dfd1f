"""Sampling metadata of one batch: the rows that need each sampling operation, and their parameters.

Computed on the host with NumPy, without access to logits, and uploaded to the device in one copy (BatchUpload).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.batch_upload import BatchUpload, RowSelection
from mvllm.sampling.filters import Filters, next_power_of_two, num_candidates
from mvllm.sampling.penalties import DeviceTokenCounts, TokenCounts
from mvllm.sampling.sampling_state import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MAX_VOCAB_SIZE,
    MIN_TOKENS,
    PENALTIES,
    PROCESSED,
    RANDOM,
    SamplingState,
)
from mvllm.sampling.token_history import TokenHistory
from mvllm.sampling.token_masks import TokenMasks, intersect_masks
from mvllm.sampling.uniforms import uniforms

_MAX_CANDIDATES = 1024
"""Largest top_k for which top_p is computed among the top_k candidates; above it, over the whole vocabulary."""

_STATIC_CANDIDATES = (64, _MAX_CANDIDATES)
"""Candidate counts that static shapes are padded to; larger top_k values use the whole vocabulary."""

_RandomInputs = tuple[Filters, torch.Tensor, torch.Tensor]
"""On the device: the filters of the random rows, and their coarse and fine uniform random numbers."""

_MIN_EDITS = 64
"""Minimum padded length of the lists of logits edits with static shapes."""


@dataclass
class LogitsEditKeys:
    """Upload keys of the logits edits and of the token masks. Rows are indices into the work rows."""

    blocked_rows: int
    blocked_ids: int
    bias_rows: int
    bias_ids: int
    biases: int
    penalty_rows: int
    penalty_ids: int
    penalty_factors: int
    penalty_amounts: int
    masked: RowSelection
    mask_words: int


@dataclass
class DevicePenaltyKeys:
    """Upload keys of the penalty parameters, if tokens are counted on the device.

    `penalized` selects among the work rows. With static shapes every work row has parameters.
    """

    penalized: RowSelection
    rows: int
    repetition: int
    frequency: int
    presence: int
    new_rows: int
    new_ids: int
    new_entries: int


class BatchPlan:
    """Sampling metadata of one batch. The constructor selects rows and uploads; the Sampler runs the operations.

    Args:
        rows: int [n]: the batch row of each row of logits.
        flags: uint16 [n]: `SamplingState.flags` of these rows.
        seq_lens: int [n]: tokens before each sampled token.
        state, history: Parameters and tokens of the rows.
        masks: Grammar masks of some rows.
        has_mask: Whether a mask tensor covers all rows.
        vocab_size: Tokens in a row of logits.
        device: Where the logits are.
        staging: Buffers to upload from; None for an ordinary copy.
        may_synchronize: Whether host and device may synchronize, see Filters.
        num_rows: With static shapes, how many of the n rows are not padding. All rows are work rows then, and
            selections are masks.
        forced: int64 [n]: tokens to sample in place of any other, negative for none; see ThinkingBudgets.

    Attributes:
        rows, state: As given.
        static: Whether shapes are static.
        plain: Greedy rows whose logits are not changed.
        work: All other rows. The selections below choose among these.
        greedy, random: The work rows without and with temperature.
        edits: Logits to change; None if there are none.
        counted: Penalties of rows whose tokens are counted on the device; None if there are none.
        processed: (index, rows) of each logits processor that applies to at least one row.
        random_inputs: Function that returns the sampling parameters of the random rows on the device; None without any.
        logprobs: Selects, in the batch, the rows that return log-probabilities.
        failures: Errors of logits processors, by index into the batch.
        forced: Upload key of `forced`; None without it.
    """

    def __init__(
        self,
        rows: np.ndarray,
        flags: np.ndarray,
        seq_lens: np.ndarray,
        *,
        state: SamplingState,
        history: TokenHistory,
        masks: TokenMasks | None,
        has_mask: bool,
        vocab_size: int,
        device: torch.device,
        staging: StagingBuffers | None,
        may_synchronize: bool,
        num_rows: int | None,
        forced: np.ndarray | None = None,
    ) -> None:
        self.rows, self.state, self.static = rows, state, num_rows is not None
        self._history, self._seq_lens, self._masks = history, seq_lens, masks
        self._vocab_size, self._may_synchronize = vocab_size, may_synchronize
        self.failures: dict[int, str] = {}
        is_too_short = (flags & MIN_TOKENS).astype(bool) & (seq_lens < state.min_length[rows])
        is_penalized = (flags & PENALTIES).astype(bool)
        is_random = self._is_random = (flags & RANDOM).astype(bool)
        is_masked = (flags & ALLOWED).astype(bool)
        if masks is not None:
            is_masked[:num_rows] |= masks.covers(rows[:num_rows])
        is_processed = (flags & PROCESSED).astype(bool)
        has_lists = is_too_short | is_penalized | (flags & (BIAS | BAD_WORDS)).astype(bool)
        is_edited = has_lists | is_masked | is_processed | has_mask
        is_plain = np.zeros(len(rows), dtype=bool) if self.static else ~(is_edited | is_random)

        self.upload = upload = BatchUpload(staging)
        self.plain, self.work = upload.select(is_plain), upload.select(~is_plain)
        in_work = self.work.indices
        self.greedy, self.random = self._select(~is_random[in_work]), self._select(is_random[in_work])
        self.edits = (
            self._add_edits(flags[in_work], is_too_short[in_work], is_masked[in_work]) if is_edited.any() else None
        )
        self.counted = None
        if (counts := state.device_counts) is not None and is_penalized.any():
            self.counted = self._add_counted(counts, is_penalized[in_work])
        self.processed = self._add_processed() if is_processed.any() else []
        self.random_inputs = self._add_random(in_work[self.random.indices]) if is_random.any() else None
        self.logprobs = upload.select((flags & LOGPROBS).astype(bool))
        self.forced = None if forced is None else upload.add(forced)
        upload.send(device)

    def _select(self, chosen: np.ndarray) -> RowSelection:
        return self.upload.select_masked(chosen) if self.static else self.upload.select(chosen)

    def _add_list(self, values: np.ndarray) -> int:
        """Adds one of several parallel lists. With static shapes it is padded by repeating its last entry."""
        if self.static and len(values):
            size = max(_MIN_EDITS, int(next_power_of_two(len(values))))
            values = np.pad(values, (0, size - len(values)), mode="edge")
        return self.upload.add(values)

    def _add_processed(self) -> list[tuple[int, RowSelection]]:
        """(index, rows among the work rows) of each logits processor that applies to at least one row."""
        processors = self.state.processors
        assert processors is not None
        rows = self.rows[self.work.indices].tolist()
        self.failures |= {int(self.work.indices[i]): text for i, text in processors.failures(rows).items()}
        found = []
        for index in range(len(processors)):
            chosen = np.zeros(len(rows), dtype=bool)
            chosen[processors.indices_for(index, rows)] = True
            if chosen.any():
                found.append((index, self.upload.select(chosen)))
        return found

    def _add_edits(self, flags: np.ndarray, is_too_short: np.ndarray, is_masked: np.ndarray) -> LogitsEditKeys:
        """Adds the logits to change, as (row among the work rows, token id), and the masks."""
        add, state = self._add_list, self.state
        in_batch = self.rows[self.work.indices]
        blocked_rows, blocked_ids = self._blocked_tokens(flags, is_too_short)
        biased = np.flatnonzero(flags & BIAS)
        biases = [state.biases[row] for row in in_batch[biased].tolist()]
        count_on_host = state.device_counts is None
        penalized = np.flatnonzero(flags & PENALTIES) if count_on_host else np.empty(0, dtype=np.int64)
        rows = in_batch[penalized]
        seq_lens = self._seq_lens[self.work.indices][penalized]
        counts = [self._count_tokens(row, length) for row, length in zip(rows.tolist(), seq_lens.tolist(), strict=True)]
        token_ids = [count.token_ids for count in counts]
        lengths = _lengths(token_ids)
        generated = _concatenate([count.counts for count in counts]).astype(np.float32)
        amounts = np.repeat(state.frequency[rows], lengths) * generated
        amounts += np.repeat(state.presence[rows], lengths) * (generated > 0)
        return LogitsEditKeys(
            blocked_rows=add(blocked_rows),
            blocked_ids=add(blocked_ids),
            bias_rows=add(np.repeat(biased, _lengths([ids for ids, _ in biases]))),
            bias_ids=add(_concatenate([ids for ids, _ in biases])),
            biases=add(_concatenate([values for _, values in biases])),
            penalty_rows=add(np.repeat(penalized, lengths)),
            penalty_ids=add(_concatenate(token_ids)),
            penalty_factors=add(np.repeat(state.repetition[rows], lengths)),
            penalty_amounts=add(amounts),
            masked=self._select(is_masked) if is_masked.any() else self.upload.select(is_masked),
            mask_words=self.upload.add(self._mask_words(is_masked)),
        )

    def _add_counted(self, counts: DeviceTokenCounts, is_penalized: np.ndarray) -> DevicePenaltyKeys:
        """Adds the penalty parameters, and the tokens of requests that are not in the device's count table yet."""
        add, state = self.upload.add, self.state
        in_batch = self.rows[self.work.indices]
        new = counts.list_new_rows(in_batch[is_penalized], self._history)
        penalized = self._select(is_penalized)
        rows = in_batch[penalized.indices]
        known = is_penalized[penalized.indices]
        keys = [self._add_list(values) for values in new]
        return DevicePenaltyKeys(
            penalized,
            rows=add(np.where(known, rows, counts.padding_row)),
            repetition=add(np.where(known, state.repetition[rows], 1)),
            frequency=add(np.where(known, state.frequency[rows], 0)),
            presence=add(np.where(known, state.presence[rows], 0)),
            new_rows=keys[0],
            new_ids=keys[1],
            new_entries=keys[2],
        )

    def _blocked_tokens(self, flags: np.ndarray, is_too_short: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and ids of the tokens blocked by `min_tokens` and `bad_words`."""
        state, in_batch = self.state, self.rows[self.work.indices]
        short, bad = np.flatnonzero(is_too_short), np.flatnonzero(flags & BAD_WORDS)
        ids = [state.end_tokens[row] for row in in_batch[short].tolist()]
        seq_lens = self._seq_lens[self.work.indices][bad].tolist()
        ids += [
            state.bad_words[row].blocked(self._history.token_ids[row, :length])
            for row, length in zip(in_batch[bad].tolist(), seq_lens, strict=True)
        ]
        return np.repeat(np.concatenate((short, bad)), _lengths(ids)), _concatenate(ids)

    def _mask_words(self, is_masked: np.ndarray) -> np.ndarray:
        """Packed masks of the masked rows. With static shapes: of all rows, zeros for rows without a mask."""
        words = self._combined_mask_words(is_masked)
        if not self.static or not len(words):
            return words
        masks = words.reshape(int(is_masked.sum()), -1)
        padded = np.zeros((len(is_masked), masks.shape[1]), dtype=masks.dtype)
        padded[is_masked] = masks
        return padded.reshape(-1)

    def _combined_mask_words(self, is_masked: np.ndarray) -> np.ndarray:
        """Grammar masks and `allowed_token_ids` of the masked rows, combined."""
        in_batch = self.work.indices[is_masked]
        rows, masks, allowed = self.rows[in_batch], self._masks, self.state.allowed
        has_grammar, words = np.zeros(len(rows), dtype=bool), np.empty((0, 0), dtype=np.uint16)
        if masks is not None:
            has_grammar = masks.covers(rows)
            num_drafts = self._seq_lens[in_batch] - self._history.num_tokens[rows]
            words = masks.words(rows[has_grammar], num_drafts[has_grammar])
        is_allowed = [row for row in rows.tolist() if row in allowed]
        if not is_allowed:
            return words.reshape(-1)
        width = max(len(allowed[is_allowed[0]]), words.shape[1])
        of_grammar = iter(words)
        return _concatenate(
            [
                intersect_masks(next(of_grammar) if is_covered else None, allowed.get(row), width)
                for row, is_covered in zip(rows.tolist(), has_grammar.tolist(), strict=True)
            ]
        )

    def _count_tokens(self, row: int, seq_len: int) -> TokenCounts:
        """Token counts of a row's first `seq_len` tokens, draft tokens included."""
        counts, history = self.state.counts[row], self._history
        tokens, num_prompt, known = history.token_ids[row], int(history.num_prompt_tokens[row]), history.num_tokens[row]
        counts.update(tokens[:known], num_prompt)
        return counts if seq_len == known else counts.extended_copy(tokens[:seq_len], num_prompt)

    def _add_random(self, in_batch: np.ndarray) -> Callable[[], _RandomInputs]:
        """Adds the sampling parameters of the random rows, which are given as indices into the batch.

        Returns:
            A function that returns them on the device after the upload. It holds no reference to the plan: cycles would
            delay freeing the tensors until garbage collection.
        """
        upload, state, vocab_size = self.upload, self.state, self._vocab_size
        rows = self.rows[in_batch]
        temperature, top_k, top_p = state.temperature[rows], state.top_k[rows], state.top_p[rows]
        min_p = state.min_p[rows]
        if self.static:  # greedy rows are computed as well, and their results dropped
            others = ~self._is_random[in_batch]
            temperature[others], top_k[others], top_p[others], min_p[others] = 1.0, 0, 1.0, 0.0
        has_top_k, has_top_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0
        is_small_top_k = has_top_k & (top_k <= _MAX_CANDIDATES) & (not self.static)
        is_large_top_k = has_top_k & ~is_small_top_k
        any_filter = bool((has_top_k | has_top_p | (min_p > 0)).any())
        row_candidates = np.minimum(num_candidates(np.where(has_top_k, top_k, 1)), vocab_size)
        num_large = _max_or_one(row_candidates[is_large_top_k])
        if self.static:
            num_large = _static_candidates(num_large)
        may_synchronize = self._may_synchronize
        with np.errstate(divide="ignore"):
            min_p_gap = temperature * np.log(min_p)
            top_p_gap = temperature * (np.log1p(-top_p) - np.float32(np.log(vocab_size)))
        positions = self._seq_lens[in_batch] - self._history.num_prompt_tokens[rows]
        coarse, fine = uniforms(state.seeds[rows], positions)
        add, get, get_ids = upload.add, upload.get, upload.get_ids
        parameters = [add(values) for values in (1.0 / temperature, min_p_gap, top_p, top_p_gap, coarse, fine)]
        top_k_key = add(np.where(has_top_k, top_k, vocab_size))
        row_candidates_key = add(row_candidates)
        small_top_k, large_top_k = upload.select(is_small_top_k), self._select(is_large_top_k)
        top_p_rows = self._select(has_top_p & ~is_small_top_k)

        def random_inputs() -> _RandomInputs:
            inv_temperature, min_p_gap, top_p, top_p_gap, coarse, fine = map(get, parameters)
            filters = Filters(
                inv_temperature=inv_temperature,
                min_p_gap=min_p_gap,
                top_k=get_ids(top_k_key),
                top_p=top_p,
                top_p_gap=top_p_gap,
                small_top_k=small_top_k,
                row_candidates=get_ids(row_candidates_key),
                num_candidates=min(_max_or_one(row_candidates[is_small_top_k]), vocab_size),
                has_small_top_k_and_top_p=bool((is_small_top_k & has_top_p).any()),
                large_top_k=large_top_k,
                num_large_top_k_candidates=min(num_large, vocab_size),
                top_p_rows=top_p_rows,
                any=any_filter,
                may_synchronize=may_synchronize,
            )
            return filters, coarse, fine

        return random_inputs


def warm_up_params(vocab_size: int) -> list[SamplingParams]:
    """Sampling parameters for warm-up: together they run every static-shape program that requests can need with
    temperature, top_k, top_p and min_p. Log-probabilities, penalties and masks need further programs.
    """
    top_k = dict.fromkeys(min(size, vocab_size - 1) for size in (*_STATIC_CANDIDATES, vocab_size))
    filtered = [SamplingParams(temperature=1.0, top_k=k, top_p=0.5) for k in top_k if k > 0]
    return [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), *filtered]


def kernel_warm_up_params() -> list[SamplingParams]:
    """Sampling parameters that together call every operation of sampling: greedy, draws without and with each filter,
    penalties, and log-probabilities.
    """
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.5, presence_penalty=0.5, logprobs=1),
    ]


def _static_candidates(wanted: int) -> int:
    """The smallest number of candidates in use with static shapes that is at least `wanted`."""
    return next((size for size in _STATIC_CANDIDATES if wanted <= size), MAX_VOCAB_SIZE)


def _max_or_one(candidates: np.ndarray) -> int:
    """The largest number, at least 1."""
    return int(candidates.max(initial=1))


def _lengths(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts], dtype=np.int64)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
