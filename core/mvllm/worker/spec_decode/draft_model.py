"""A smaller model that guesses tokens, one by one, for the model to check all at once.

It has layers of its own in the same KV cache: block tables and slots are those of the model, so that sharing, prefix
hits and preemption are the scheduler's affair for both. For each step of the model it computes the same tokens first;
then, for the rows that have got a token, that token and its own guesses:

    model    a b c d   e . .           step over the known token e and the guesses f g: f was right, then comes x
    draft    a b c d   e f g                            passes over e, f (made them) ...
             a b c d   e f x y                          ... next over x, giving y, over y, giving z: the new guesses

What it computed for guesses that were wrong is written over. It samples as the model does, with the same settings and
the same random numbers, so that it guesses right where the two distributions are nearly the same, also when tokens are
drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.config.model import ModelConfig
from mvllm.sampling.sampler import Sampler
from mvllm.worker.decoder_forward import DecoderForward
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.step_inputs import StepInputBuilder

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


@dataclass(frozen=True)
class DraftModel:
    """A draft model.

    Attributes:
        config: Its config.
        model: The model, with its weights.
    """

    config: ModelConfig
    model: CausalLM

    def forward(self, layers: KVCacheLayers) -> DecoderForward:
        """Its forward pass.

        Args:
            layers: The attention layers of the rank, those of this model included.
        """
        return DecoderForward(self.model, layers.attention_groups_of(self.model.attention_layers()))


class DraftModelProposer:
    """Guesses with a model; see Proposer.

    Args:
        draft: The draft model.
        forward: Its forward pass, compiled if it is to be.
        target: The config of the served model.
        rows: The worker's rows.
        block_size: Tokens per KV block.
        inputs: Builds its inputs.
        sampler: Samples its tokens.
        num_tokens: Draft tokens of a request in one step.
    """

    def __init__(
        self,
        draft: DraftModel,
        forward: DecoderForward,
        target: ModelConfig,
        *,
        rows: InputBatch,
        block_size: int,
        inputs: StepInputBuilder,
        sampler: Sampler,
        num_tokens: int,
    ) -> None:
        self._forward = forward
        self._draft_vocab_size = draft.config.vocab_size
        self._max_len = min(draft.config.max_model_len, target.max_model_len)
        self._vocab_size = target.vocab_size
        self._rows = rows
        self._block_size = block_size
        self._inputs = inputs
        self._sampler = sampler
        self._num_tokens = num_tokens
        self._num_computed = np.zeros(rows.max_rows, dtype=np.int32)
        """int32 [max_rows]: leading known tokens of each row whose keys and values this model has computed."""

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """As in Proposer."""
        self._num_computed[rows] = self._rows.num_computed[rows]

    def propose(self, rows: np.ndarray, others: np.ndarray) -> list[list[int]]:
        """As in Proposer."""
        history = self._rows.history
        drafts: list[list[int]] = [[] for _ in rows]
        lengths = history.num_tokens[rows]
        room = np.minimum(self._rows.num_blocks[rows] * self._block_size, self._max_len) - lengths
        # Nobody stays behind: what a row has computed may be found by others, and the next step is as large again.
        self._catch_up(np.concatenate((others, rows[room < 0])))
        # What was computed for guesses that were wrong does not count.
        self._num_computed[rows] = np.minimum(self._num_computed[rows], self._rows.num_computed[rows])
        for i in range(self._num_tokens):
            at = np.flatnonzero(room >= i)
            if not len(at):
                break
            chosen, seq_lens = rows[at], lengths[at] + i
            logits = self._compute(chosen, seq_lens, np.arange(len(at)))
            self._num_computed[chosen] = seq_lens
            sampled = self._sampler.sample(
                logits, chosen, self._rows.sampling, history, seq_lens=seq_lens, only_tokens=True
            ).tolist()
            for place, row, token in zip(at.tolist(), chosen.tolist(), sampled, strict=True):
                drafts[place].append(token)
                history.set_draft_tokens(row, drafts[place])
        return drafts

    def _catch_up(self, rows: np.ndarray) -> None:
        """Computes what the model has computed."""
        seq_lens = np.minimum(self._rows.num_computed[rows], self._max_len)
        behind = seq_lens > self._num_computed[rows]
        if behind.any():
            self._compute(rows[behind], seq_lens[behind], np.empty(0, dtype=np.int64))
            self._num_computed[rows[behind]] = seq_lens[behind]

    def _compute(self, rows: np.ndarray, seq_lens: np.ndarray, sampling_positions: np.ndarray) -> torch.Tensor:
        """Computes rows up to `seq_lens`; returns the logits of those at `sampling_positions`, [S, vocab]."""
        first = self._num_computed[rows]
        inputs = self._inputs.build_rows(rows, first, seq_lens - first, sampling_positions)
        if self._draft_vocab_size < self._vocab_size:  # a token unknown to the draft model is replaced by its last one
            inputs.token_ids = inputs.token_ids.clamp(max=self._draft_vocab_size - 1)
        hidden = self._forward.run(inputs)
        self._inputs.staging.end_step()
        if not len(sampling_positions):
            return hidden
        logits = self._forward.model.compute_logits(hidden.index_select(0, inputs.logits_indices))
        logits = logits[: len(sampling_positions)]
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]
