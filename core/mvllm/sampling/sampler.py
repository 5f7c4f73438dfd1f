"""Chooses the next token of each row of a batch.

First the host decides, with NumPy and without looking at the logits, which rows need what; everything the device needs
to know goes there in one copy. Then each group of rows takes the cheapest way that serves it:

    plain    greedy, nothing to change            largest logit, in the logits' own dtype
    edited   anything but greedy and temperature  float32 copy, changed in place; then as greedy or random
    random   temperature > 0                      the platform's draw, or thresholds, weights (filters.py) and a draw

No row's result depends on another row. The device is waited for only where steps are not planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.ops.argmax import argmax as reference_argmax
from mvllm.ops.draw import draw, draw_block
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.batch_upload import BatchUpload, RowSelection
from mvllm.sampling.filters import Filters, filtered_weights, num_candidates
from mvllm.sampling.logprobs import gather_logprobs
from mvllm.sampling.penalties import DeviceTokenCounts, TokenCounts, apply_penalties
from mvllm.sampling.sampler_output import GatheredLogprobs, SamplerOutput
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
    TokenHistory,
)
from mvllm.sampling.token_masks import TokenMasks, intersect_masks, unpack_masks
from mvllm.sampling.uniforms import uniforms

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FilteredDraw = Callable[..., torch.Tensor]
"""As the operation `filtered_draw`."""

_MAX_CANDIDATES = 1024
"""Up to this top_k, top_p is looked for among the k most probable tokens, and above it in the whole vocabulary."""


_STATIC_CANDIDATES = (64, _MAX_CANDIDATES)
"""Numbers of candidates for top_k where shapes are static; beyond, the whole vocabulary."""

_MIN_EDITS = 64
"""Least length of a list of places to change where shapes are static."""

_ELEMENTS_AT_ONCE = 1 << 18
"""Logits that go through the filters at a time where nothing is gained by more: what is in between stays in the caches,
and takes little memory."""


class Sampler:
    """Has no state of its own; see the module's text.

    Args:
        staging: Buffers for what goes to the device, where a step must not wait for the one before.
        argmax: The operation of that name.
        filtered_draw: The operation of that name, where somebody provides it.
        static: Each shape costs a compilation. Every row of logits goes through the same operations, whichever rows
            need them, and there are few kinds of batches: see `warm_up_params`.

    Attributes:
        may_synchronize: Whether the host may wait for the device to decide what to compute.
    """

    def __init__(
        self,
        staging: StagingBuffers | None = None,
        argmax: Argmax = reference_argmax,
        filtered_draw: FilteredDraw | None = None,
        *,
        static: bool = False,
    ) -> None:
        self._staging = staging
        self._argmax = argmax
        self._filtered_draw = filtered_draw
        self._static = static
        # Else the step before may be under way, and looking at what the device found would be waiting for it.
        self.may_synchronize = staging is None and not static

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        state: SamplingState,
        history: TokenHistory,
        mask: torch.Tensor | None = None,
        masks: TokenMasks | None = None,
        ends: np.ndarray | None = None,
        only_tokens: bool = False,
    ) -> SamplerOutput:
        """Samples one token for each line of logits.

        Args:
            logits: [n, vocab], any floating dtype; left as they are. Where shapes are static, further rows are padding.
            rows: int [n] on the host; the row that each line of logits belongs to.
            state: Settings of the rows.
            history: Tokens of the rows so far; read for penalties, bad words, `min_tokens`, and the place of the draw.
                With `state.device_counts`, whoever keeps the tokens on the device has them counted there.
            ends: int [n] on the host; how many tokens of the row each line follows, of which the last may be guesses.
                None: all that the row has. Logits processors and masks are for lines that follow all.
            only_tokens: Leave out log-probabilities, whatever rows ask for.
            mask: bool [n, vocab] on the device; tokens that may be chosen. None allows all.
            masks: Likewise, on the host, for some of the rows.

        Returns:
            Tokens, and for rows that asked their log-probabilities. Rows without a usable logit (NaN, infinite, all
            masked) are in its `errors`; the others are not affected by them.
        """
        flags = state.flags[rows]
        if mask is None and masks is None and not flags.any():
            peaks, token_ids = self._argmax(logits)
            return SamplerOutput(token_ids, peaks, num_rows=len(rows))
        if ends is None:
            ends = history.num_tokens[rows]
        num_rows = len(rows)
        if self._static:
            padding = (0, logits.shape[0] - num_rows)
            rows, ends, flags = np.pad(rows, padding), np.pad(ends, padding), np.pad(flags, padding)
        in_pieces = self.may_synchronize and self._filtered_draw is None
        size = max(1, _ELEMENTS_AT_ONCE // logits.shape[1]) if in_pieces else len(rows)
        batch = partial(
            _SamplingBatch,
            state=state,
            history=history,
            staging=self._staging,
            argmax=self._argmax,
            filtered_draw=self._filtered_draw,
            may_synchronize=self.may_synchronize,
            masks=masks,
            num_rows=num_rows if self._static else None,
        )
        if len(rows) <= size:
            whole = batch(logits, rows, ends=ends, flags=flags, mask=mask)
            token_ids, peaks = whole.sample()
            gathered = None if only_tokens else whole.gather_logprobs(token_ids)
            return SamplerOutput(token_ids, peaks, gathered, whole.failures, num_rows)
        parts = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        batches = [
            batch(logits[p], rows[p], ends=ends[p], flags=flags[p], mask=None if mask is None else mask[p])
            for p in parts
        ]
        chosen = [each.sample() for each in batches]
        token_ids, peaks = torch.cat([ids for ids, _ in chosen]), torch.cat([peaks for _, peaks in chosen])
        failures = {
            part.start + i: text for part, each in zip(parts, batches, strict=True) for i, text in each.failures.items()
        }
        if only_tokens or not (flags & LOGPROBS).any():
            return SamplerOutput(token_ids, peaks, failures=failures)
        gathered = batch(logits, rows, ends=ends, flags=flags, mask=mask).gather_logprobs(token_ids)
        return SamplerOutput(token_ids, peaks, gathered, failures)


@dataclass
class _DevicePenaltyKeys:
    """Keys of what the penalties need where tokens are counted on the device.

    `penalized` are chosen among the work rows, all of which have a row of the table and settings, if static.
    """

    penalized: RowSelection
    rows: int
    repetition: int
    frequency: int
    presence: int
    new_rows: int
    new_ids: int
    new_entries: int


@dataclass
class _LogitsEdits:
    """Keys of the uploaded lists of places to change."""

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


class _SamplingBatch:
    """One batch: decided on the host by the constructor, computed on the device by the methods.

    With `num_rows`, shapes are static: all rows are work rows, the first `num_rows` of them are real, and selections
    are masks.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        *,
        state: SamplingState,
        history: TokenHistory,
        ends: np.ndarray,
        flags: np.ndarray,
        mask: torch.Tensor | None,
        staging: StagingBuffers | None,
        argmax: Argmax,
        filtered_draw: FilteredDraw | None,
        may_synchronize: bool,
        masks: TokenMasks | None,
        num_rows: int | None = None,
    ) -> None:
        self.logits, self.rows, self.state, self.history, self.mask = logits, rows, state, history, mask
        self.ends = ends
        self.masks = masks
        self.failures: dict[int, str] = {}
        too_short = ends < state.min_length[rows]
        is_too_short = (flags & MIN_TOKENS).astype(bool) & too_short
        is_penalized = (flags & PENALTIES).astype(bool)
        is_random = (flags & RANDOM).astype(bool)
        is_masked = (flags & ALLOWED).astype(bool)
        if masks is not None:
            is_masked[:num_rows] |= masks.covers(rows[:num_rows])
        has_lists = is_too_short | is_penalized | (flags & (BIAS | BAD_WORDS)).astype(bool)
        is_processed = (flags & PROCESSED).astype(bool)
        is_edited = has_lists | is_masked | is_processed | (mask is not None)
        is_plain = ~(is_edited | is_random)
        self.static = num_rows is not None
        if self.static:
            is_plain[:] = False

        self.argmax, self.filtered_draw, self.may_synchronize = argmax, filtered_draw, may_synchronize
        self.upload = upload = BatchUpload(staging)
        self.plain, self.work = upload.select(is_plain), upload.select(~is_plain)
        in_work = self.work.indices
        self.is_random = is_random
        self.greedy, self.random = self._select(~is_random[in_work]), self._select(is_random[in_work])
        self.edits = (
            self._add_edits(flags[in_work], is_too_short[in_work], is_masked[in_work]) if is_edited.any() else None
        )
        self.counted = None
        if (counts := state.device_counts) is not None and is_penalized.any():
            self.counted = self._add_counted(counts, is_penalized[in_work])
        self.processed = self._add_processed() if is_processed.any() else []
        self.random_keys = self._add_random(in_work[self.random.indices]) if is_random.any() else None
        self.with_logprobs = upload.select((flags & LOGPROBS).astype(bool))
        upload.send(logits.device)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids, int64 [n], and the largest logit that each could have been, float32 [n]."""
        num_rows = len(self.rows)
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self.logits.device)
        peaks = torch.zeros(num_rows, dtype=torch.float32, device=self.logits.device)
        if len(self.plain):
            values, ids = self.argmax(self.plain.gather(self.logits))  # which of equal ones, it decides for all batches
            token_ids, peaks = self.plain.scatter(token_ids, ids), self.plain.scatter(peaks, values.float())
        if len(self.work):
            ids, values = self._choose_work(self._edited_logits())
            token_ids, peaks = self.work.scatter(token_ids, ids), self.work.scatter(peaks, values)
        return token_ids, peaks

    def gather_logprobs(self, token_ids: torch.Tensor) -> GatheredLogprobs | None:
        """Gathers the log-probabilities of the chosen tokens, for the rows that asked."""
        chosen = self.with_logprobs
        if not len(chosen):
            return None
        num_logprobs = np.minimum(self.state.num_logprobs[self.rows[chosen.indices]], self.logits.shape[1])
        most = int(num_logprobs.max())
        if self.static:
            most = min(_power_of_two(most), self.logits.shape[1]) if most else 0
            return GatheredLogprobs(chosen.indices, num_logprobs, gather_logprobs(self.logits, token_ids, most))
        gathered = gather_logprobs(chosen.gather(self.logits), chosen.gather(token_ids), most)
        return GatheredLogprobs(chosen.indices, num_logprobs, gathered)

    # --- on the device

    def _edited_logits(self) -> torch.Tensor:
        """float32 [w, vocab]: logits of the rows that are not plain, as changed before temperature and filters."""
        taken = self.work.gather(self.logits)
        if self.edits is None:
            return taken.float()
        logits = taken.to(torch.float32, copy=taken is self.logits)
        upload, edits = self.upload, self.edits
        for index, rows in self.processed:
            logits = self._process(index, rows, logits)
        if self.mask is not None:
            logits.masked_fill_(~self.work.gather(self.mask), -torch.inf)
        if len(edits.masked):
            allowed = unpack_masks(upload.get(edits.mask_words), len(edits.masked), logits.shape[1])
            masked = edits.masked.gather(logits)
            logits = edits.masked.scatter(logits, masked.masked_fill(~allowed, -torch.inf))
        blocked = upload.get_ids(edits.blocked_rows), upload.get_ids(edits.blocked_ids)
        if blocked[0].numel():
            logits[blocked] = -torch.inf
        biased = upload.get_ids(edits.bias_rows), upload.get_ids(edits.bias_ids)
        if biased[0].numel():
            logits[biased] = logits[biased] + upload.get(edits.biases)
        penalized = upload.get_ids(edits.penalty_rows), upload.get_ids(edits.penalty_ids)
        if penalized[0].numel():
            apply_penalties(logits, *penalized, upload.get(edits.penalty_factors), upload.get(edits.penalty_amounts))
        return logits if self.counted is None else self._penalize_counted(logits, self.counted)

    def _penalize_counted(self, logits: torch.Tensor, keys: _DevicePenaltyKeys) -> torch.Tensor:
        get, get_ids, counts = self.upload.get, self.upload.get_ids, self.state.device_counts
        assert counts is not None
        new_rows = get_ids(keys.new_rows)
        if new_rows.numel():
            counts.write_rows(new_rows, get_ids(keys.new_ids), get_ids(keys.new_entries))
        lines = keys.penalized.gather(logits)
        if lines is logits and self.static:
            lines = logits.clone()  # `put` chooses between the two
        settings = get(keys.repetition), get(keys.frequency), get(keys.presence)
        counts.apply(lines, get_ids(keys.rows), *settings)
        return keys.penalized.scatter(logits, lines)

    def _process(self, index: int, rows: RowSelection, logits: torch.Tensor) -> torch.Tensor:
        """Has a logits processor change what is its own."""
        processors, in_batch = self.state.processors, self.work.indices[rows.indices]
        assert processors is not None
        changed, failures = processors.apply(index, rows.gather(logits), self.rows[in_batch].tolist())
        self.failures |= {int(in_batch[place]): text for place, text in failures.items()}
        return rows.scatter(logits, changed)

    def _choose_work(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.random_keys is None:
            values, ids = logits.max(dim=1)
            return ids, values
        peaks = logits.amax(dim=1)
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if len(self.greedy):
            token_ids = self.greedy.scatter(token_ids, self.greedy.gather(logits).argmax(dim=1))
        filters, coarse, fine = self._random_tensors(self.random_keys)
        theirs, largest = self.random.gather(logits), self.random.gather(peaks)
        if self.filtered_draw is None:
            drawn = draw(filtered_weights(theirs, largest, filters), coarse, fine)
        else:
            settings = filters.inv_temperature, filters.min_p_gap, filters.top_k, filters.top_p
            drawn = self.filtered_draw(theirs, largest, *settings, coarse, fine, draw_block(logits.shape[1]))
        return self.random.scatter(token_ids, drawn), peaks

    def _random_tensors(self, keys: _RandomKeys) -> tuple[Filters, torch.Tensor, torch.Tensor]:
        get = self.upload.get
        filters = Filters(
            inv_temperature=get(keys.inv_temperature),
            min_p_gap=get(keys.min_p_gap),
            top_k=self.upload.get_ids(keys.top_k),
            top_p=get(keys.top_p),
            top_p_gap=get(keys.top_p_gap),
            small_top_k=keys.small_top_k,
            row_candidates=self.upload.get_ids(keys.row_candidates),
            num_candidates=min(keys.num_candidates, self.logits.shape[1]),
            has_small_top_k_and_top_p=keys.has_small_top_k_and_top_p,
            large_top_k=keys.large_top_k,
            num_large_top_k_candidates=min(keys.num_large_top_k_candidates, self.logits.shape[1]),
            top_p_rows=keys.top_p_rows,
            any=keys.any_filter,
            may_synchronize=self.may_synchronize,
        )
        return filters, get(keys.coarse), get(keys.fine)

    # --- on the host

    def _select(self, chosen: np.ndarray) -> RowSelection:
        return self.upload.select_masked(chosen) if self.static else self.upload.select(chosen)

    def _add_list(self, values: np.ndarray) -> int:
        """Adds one of several lists of equal length, whose entries may stand there twice: to few lengths, if static."""
        if self.static and len(values):
            values = np.pad(values, (0, max(_MIN_EDITS, _power_of_two(len(values))) - len(values)), mode="edge")
        return self.upload.add(values)

    def _add_processed(self) -> list[tuple[int, RowSelection]]:
        """The logits processors that have something to do, and for which of the work rows."""
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

    def _add_edits(self, flags: np.ndarray, is_too_short: np.ndarray, is_masked: np.ndarray) -> _LogitsEdits:
        """Lists the places to change, as (row among the work rows, token id), and the masks."""
        add, state = self._add_list, self.state
        in_batch = self.rows[self.work.indices]
        blocked_rows, blocked_ids = self._blocked_places(flags, is_too_short)
        biased = np.flatnonzero(flags & BIAS)
        biases = [state.biases[row] for row in in_batch[biased].tolist()]
        by_host = state.device_counts is None
        penalized = np.flatnonzero(flags & PENALTIES) if by_host else np.empty(0, dtype=np.int64)
        rows = in_batch[penalized]
        ends = self.ends[self.work.indices][penalized]
        counts = [self._count_tokens(row, end) for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        token_ids = [count.token_ids for count in counts]
        lengths = _lengths(token_ids)
        generated = _concatenate([count.counts for count in counts]).astype(np.float32)
        amounts = np.repeat(state.frequency[rows], lengths) * generated
        amounts += np.repeat(state.presence[rows], lengths) * (generated > 0)
        return _LogitsEdits(
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

    def _add_counted(self, counts: DeviceTokenCounts, is_penalized: np.ndarray) -> _DevicePenaltyKeys:
        """Adds the settings of the penalised rows, and the tokens of those that the device does not know yet."""
        add, state = self.upload.add, self.state
        in_batch = self.rows[self.work.indices]
        new = counts.list_new_rows(in_batch[is_penalized], self.history)
        penalized = self._select(is_penalized)
        rows = in_batch[penalized.indices]
        known = is_penalized[penalized.indices]
        keys = [self._add_list(values) for values in new]
        return _DevicePenaltyKeys(
            penalized,
            rows=add(np.where(known, rows, counts.padding_row)),
            repetition=add(np.where(known, state.repetition[rows], 1)),
            frequency=add(np.where(known, state.frequency[rows], 0)),
            presence=add(np.where(known, state.presence[rows], 0)),
            new_rows=keys[0],
            new_ids=keys[1],
            new_entries=keys[2],
        )

    def _blocked_places(self, flags: np.ndarray, is_too_short: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of tokens that cannot be chosen: those that would end a row too soon, or a word that is bad."""
        state, in_batch = self.state, self.rows[self.work.indices]
        short, bad = np.flatnonzero(is_too_short), np.flatnonzero(flags & BAD_WORDS)
        ids = [state.end_tokens[row] for row in in_batch[short].tolist()]
        ends = self.ends[self.work.indices][bad].tolist()
        ids += [
            state.bad_words[row].blocked(self.history.token_ids[row, :end])
            for row, end in zip(in_batch[bad].tolist(), ends, strict=True)
        ]
        return np.repeat(np.concatenate((short, bad)), _lengths(ids)), _concatenate(ids)

    def _mask_words(self, is_masked: np.ndarray) -> np.ndarray:
        """The masks of all rows that have one, or are allowed some tokens only, or both; of all rows, if static."""
        words = self._words_of(is_masked)
        if not self.static or not len(words):
            return words
        found = words.reshape(int(is_masked.sum()), -1)
        every = np.zeros((len(is_masked), found.shape[1]), dtype=found.dtype)
        every[is_masked] = found
        return every.reshape(-1)

    def _words_of(self, is_masked: np.ndarray) -> np.ndarray:
        rows, masks, allowed = self.rows[self.work.indices[is_masked]], self.masks, self.state.allowed
        is_allowed = [row for row in rows.tolist() if row in allowed]
        if not is_allowed:
            return np.empty(0, dtype=np.uint16) if masks is None else masks.words(rows)
        widths = [len(allowed[is_allowed[0]]), 0 if masks is None else masks.num_words]
        of = (lambda row: None) if masks is None else masks.get
        return _concatenate([intersect_masks(of(row), allowed.get(row), max(widths)) for row in rows.tolist()])

    def _count_tokens(self, row: int, end: int) -> TokenCounts:
        """Brings the row's counts up to its history, and beyond it to `end`, where guesses stand there."""
        counts, history = self.state.counts[row], self.history
        tokens, num_prompt, known = history.token_ids[row], int(history.num_prompt_tokens[row]), history.num_tokens[row]
        counts.update(tokens[:known], num_prompt)
        return counts if end == known else counts.extended_copy(tokens[:end], num_prompt)

    def _add_random(self, in_batch: np.ndarray) -> _RandomKeys:
        """Adds the parameters of the random rows, given as indices into the batch."""
        upload, state, vocab_size = self.upload, self.state, self.logits.shape[1]
        rows = self.rows[in_batch]
        temperature, top_k, top_p = state.temperature[rows], state.top_k[rows], state.top_p[rows]
        min_p = state.min_p[rows]
        if self.static:  # the others are computed, too, for nothing
            others = ~self.is_random[in_batch]
            temperature[others], top_k[others], top_p[others], min_p[others] = 1.0, 0, 1.0, 0.0
        has_top_k, has_top_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0
        is_narrow = has_top_k & (top_k <= _MAX_CANDIDATES) & (not self.static)
        is_broad = has_top_k & ~is_narrow
        any_filter = bool((has_top_k | has_top_p | (min_p > 0)).any())
        own = np.minimum(num_candidates(np.where(has_top_k, top_k, 1)), vocab_size)
        with np.errstate(divide="ignore"):
            min_p_gap = temperature * np.log(min_p)
            top_p_gap = temperature * (np.log1p(-top_p) - np.float32(np.log(vocab_size)))
        positions = self.ends[in_batch] - self.history.num_prompt_tokens[rows]
        coarse, fine = uniforms(state.seeds[rows], positions)
        return _RandomKeys(
            inv_temperature=upload.add(1.0 / temperature),
            min_p_gap=upload.add(min_p_gap),
            top_k=upload.add(np.where(has_top_k, top_k, vocab_size)),
            top_p=upload.add(top_p),
            top_p_gap=upload.add(top_p_gap),
            coarse=upload.add(coarse),
            fine=upload.add(fine),
            small_top_k=upload.select(is_narrow),
            row_candidates=upload.add(own),
            num_candidates=_most(own[is_narrow]),
            has_small_top_k_and_top_p=bool((is_narrow & has_top_p).any()),
            large_top_k=self._select(is_broad),
            num_large_top_k_candidates=_static_candidates(_most(own[is_broad]))
            if self.static
            else _most(own[is_broad]),
            top_p_rows=self._select(has_top_p & ~is_narrow),
            any_filter=any_filter,
        )


