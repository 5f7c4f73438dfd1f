"""Speculative decoding with a draft model: a smaller model generates draft tokens, which the served model verifies.

Its attention layers share the KV cache and the block tables of the served model, so that prefix sharing and preemption
need nothing of their own. For each step of the served model it computes the same tokens; then, for rows that have
sampled, it computes that token and its own draft tokens one by one:

    model    a b c d   e . .           step over the known token e and the drafts f g: f is accepted, then x is sampled
    draft    a b c d   e f g                            passes over e, f (generated them) ...
             a b c d   e f x y                          ... next over x, giving y, over y, giving z: the new drafts

Keys and values of rejected draft tokens are overwritten.

If the draft model or the served model has layers with a sequence state, both have the same state slots. A draft model
with states goes through each step of the served model up to the last accepted draft token, and leaves its state in the
slot that the served model has for that token. So every slot that is read later holds the states of both after the same
tokens, whether it is a row's slot or a snapshot. New draft tokens are computed in slots that only the draft model has
(StateLayers):

    step     served model reads 4, writes 4, and 7 and 5 behind draft tokens    the first of these is accepted:
             draft model reads 4, writes 7
    drafts   reads 7, writes its slot of the row; then reads and writes that slot

It samples with the parameters and random numbers of the
served model, so that draft tokens are accepted where the two distributions are nearly equal, also with temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.worker.spec_decode.proposer import DraftStep, Proposer, ProposerContext
from mvllm.worker.step_inputs import StepInputs


class DraftModelProposer(Proposer):
    """Proposes the tokens of a draft model."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        draft, target, rows = context.own_draft, context.config.model, context.rows
        self._forward = context.make_forward()
        self._logits_model = draft.logits_model
        self._draft_vocab_size = draft.config.vocab_size
        self._max_len = min(draft.config.max_model_len, target.max_model_len)
        self._vocab_size = target.vocab_size
        self._rows = rows
        self._block_size = context.block_size
        self._inputs = context.make_inputs()
        self._sampler = context.make_sampler()
        self._num_computed = rows.num_computed.copy()  # of rows that run already: the caches are kept
        """int32 [max_rows]: leading known tokens of each row that this model has computed."""
        self._own_slots: np.ndarray | None = None
        """int32 [max_rows]: the state slot of each row that only this model has."""
        if (first := context.first_state_slot) is not None:
            self._own_slots = np.arange(first, first + rows.max_rows, dtype=np.int32)
        self._slots = np.zeros(rows.max_rows, dtype=np.int32)
        """int32 [max_rows]: the slot with the state of each row after its last step."""

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """See Proposer."""
        self._num_computed[rows] = self._rows.num_computed[rows]

    def propose(self, step: DraftStep) -> list[list[int]]:
        """See Proposer."""
        rows, others, history = step.rows, step.others, self._rows.history
        drafts: list[list[int]] = [[] for _ in rows]
        lengths = history.num_tokens[rows]
        room = np.minimum(self._rows.num_blocks[rows] * self._block_size, self._max_len) - lengths
        if self._own_slots is None:
            every = np.concatenate((rows, others))
            # Keys and values of rejected draft tokens do not count.
            self._num_computed[every] = np.minimum(self._num_computed[every], history.num_tokens[every] - 1)
            # All rows catch up: other requests may share the blocks of a row, and its next step must not be larger.
            self._catch_up(np.concatenate((others, rows[room < 0])) if step.num_tokens else every)
        else:
            self._follow(step.inputs)
        for i in range(step.num_tokens):
            at = np.flatnonzero(room >= i)
            if not len(at):
                break
            chosen, seq_lens = rows[at], lengths[at] + i
            slots = None
            if self._own_slots is not None:
                own = self._own_slots[chosen]
                slots = np.stack((own if i else self._slots[chosen], own))
            logits = self._compute(chosen, seq_lens, np.arange(len(at)), slots)
            self._num_computed[chosen] = seq_lens
            sampled = self._sampler.sample(
                logits, chosen, self._rows.sampling, history, seq_lens=seq_lens, only_tokens=True
            ).tolist()
            for place, row, token in zip(at.tolist(), chosen.tolist(), sampled, strict=True):
                drafts[place].append(token)
                history.set_draft_tokens(row, drafts[place])
        return drafts

    def _catch_up(self, rows: np.ndarray) -> None:
        """Computes these rows up to what the served model has computed."""
        seq_lens = np.minimum(self._rows.num_computed[rows], self._max_len)
        behind = seq_lens > self._num_computed[rows]
        if behind.any():
            self._compute(rows[behind], seq_lens[behind], np.empty(0, dtype=np.int64))
            self._num_computed[rows[behind]] = seq_lens[behind]

    def _follow(self, step: StepInputs) -> None:
        """Computes the tokens of a step up to the last accepted draft token, with its state slots."""
        assert step.state_layout is not None
        rows, first, computed = step.rows, step.first_positions, self._rows.num_computed[step.rows]
        slots = np.stack((step.state_layout.read_slots[: len(rows)], step.state_layout.write_slots[: len(rows)]))
        if (drafts := step.draft_slots) is not None:
            accepted = computed - (first + step.num_scheduled - drafts.counts)
            slots[1] = drafts.slots[np.arange(len(rows)), accepted]
        seq_lens = np.minimum(computed, self._max_len)
        self._num_computed[rows] = first
        fits = seq_lens > first
        if fits.any():
            self._compute(rows[fits], seq_lens[fits], np.empty(0, dtype=np.int64), slots[:, fits])
        self._num_computed[rows], self._slots[rows] = computed, slots[1]

    def _compute(
        self,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        sampling_positions: np.ndarray,
        state_slots: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Computes rows up to `seq_lens`; returns the logits of those at `sampling_positions`, [S, vocab].

        `state_slots` are as in StepInputBuilder.build_rows.
        """
        first = self._num_computed[rows]
        inputs = self._inputs.build_rows(rows, first, seq_lens - first, sampling_positions, None, state_slots)
        if self._draft_vocab_size < self._vocab_size:  # a token unknown to the draft model is replaced by its last one
            inputs.token_ids = inputs.token_ids.clamp(max=self._draft_vocab_size - 1)
        hidden = self._forward.run(inputs)
        self._inputs.staging.end_step()
        if not len(sampling_positions):
            return hidden
        logits = self._logits_model.compute_logits(hidden.index_select(0, inputs.logits_indices))
        logits = logits[: len(sampling_positions)]
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]
