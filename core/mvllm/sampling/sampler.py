"""Chooses the next token of each row of a batch.

First the host decides, with NumPy and without looking at the logits, which rows need what; everything the device needs
to know goes there in one copy. Then each group of rows takes the cheapest way that serves it:

    plain    greedy, nothing to change            largest logit, in the logits' own dtype
    edited   mask, min_tokens or penalties        float32 copy, changed in place; then as greedy or random
    random   temperature > 0                      thresholds, weights, draw (filters.py, draw.py)

No row's result depends on another row. The device is waited for only where steps are not planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mvllm.ops.argmax import argmax as reference_argmax
from mvllm.platform.staging import StepStaging
from mvllm.sampling.draw import draw
from mvllm.sampling.filters import Filters, filtered_weights, num_candidates
from mvllm.sampling.logprobs import gather_logprobs
from mvllm.sampling.masks import TokenMasks, allowed_tokens
from mvllm.sampling.output import GatheredLogprobs, SamplerOutput
from mvllm.sampling.penalties import TokenCounts, apply_penalties
from mvllm.sampling.state import LOGPROBS, MIN_TOKENS, PENALTIES, RANDOM, SamplingState, TokenHistory
from mvllm.sampling.uniforms import uniforms
from mvllm.sampling.upload import Selection, Upload

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_MAX_CANDIDATES = 1024
"""Up to this top_k, top_p is looked for among the k most probable tokens, and above it in the whole vocabulary."""


_ELEMENTS_AT_ONCE = 1 << 18
"""Logits that go through the filters at a time where nothing is gained by more: what is in between stays in the caches,
and takes little memory."""


class Sampler:
    """Has no state of its own; see the module's text.

    Args:
        staging: Buffers for what goes to the device, where a step must not wait for the one before.
        argmax: The operation of that name.

    Attributes:
        may_look: Whether the host may wait for the device to decide what to compute.
    """

    def __init__(self, staging: StepStaging | None = None, argmax: Argmax = reference_argmax) -> None:
        self._staging = staging
        self._argmax = argmax
        # Else the step before may be under way, and looking at what the device found would be waiting for it.
        self.may_look = staging is None

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        state: SamplingState,
        history: TokenHistory,
        mask: torch.Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> SamplerOutput:
        """Samples one token for each of `rows`.

        Args:
            logits: [n, vocab], any floating dtype; left as they are.
            rows: int [n] on the host; the row that each line of logits belongs to.
            state: Settings of the rows.
            history: Tokens of the rows so far; read for penalties, `min_tokens` and the position of the draw.
            mask: bool [n, vocab] on the device; tokens that may be chosen. None allows all.
            masks: Likewise, on the host, for some of the rows.

        Returns:
            Tokens, and for rows that asked their log-probabilities. Rows without a usable logit (NaN, infinite, all
            masked) are in its `errors`; the others are not affected by them.
        """
        flags = state.flags[rows]
        if mask is None and masks is None and not flags.any():
            peaks, token_ids = self._argmax(logits)
            return SamplerOutput(token_ids, peaks)
        size = max(1, _ELEMENTS_AT_ONCE // logits.shape[1]) if self.may_look else len(rows)
        batch = partial(
            _Batch,
            state=state,
            history=history,
            staging=self._staging,
            argmax=self._argmax,
            may_look=self.may_look,
            masks=masks,
        )
        if len(rows) <= size:
            whole = batch(logits, rows, flags=flags, mask=mask)
            token_ids, peaks = whole.choose()
            return SamplerOutput(token_ids, peaks, whole.logprobs_of(token_ids))
        parts = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        chosen = [
            batch(logits[p], rows[p], flags=flags[p], mask=None if mask is None else mask[p]).choose() for p in parts
        ]
        token_ids, peaks = torch.cat([ids for ids, _ in chosen]), torch.cat([peaks for _, peaks in chosen])
        if not (flags & LOGPROBS).any():
            return SamplerOutput(token_ids, peaks)
        return SamplerOutput(token_ids, peaks, batch(logits, rows, flags=flags, mask=mask).logprobs_of(token_ids))


@dataclass
class _Edits:
    """Keys of the uploaded lists of places to change."""

    blocked_rows: int
    blocked_ids: int
    penalty_rows: int
    penalty_ids: int
    penalty_factors: int
    penalty_amounts: int
    masked: Selection
    mask_words: int


class _Batch:
    """One batch: decided on the host by the constructor, computed on the device by the methods."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        *,
        state: SamplingState,
        history: TokenHistory,
        flags: np.ndarray,
        mask: torch.Tensor | None,
        staging: StepStaging | None,
        argmax: Argmax,
        may_look: bool,
        masks: TokenMasks | None,
    ) -> None:
        self.logits, self.rows, self.state, self.history, self.mask = logits, rows, state, history, mask
        self.masks = masks
        too_short = history.num_tokens[rows] < state.min_length[rows]
        is_blocked = (flags & MIN_TOKENS).astype(bool) & too_short
        is_penalized = (flags & PENALTIES).astype(bool)
        is_random = (flags & RANDOM).astype(bool)
        is_masked = np.zeros(len(rows), dtype=bool) if masks is None else masks.covers(rows)
        is_edited = is_blocked | is_penalized | is_masked | (mask is not None)
        is_plain = ~(is_edited | is_random)

        self.argmax, self.may_look = argmax, may_look
        self.upload = upload = Upload(staging)
        self.plain, self.work = upload.select(is_plain), upload.select(~is_plain)
        in_work = self.work.indices
        self.greedy, self.random = upload.select(~is_random[in_work]), upload.select(is_random[in_work])
        self.edits = (
            self._add_edits(is_blocked[in_work], is_penalized[in_work], is_masked[in_work]) if is_edited.any() else None
        )
        self.random_keys = self._add_random(in_work[self.random.indices]) if len(self.random) else None
        self.with_logprobs = upload.select((flags & LOGPROBS).astype(bool))
        upload.send(logits.device)

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids, int64 [n], and the largest logit that each could have been, float32 [n]."""
        num_rows = len(self.rows)
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=self.logits.device)
        peaks = torch.zeros(num_rows, dtype=torch.float32, device=self.logits.device)
        if len(self.plain):
            values, ids = self.argmax(self.plain.take(self.logits))  # which of equal ones, it decides for all batches
            token_ids, peaks = self.plain.put(token_ids, ids), self.plain.put(peaks, values.float())
        if len(self.work):
            ids, values = self._choose_work(self._edited_logits())
            token_ids, peaks = self.work.put(token_ids, ids), self.work.put(peaks, values)
        return token_ids, peaks

    def logprobs_of(self, token_ids: torch.Tensor) -> GatheredLogprobs | None:
        """Gathers the log-probabilities of the chosen tokens, for the rows that asked."""
        chosen = self.with_logprobs
        if not len(chosen):
            return None
        num_logprobs = np.minimum(self.state.num_logprobs[self.rows[chosen.indices]], self.logits.shape[1])
        most = int(num_logprobs.max())
        gathered = gather_logprobs(chosen.take(self.logits), chosen.take(token_ids), most)
        return GatheredLogprobs(chosen.indices, num_logprobs, gathered)

    # --- on the device

    def _edited_logits(self) -> torch.Tensor:
        """float32 [w, vocab]: logits of the rows that are not plain, with mask, min_tokens and penalties applied."""
        taken = self.work.take(self.logits)
        if self.edits is None:
            return taken.float()
        logits = taken.to(torch.float32, copy=taken is self.logits)
        upload, edits = self.upload, self.edits
        if self.mask is not None:
            logits.masked_fill_(~self.work.take(self.mask), -torch.inf)
        if len(edits.masked):
            allowed = allowed_tokens(upload.get(edits.mask_words), len(edits.masked), logits.shape[1])
            masked = edits.masked.take(logits)
            logits = edits.masked.put(logits, masked.masked_fill_(~allowed, -torch.inf))
        blocked = upload.get_ids(edits.blocked_rows), upload.get_ids(edits.blocked_ids)
        if blocked[0].numel():
            logits[blocked] = -torch.inf
        penalized = upload.get_ids(edits.penalty_rows), upload.get_ids(edits.penalty_ids)
        if penalized[0].numel():
            apply_penalties(logits, *penalized, upload.get(edits.penalty_factors), upload.get(edits.penalty_amounts))
        return logits

    def _choose_work(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.random_keys is None:
            values, ids = logits.max(dim=1)
            return ids, values
        peaks = logits.amax(dim=1)
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if len(self.greedy):
            token_ids = self.greedy.put(token_ids, self.greedy.take(logits).argmax(dim=1))
        filters, coarse, fine = self._random_tensors(self.random_keys)
        weights = filtered_weights(self.random.take(logits), self.random.take(peaks), filters)
        return self.random.put(token_ids, draw(weights, coarse, fine)), peaks

    def _random_tensors(self, keys: _RandomKeys) -> tuple[Filters, torch.Tensor, torch.Tensor]:
        get = self.upload.get
        filters = Filters(
            inv_temperature=get(keys.inv_temperature),
            min_p_gap=get(keys.min_p_gap),
            top_k=self.upload.get_ids(keys.top_k),
            top_p=get(keys.top_p),
            top_p_gap=get(keys.top_p_gap),
            narrow=keys.narrow,
            own_candidates=self.upload.get_ids(keys.own_candidates),
            num_candidates=min(keys.num_candidates, self.logits.shape[1]),
            narrow_top_p=keys.narrow_top_p,
            broad=keys.broad,
            num_broad_candidates=min(keys.num_broad_candidates, self.logits.shape[1]),
            nucleus=keys.nucleus,
            any=keys.any_filter,
            may_look=self.may_look,
        )
        return filters, get(keys.coarse), get(keys.fine)

    # --- on the host

    def _add_edits(self, is_blocked: np.ndarray, is_penalized: np.ndarray, is_masked: np.ndarray) -> _Edits:
        """Lists the places to change, as (row among the work rows, token id), and the masks."""
        add, state = self.upload.add, self.state
        blocked, penalized = np.flatnonzero(is_blocked), np.flatnonzero(is_penalized)
        end_tokens = [state.end_tokens[row] for row in self.rows[self.work.indices[blocked]].tolist()]
        rows = self.rows[self.work.indices[penalized]]
        counts = [self._count_tokens(row) for row in rows.tolist()]
        lengths = _lengths([count.token_ids for count in counts])
        generated = _concatenate([count.counts for count in counts])
        amounts = np.repeat(state.frequency[rows], lengths) * generated
        amounts += np.repeat(state.presence[rows], lengths) * (generated > 0)
        return _Edits(
            blocked_rows=add(np.repeat(blocked, _lengths(end_tokens))),
            blocked_ids=add(_concatenate(end_tokens)),
            penalty_rows=add(np.repeat(penalized, lengths)),
            penalty_ids=add(_concatenate([count.token_ids for count in counts])),
            penalty_factors=add(np.repeat(state.repetition[rows], lengths)),
            penalty_amounts=add(amounts),
            masked=self.upload.select(is_masked),
            mask_words=add(self._mask_words(is_masked)),
        )

    def _mask_words(self, is_masked: np.ndarray) -> np.ndarray:
        if self.masks is None:
            return np.empty(0, dtype=np.uint16)
        return self.masks.words(self.rows[self.work.indices[is_masked]])

    def _count_tokens(self, row: int) -> TokenCounts:
        """Brings the row's counts up to its history."""
        counts, history = self.state.counts[row], self.history
        counts.update(history.token_ids[row, : history.num_tokens[row]], int(history.num_prompt_tokens[row]))
        return counts

    def _add_random(self, in_batch: np.ndarray) -> _RandomKeys:
        """Adds the parameters of the random rows, given as indices into the batch."""
        upload, state, vocab_size = self.upload, self.state, self.logits.shape[1]
        rows = self.rows[in_batch]
        temperature, top_k, top_p = state.temperature[rows], state.top_k[rows], state.top_p[rows]
        has_top_k, has_top_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0
        is_narrow = has_top_k & (top_k <= _MAX_CANDIDATES)
        is_broad = has_top_k & ~is_narrow
        own = np.minimum(num_candidates(np.where(has_top_k, top_k, 1)), vocab_size)
        with np.errstate(divide="ignore"):
            min_p_gap = temperature * np.log(state.min_p[rows])
            top_p_gap = temperature * (np.log1p(-top_p) - np.float32(np.log(vocab_size)))
        positions = self.history.num_tokens[rows] - self.history.num_prompt_tokens[rows]
        coarse, fine = uniforms(state.seeds[rows], positions)
        return _RandomKeys(
            inv_temperature=upload.add(1.0 / temperature),
            min_p_gap=upload.add(min_p_gap),
            top_k=upload.add(np.where(has_top_k, top_k, vocab_size)),
            top_p=upload.add(top_p),
            top_p_gap=upload.add(top_p_gap),
            coarse=upload.add(coarse),
            fine=upload.add(fine),
            narrow=upload.select(is_narrow),
            own_candidates=upload.add(own),
            num_candidates=_most(own[is_narrow]),
            narrow_top_p=bool((is_narrow & has_top_p).any()),
            broad=upload.select(is_broad),
            num_broad_candidates=_most(own[is_broad]),
            nucleus=upload.select(has_top_p & ~is_narrow),
            any_filter=bool((has_top_k | has_top_p | (state.min_p[rows] > 0)).any()),
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
    narrow: Selection
    own_candidates: int
    num_candidates: int
    narrow_top_p: bool
    broad: Selection
    num_broad_candidates: int
    nucleus: Selection
    any_filter: bool


def _most(candidates: np.ndarray) -> int:
    return int(candidates.max(initial=1))


def _lengths(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts], dtype=np.int64)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
