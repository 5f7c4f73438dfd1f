"""Speculative decoding with a draft model: a smaller model generates draft tokens, which the served model verifies.

Its attention layers share the KV cache and the block tables of the served model, so that prefix sharing and preemption
need nothing of their own. For each step of the served model it computes the same tokens; then, for rows that have
sampled, it computes that token and its own draft tokens one by one:

    model    a b c d   e . .           step over the known token e and the drafts f g: f is accepted, then x is sampled
    draft    a b c d   e f g                            passes over e, f (generated them) ...
             a b c d   e f x y                          ... next over x, giving y, over y, giving z: the new drafts

Keys and values of rejected draft tokens are overwritten. It samples with the parameters and random numbers of the
served model, so that draft tokens are accepted where the two distributions are nearly equal, also with temperature.
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
    """Proposes the tokens of a draft model.

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
        """See Proposer."""
        self._num_computed[rows] = self._rows.num_computed[rows]

    def propose(self, rows: np.ndarray, others: np.ndarray) -> list[list[int]]:
        """See Proposer."""
        history = self._rows.history
        drafts: list[list[int]] = [[] for _ in rows]
        lengths = history.num_tokens[rows]
        room = np.minimum(self._rows.num_blocks[rows] * self._block_size, self._max_len) - lengths
        # All rows catch up: other requests may share the blocks of a row, and its next step must not be larger.
        self._catch_up(np.concatenate((others, rows[room < 0])))
        # Keys and values of rejected draft tokens do not count.
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
        """Computes these rows up to what the served model has computed."""
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
