"""Samples the next token of each row of a batch.

The host half (BatchPlan) decides with NumPy which rows need what. The device half, here, computes each group of rows in
the cheapest way:

    plain    greedy, logits unchanged             argmax in the dtype of the logits
    edited   any change but temperature           float32 copy, changed in place; then greedy or random
    random   temperature > 0                      the platform's `filtered_draw`, or filters (filters.py) and a draw

No row's result depends on another row. The host waits for the device only where steps are not planned ahead.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from mvllm.ops.argmax import argmax as reference_argmax
from mvllm.ops.draw import draw, draw_block
from mvllm.ops.logsumexp import logsumexp as reference_logsumexp
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.batch_plan import BatchPlan, DevicePenaltyKeys
from mvllm.sampling.batch_upload import BatchUpload, RowSelection
from mvllm.sampling.filters import filtered_weights, next_power_of_two
from mvllm.sampling.forced_tokens import NOT_FORCED
from mvllm.sampling.logprobs import LogSumExp, gather_logprobs
from mvllm.sampling.penalties import apply_penalties
from mvllm.sampling.sampler_output import GatheredLogprobs, SamplerOutput
from mvllm.sampling.sampling_state import LOGPROBS, SamplingState
from mvllm.sampling.token_history import TokenHistory
from mvllm.sampling.token_masks import TokenMasks, unpack_masks

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FilteredDraw = Callable[..., torch.Tensor]
"""The operation `filtered_draw`."""

_ELEMENTS_AT_ONCE = 1 << 18
"""Logits that are filtered at a time on the host: intermediate results stay in the caches and take little memory."""


class LogprobsStage(enum.Enum):
    """The logits that log-probabilities of sampled tokens are computed from; the values begin the names of modes."""

    RAW = "raw"  # the model's
    PRE_TEMPERATURE = "pre_temperature"  # after logits processors, masks, biases and penalties
    POST_TEMPERATURE = "post_temperature"  # divided by the temperature; greedy rows are not
    PROCESSED = "processed"  # as sampled from: filtered tokens have -inf


class Sampler:
    """Samples batches. Rows, parameters and tokens belong to the SamplingState and TokenHistory passed to `sample`.

    Args:
        staging: Buffers for uploads, where a step must not wait for the previous one.
        argmax: The operation of that name.
        filtered_draw: The operation of that name, if a provider has it.
        logsumexp: The operation of that name.
        logprobs_mode: What log-probabilities are computed from, see ModelConfig.
        static: Each shape costs a compilation. All rows then go through the same operations, whether they need them or
            not, so that there are few programs: see `warm_up_params`.

    Attributes:
        may_synchronize: The host may wait for the device to decide what to compute.
    """

    def __init__(
        self,
        staging: StagingBuffers | None = None,
        argmax: Argmax = reference_argmax,
        filtered_draw: FilteredDraw | None = None,
        logsumexp: LogSumExp = reference_logsumexp,
        *,
        logprobs_mode: str = "raw_logprobs",
        static: bool = False,
    ) -> None:
        stage, _, kind = logprobs_mode.rpartition("_")
        self._logprobs_stage, self._logprobs_are_logits = LogprobsStage(stage), kind == "logits"
        self._staging = staging
        self._argmax = argmax
        self._filtered_draw = filtered_draw
        self._logsumexp = logsumexp
        self._static = static
        self.may_synchronize = staging is None and not static  # with staging the previous step may still run

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        state: SamplingState,
        history: TokenHistory,
        mask: torch.Tensor | None = None,
        masks: TokenMasks | None = None,
        seq_lens: np.ndarray | None = None,
        only_tokens: bool = False,
    ) -> SamplerOutput:
        """Samples one token for each row of logits.

        Args:
            logits: [n, vocab], any floating dtype; not changed. With static shapes, rows after the n-th are padding.
            rows: int [n] on the host; the batch row of each row of logits.
            state: Sampling parameters of the batch rows.
            history: Tokens of the batch rows; read for penalties, bad words, `min_tokens` and random numbers. With
                `state.device_counts` the caller counts sampled tokens on the device.
            mask: bool [n, vocab] on the device; tokens that may be sampled. None allows all.
            masks: Likewise, on the host, for some of the rows.
            seq_lens: int [n] on the host; tokens before the sampled one, draft tokens included. None: all tokens that
                the row has. Logits processors and `mask` apply only to rows without draft tokens.
            only_tokens: Leave out log-probabilities.

        Returns:
            Tokens, and log-probabilities of the rows that asked for them. Rows without a usable logit (NaN, infinite,
            all masked) are in its `errors` and do not affect other rows.
        """
        flags = state.flags[rows]
        forced = _forced_tokens(rows, state, history, seq_lens) if state.thinking or state.forced else None
        if mask is None and masks is None and forced is None and not flags.any():
            max_logits, token_ids = self._argmax(logits)
            return SamplerOutput(token_ids, max_logits, num_rows=len(rows))
        if seq_lens is None:
            seq_lens = history.num_tokens[rows]
        num_rows = len(rows)
        if self._static:
            padding = (0, logits.shape[0] - num_rows)
            rows, seq_lens, flags = np.pad(rows, padding), np.pad(seq_lens, padding), np.pad(flags, padding)
            if forced is not None:
                forced = np.pad(forced, padding, constant_values=NOT_FORCED)
        make_plan = partial(
            BatchPlan,
            state=state,
            history=history,
            masks=masks,
            has_mask=mask is not None,
            vocab_size=logits.shape[1],
            device=logits.device,
            staging=self._staging,
            may_synchronize=self.may_synchronize,
            num_rows=num_rows if self._static else None,
        )
        with_logprobs = not only_tokens and bool((flags & LOGPROBS).any())
        stage = self._logprobs_stage if with_logprobs else LogprobsStage.RAW
        in_chunks = self.may_synchronize and self._filtered_draw is None
        size = max(1, _ELEMENTS_AT_ONCE // logits.shape[1]) if in_chunks else len(rows)
        if len(rows) <= size:
            plan = make_plan(rows, flags, seq_lens, forced=forced)
            token_ids, max_logits, final = self._choose_tokens(plan, logits, mask, stage)
            gathered = None if only_tokens else self._gather_logprobs(plan.logprobs, state, rows, final, token_ids)
            return SamplerOutput(token_ids, max_logits, gathered, plan.failures, num_rows)
        token_ids, max_logits, final, failures = self._choose_in_chunks(
            make_plan, size, logits, rows, flags, seq_lens, forced, mask, stage
        )
        gathered = None
        if with_logprobs:
            upload = BatchUpload(self._staging)
            selection = upload.select((flags & LOGPROBS).astype(bool))
            upload.send(logits.device)
            gathered = self._gather_logprobs(selection, state, rows, final, token_ids)
        return SamplerOutput(token_ids, max_logits, gathered, failures)

    def _choose_in_chunks(
        self,
        make_plan: Callable[..., BatchPlan],
        size: int,
        logits: torch.Tensor,
        rows: np.ndarray,
        flags: np.ndarray,
        seq_lens: np.ndarray,
        forced: np.ndarray | None,
        mask: torch.Tensor | None,
        stage: LogprobsStage,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[int, str]]:
        """What `_choose_tokens` returns for all rows, `size` rows at a time, and the failures."""
        chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        failures: dict[int, str] = {}
        for start in range(0, len(rows), size):
            chunk = slice(start, start + size)
            part = None if forced is None else forced[chunk]
            plan = make_plan(rows[chunk], flags[chunk], seq_lens[chunk], forced=part)
            chosen.append(self._choose_tokens(plan, logits[chunk], None if mask is None else mask[chunk], stage))
            failures |= {start + i: text for i, text in plan.failures.items()}
        token_ids, max_logits = (torch.cat([parts[i] for parts in chosen]) for i in (0, 1))
        final = logits if stage is LogprobsStage.RAW else torch.cat([parts[2] for parts in chosen])
        return token_ids, max_logits, final, failures

    def _choose_tokens(
        self, plan: BatchPlan, logits: torch.Tensor, mask: torch.Tensor | None, stage: LogprobsStage
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, int64 [n], the largest logit that each row could choose from, float32 [n], and `logits`.

        Args:
            stage: Return in place of `logits` those of this stage, float32 [n, vocab], unless it is RAW.
        """
        num_rows, plain, work = len(plan.rows), plan.plain, plan.work
        token_ids = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        max_logits = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
        if len(plain):
            values, ids = self._argmax(plain.gather(logits))  # one operation decides ties in all batches
            token_ids, max_logits = plain.scatter(token_ids, ids), plain.scatter(max_logits, values.float())
        if len(work):
            edited = _edited_logits(plan, logits, mask)
            ids, values = self._choose_work(plan, edited)
            token_ids, max_logits = work.scatter(token_ids, ids), work.scatter(max_logits, values)
            if stage is not LogprobsStage.RAW:
                final = logits.to(torch.float32, copy=True)
                logits = work.scatter(final, _logits_of_stage(plan, edited, stage))
        if plan.forced is not None:
            forced = plan.upload.get_ids(plan.forced)
            token_ids = torch.where(forced >= 0, forced, token_ids)
        return token_ids, max_logits, logits

    def _choose_work(self, plan: BatchPlan, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and largest logits of the work rows, from their edited logits."""
        if plan.random_inputs is None:
            values, ids = logits.max(dim=1)
            return ids, values
        max_logits = logits.amax(dim=1)
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if len(plan.greedy):
            token_ids = plan.greedy.scatter(token_ids, plan.greedy.gather(logits).argmax(dim=1))
        filters, coarse, fine = plan.random_inputs()
        random_logits, random_max = plan.random.gather(logits), plan.random.gather(max_logits)
        if self._filtered_draw is None:
            drawn = draw(filtered_weights(random_logits, random_max, filters), coarse, fine)
        else:
            settings = filters.inv_temperature, filters.min_p_gap, filters.top_k, filters.top_p
            block = draw_block(logits.shape[1])
            drawn = self._filtered_draw(random_logits, random_max, *settings, coarse, fine, block)
        return plan.random.scatter(token_ids, drawn), max_logits

    def _gather_logprobs(
        self,
        selection: RowSelection,
        state: SamplingState,
        rows: np.ndarray,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> GatheredLogprobs | None:
        """Log-probabilities of the sampled tokens, for the selected rows of the batch."""
        if not len(selection):
            return None
        num_logprobs = np.minimum(state.num_logprobs[rows[selection.indices]], logits.shape[1])
        most = int(num_logprobs.max())
        if self._static:
            most = min(int(next_power_of_two(most)), logits.shape[1]) if most else 0
        else:
            logits, token_ids = selection.gather(logits), selection.gather(token_ids)
        gathered = gather_logprobs(logits, token_ids, most, self._logsumexp, as_logits=self._logprobs_are_logits)
        return GatheredLogprobs(selection.indices, num_logprobs, gathered)


def _forced_tokens(
    rows: np.ndarray, state: SamplingState, history: TokenHistory, seq_lens: np.ndarray | None
) -> np.ndarray | None:
    """int [n]: tokens that rows get whatever their logits are, NOT_FORCED for the others; None without any."""
    lengths = history.num_tokens[rows] if seq_lens is None else seq_lens
    forced: np.ndarray | None = None
    if state.thinking:
        forced = state.thinking.forced_tokens(rows, lengths, history.token_ids, history.num_tokens)
    if state.forced:
        forced = state.forced.add_to(forced, rows, lengths)
    return forced


def _edited_logits(plan: BatchPlan, all_logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """float32 [w, vocab]: logits of the work rows, as changed before temperature and filters."""
    gathered = plan.work.gather(all_logits)
    edits, upload = plan.edits, plan.upload
    if edits is None:
        return gathered.float()
    logits = gathered.to(torch.float32, copy=gathered is all_logits)
    for index, selection in plan.processed:
        logits = _process(plan, index, selection, logits)
    if mask is not None:
        logits.masked_fill_(~plan.work.gather(mask), -torch.inf)
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
    return logits if plan.counted is None else _penalize_counted(plan, plan.counted, logits)


def _logits_of_stage(plan: BatchPlan, edited: torch.Tensor, stage: LogprobsStage) -> torch.Tensor:
    """float32 [w, vocab]: edited logits of the work rows; with temperature, and -inf for filtered tokens, if the stage
    is behind these.
    """
    if plan.random_inputs is None or stage is LogprobsStage.PRE_TEMPERATURE:
        return edited
    filters, _, _ = plan.random_inputs()
    logits = plan.random.gather(edited)
    scaled = logits * filters.inv_temperature.unsqueeze(1)
    if filters.any and stage is LogprobsStage.PROCESSED:
        scaled.masked_fill_(filtered_weights(logits, logits.amax(dim=1), filters) == 0, -torch.inf)
    return plan.random.scatter(edited.clone(), scaled)


def _penalize_counted(plan: BatchPlan, keys: DevicePenaltyKeys, logits: torch.Tensor) -> torch.Tensor:
    """Applies penalties with the token counts that are on the device."""
    get, get_ids, counts = plan.upload.get, plan.upload.get_ids, plan.state.device_counts
    assert counts is not None
    new_rows = get_ids(keys.new_rows)
    if new_rows.numel():
        counts.write_rows(new_rows, get_ids(keys.new_ids), get_ids(keys.new_entries))
    penalized = keys.penalized.gather(logits)
    if penalized is logits and plan.static:
        penalized = logits.clone()  # `scatter` chooses between the two
    settings = get(keys.repetition), get(keys.frequency), get(keys.presence)
    counts.apply(penalized, get_ids(keys.rows), *settings)
    return keys.penalized.scatter(logits, penalized)


def _process(plan: BatchPlan, index: int, selection: RowSelection, logits: torch.Tensor) -> torch.Tensor:
    """Applies one logits processor to its rows."""
    processors, in_batch = plan.state.processors, plan.work.indices[selection.indices]
    assert processors is not None
    changed, failures = processors.apply(index, selection.gather(logits), plan.rows[in_batch].tolist())
    plan.failures |= {int(in_batch[i]): text for i, text in failures.items()}
    return selection.scatter(logits, changed)
