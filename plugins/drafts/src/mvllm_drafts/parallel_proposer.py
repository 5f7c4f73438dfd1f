"""Parallel drafts: all draft tokens of a step come from one pass of the head (P-EAGLE, arXiv 2602.01469).

    known tokens  t0 .. t9          position    7    8    9    10   11
    k = 4                           token       t8   t9   mask mask mask     the token behind each position
                                    state       h7   h8   m    m    m        m is learned
                                    predicts         d1   d2   d3   d4

Positions behind the last known token are computed again when their tokens are known, before anything reads their keys
and values.
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.extension_api import ConfigError
from mvllm.extension_api.draft_heads import DraftStep, Proposer, ProposerContext, ragged_ranges
from mvllm_drafts.eagle import Eagle3Head


class ParallelProposer(Proposer):
    """Proposes the tokens of a head with a mask state."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        head = context.own_draft.model
        if not isinstance(head, Eagle3Head) or head.layout.mask_token_id is None:
            raise ConfigError(f"{type(head).__name__} has no mask token, so it drafts one token after the other.")
        self._head, self._mask_token_id = head, head.layout.mask_token_id
        self._mask: torch.Tensor | None = None
        self._forward = context.make_forward()
        self._inputs = context.make_inputs(token_offset=1, max_draft_tokens=context.settings.num_speculative_tokens - 1)
        self._sampler = context.make_sampler()
        self._max_len = min(context.own_draft.config.max_model_len, context.config.model.max_model_len)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """See Proposer."""
        rows, first = step.inputs.rows, step.inputs.first_positions
        known = self._known(step)
        ends = first + known
        samples = np.isin(rows, step.rows) & (known > 0) & (ends + 1 == self._lengths(rows)) & (step.num_tokens > 0)
        room = np.minimum(self.context.rows.num_blocks[rows] * self.context.block_size, self._max_len) - ends
        masked = np.where(samples, np.clip(room, 0, max(step.num_tokens - 1, 0)), 0)
        for row, count in zip(rows[samples].tolist(), masked[samples].tolist(), strict=True):
            self.context.rows.history.set_draft_tokens(row, [self._mask_token_id] * count)
        computes = known > 0
        if not computes.any():
            return [[] for _ in step.rows]
        states = self._states(step, known, masked)
        sampling = samples[computes].nonzero()[0]
        rows, first, counts = rows[computes], first[computes], (known + masked)[computes].astype(np.int32)
        found = self._run(rows, first, counts, sampling, masked[samples].astype(np.int32), states)
        return [found.get(row, []) for row in step.rows.tolist()]

    def _lengths(self, rows: np.ndarray) -> np.ndarray:
        return self.context.rows.history.num_tokens[rows]

    def _known(self, step: DraftStep) -> np.ndarray:
        """Positions of each row in a step whose next token is known."""
        inputs = step.inputs
        counts = np.minimum(inputs.num_scheduled, self._lengths(inputs.rows) - 1 - inputs.first_positions)
        return np.maximum(np.minimum(counts, self._max_len - inputs.first_positions), 0)

    def _states(self, step: DraftStep, known: np.ndarray, masked: np.ndarray) -> torch.Tensor:
        """What the head reads: the states of known positions, and behind them the mask state."""
        if self._mask is None:
            self._mask = self._head.mask_state()
        device, scheduled = step.hidden.device, step.inputs.num_scheduled
        source = torch.from_numpy(ragged_ranges(scheduled.cumsum() - scheduled, known)).to(device)
        layers = None if step.layer_states is None else step.layer_states.index_select(0, source)
        states = self._head.combine(step.hidden.index_select(0, source), layers)
        if not masked.any():
            return states
        counts = known + masked
        places = torch.from_numpy(ragged_ranges(counts.cumsum() - counts, known)).to(device)
        return self._mask.repeat(int(counts.sum()), 1).index_copy_(0, places, states)

    def _run(
        self,
        rows: np.ndarray,
        first: np.ndarray,
        counts: np.ndarray,
        sampling: np.ndarray,
        masked: np.ndarray,
        states: torch.Tensor,
    ) -> dict[int, list[int]]:
        """Runs the head over `counts` positions of each row.

        Args:
            sampling: Positions among `rows` of those that get draft tokens.
            masked: Masked positions of each of these.

        Returns:
            The draft tokens of these rows.
        """
        built = self._inputs.build_rows(rows, first, counts, sampling, masked if len(sampling) else None)
        missing = len(built.token_ids) - len(states)
        if missing:
            states = torch.cat((states, states.new_zeros(missing, states.shape[1])))
        hidden = self._forward.run(built, states)
        self._inputs.staging.end_step()
        if not len(sampling):
            return {}
        drafting, num_drafts = rows[sampling], masked + 1
        hidden = hidden.index_select(0, built.logits_indices)[: int(num_drafts.sum())]
        sampled = self._sampler.sample(
            self._head.full_logits(self._head.compute_logits(hidden)),
            drafting.repeat(num_drafts),
            self.context.rows.sampling,
            self.context.rows.history,
            seq_lens=ragged_ranges(self._lengths(drafting), num_drafts),
            only_tokens=True,
        )
        tokens, ends = sampled.tolist(), num_drafts.cumsum().tolist()
        starts = [0, *ends[:-1]]
        return {row: tokens[a:b] for row, a, b in zip(drafting.tolist(), starts, ends, strict=True)}
