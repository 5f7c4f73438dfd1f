"""Drafts of a draft head (`mvllm.models.draft_head`), which reads the hidden states of each step.

    step              positions 4 5 6, of which 5 and 6 were draft tokens; 5 was accepted, then token 7' was sampled
    head, first pass  positions 4 5 with the tokens behind them and the step's hidden states  ──> first draft token
    further passes    position 6 with the token before and the hidden state of the pass before ──> second, ...

The first pass goes over every token of the step whose next token is known, so the head's keys and values are complete
wherever those of the served model are: prefix hits, host blocks and preemption need nothing of their own. Where a block
is found in the cache, the last position of the head in it may have been computed with the next token of another
request; that changes the quality of drafts, not the tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.errors import ConfigError
from mvllm.models.draft_head import DraftHead
from mvllm.worker.spec_decode.proposer import DraftStep, Proposer, ProposerContext
from mvllm.worker.step_inputs import StepInputs, ragged_ranges


class HeadProposer(Proposer):
    """Proposes the tokens of a draft head, one after the other."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        head = context.own_draft.model
        if not isinstance(head, DraftHead):
            raise ConfigError(f"{type(head).__name__} is no draft head, so {context.settings.method!r} cannot use it.")
        self._head = head
        self._forward = context.make_forward()
        self._inputs = context.make_inputs(token_offset=1)
        self._sampler = context.make_sampler()
        self._rows = context.rows
        self._block_size = context.block_size
        self._max_len = min(context.own_draft.config.max_model_len, context.config.model.max_model_len)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """See Proposer."""
        history = self._rows.history
        drafts: list[list[int]] = [[] for _ in step.rows]
        hidden, logits, at = self._first_pass(step)
        lengths = history.num_tokens[step.rows]
        # The last draft token needs no slot, but a place behind the longest sequence at most.
        room = np.minimum(self._rows.num_blocks[step.rows] * self._block_size + 1, self._max_len) - lengths
        for i in range(step.num_tokens):
            if i:
                going_on = room[at] >= i
                at, hidden = at[going_on], hidden[torch.from_numpy(going_on.nonzero()[0]).to(hidden.device)]
                if not len(at):
                    break
                hidden, logits = self._next_pass(step.rows[at], lengths[at] + i - 2, hidden)
            sampled = self._sampler.sample(
                logits, step.rows[at], self._rows.sampling, history, seq_lens=lengths[at] + i, only_tokens=True
            ).tolist()
            for place, token in zip(at.tolist(), sampled, strict=True):
                drafts[place].append(token)
                history.set_draft_tokens(int(step.rows[place]), drafts[place])
        return drafts

    def _first_pass(self, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Computes the positions of a step whose next token is known.

        Returns:
            The head's result and its logits at the last position of each row that gets draft tokens, and the places of
            these rows in `step.rows`.
        """
        inputs = step.inputs
        every, first = inputs.rows, inputs.first_positions
        counts = np.minimum(inputs.num_scheduled, self._rows.history.num_tokens[every] - 1 - first)
        counts = np.minimum(counts, self._max_len - first)
        computes = counts > 0
        starts = (inputs.num_scheduled.cumsum() - inputs.num_scheduled)[computes]
        rows, first, counts = every[computes], first[computes], counts[computes]
        if not len(rows):
            nothing = step.hidden[:0]
            return nothing, nothing, np.empty(0, dtype=np.int64)
        index = ragged_ranges(starts, counts)
        states = self._head.combine(*_select(index, step))
        drafting = step.rows.tolist() if step.num_tokens else []
        place_of = {row: place for place, row in enumerate(drafting)}
        sampling = [position for position, row in enumerate(rows.tolist()) if row in place_of]
        at = np.array([place_of[int(rows[position])] for position in sampling], dtype=np.int64)
        built = self._inputs.build_rows(rows, first, counts, np.array(sampling, dtype=np.int64))
        return (*self._run(built, states), at)

    def _next_pass(
        self, rows: np.ndarray, positions: np.ndarray, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one position of each row, whose next token is the last draft token.

        Returns:
            The head's result, and its logits.
        """
        ones = np.ones(len(rows), dtype=np.int32)
        return self._run(self._inputs.build_rows(rows, positions.astype(np.int32), ones, np.arange(len(rows))), hidden)

    def _run(self, inputs: StepInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the head; returns its result at the sampling positions, and the logits there."""
        missing = len(inputs.token_ids) - len(states)
        if missing:
            states = torch.cat((states, states.new_zeros(missing, states.shape[1])))
        hidden = self._forward.run(inputs, states)
        self._inputs.staging.end_step()
        if not len(inputs.sampling_positions):
            return hidden[:0], hidden[:0]
        hidden = hidden.index_select(0, inputs.logits_indices)[: len(inputs.sampling_positions)]
        return hidden, self._head.full_logits(self._head.compute_logits(hidden))


def _select(index: np.ndarray, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of a step's states, in the order of `index`, int [n]."""
    if len(index) == len(step.hidden) and int(index[-1]) == len(index) - 1:
        return step.hidden, step.layer_states
    chosen = torch.from_numpy(index).to(step.hidden.device)
    layers = None if step.layer_states is None else step.layer_states.index_select(0, chosen)
    return step.hidden.index_select(0, chosen), layers