@dataclass
class _RandomKeys:
    """Keys of the uploaded parameters of the random rows, and what the host knows about them."""

    inv_temperature: int
    min_p_gap: int
    top_k: int
    top_p: int
    top_p_gap: int
    coarse: int
    fine: int
    small_top_k: RowSelection
    row_candidates: int
    num_candidates: int
    has_small_top_k_and_top_p: bool
    large_top_k: RowSelection
    num_large_top_k_candidates: int
    top_p_rows: RowSelection
    any_filter: bool


def warm_up_params(vocab_size: int) -> list[SamplingParams]:
    """Settings of which one row in a batch makes each program that static shapes need, where rows ask for nothing but
    temperature, top_k, top_p and min_p. Log-probabilities, penalties, masks and the like make further ones.
    """
    top_k = dict.fromkeys(min(size, vocab_size - 1) for size in (*_STATIC_CANDIDATES, vocab_size))
    filtered = [SamplingParams(temperature=1.0, top_k=k, top_p=0.5) for k in top_k if k > 0]
    return [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), *filtered]


def _static_candidates(wanted: int) -> int:
    """How many candidates top_k looks at, of few numbers."""
    return next((size for size in _STATIC_CANDIDATES if wanted <= size), MAX_VOCAB_SIZE)


def _power_of_two(size: int) -> int:
    """The next one, from `size` on."""
    return 1 << (size - 1).bit_length()


def _most(candidates: np.ndarray) -> int:
    return int(candidates.max(initial=1))


def _lengths(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts], dtype=np.int64)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
