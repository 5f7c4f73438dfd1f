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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.config.model import ModelConfig
from mvllm.layers.context import ForwardStep
from mvllm.platform.attention import AttentionMetadata
from mvllm.sampling.sampler import Sampler
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.kv_cache_layers import AttentionGroups
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


class DraftModel:
    """A draft model on its own.

    Args:
        config: Its config.
        model: With its weights.

    Attributes:
        layers: Those that need a KV cache.
    """

    def __init__(self, config: ModelConfig, model: CausalLM) -> None:
        self.config = config
        self.model = model
        self.layers = model.attention_layers()

    def run(self, inputs: StepInputs, plans: AttentionGroups) -> None:
        """Runs a step as large as any, for what it takes. `plans` are those of its layers."""
        metadata = {key: backend.build_metadata(inputs.layouts[group]) for key, (backend, group) in plans.items()}
        step = ForwardStep(metadata, inputs.prompt_lens)
        self.model(inputs.token_ids, inputs.positions.clamp(max=self.config.max_model_len - 1), step, None)


class DraftModelProposer:
    """Guesses with a model; see Proposer.

    Args:
        draft: The draft model.
        target: The config of the model whose tokens are guessed.
        rows: The worker's rows.
        block_size: Tokens per KV block.
        inputs: Builds its inputs.
        plans: Of the draft's layers.
        sampler: Chooses its tokens.
        num_tokens: Tokens of a guess.
        compile: Makes its forward pass faster, where the platform can.
    """

    def __init__(
        self,
        draft: DraftModel,
        target: ModelConfig,
        *,
        rows: InputBatch,
        block_size: int,
        inputs: StepInputBuilder,
        plans: AttentionGroups,
        sampler: Sampler,
        num_tokens: int,
        compile: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
    ) -> None:
        self._model = draft.model
        self._draft_vocab_size = draft.config.vocab_size
        self._max_len = min(draft.config.max_model_len, target.max_model_len)
        self._vocab_size = target.vocab_size
        self._rows = rows
        self._block_size = block_size
        self._inputs = inputs
        self._attention_groups = plans
        self._sampler = sampler
        self._num_tokens = num_tokens
        self._run_model = compile(self._call_model)
        self._num_computed = np.zeros(rows.max_rows, dtype=np.int32)
        """int32 [max_rows]: leading tokens whose keys and values this model has, of those that are known."""

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
            chosen, ends = rows[at], lengths[at] + i
            logits = self._compute(chosen, ends, np.arange(len(at)))
            self._num_computed[chosen] = ends
            sampled = self._sampler.sample(
                logits, chosen, self._rows.sampling, history, ends=ends, only_tokens=True
            ).tolist()
            for place, row, token in zip(at.tolist(), chosen.tolist(), sampled, strict=True):
                drafts[place].append(token)
                history.set_draft_tokens(row, drafts[place])
        return drafts

    def _catch_up(self, rows: np.ndarray) -> None:
        """Computes what the model has computed."""
        ends = np.minimum(self._rows.num_computed[rows], self._max_len)
        behind = ends > self._num_computed[rows]
        if behind.any():
            self._compute(rows[behind], ends[behind], np.empty(0, dtype=np.int64))
            self._num_computed[rows[behind]] = ends[behind]

    def _compute(self, rows: np.ndarray, ends: np.ndarray, sampling: np.ndarray) -> torch.Tensor:
        """Computes rows up to `ends`; logits behind the last token of those `sampling`, [S, vocab]."""
        first = self._num_computed[rows]
        inputs = self._inputs.build_rows(rows, first, ends - first, sampling)
        hidden = self._forward(inputs)
        self._inputs.staging.end_step()
        if not len(sampling):
            return hidden
        logits = self._model.compute_logits(hidden.index_select(0, inputs.logits_indices))[: len(sampling)]
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids = inputs.token_ids
        if self._draft_vocab_size < self._vocab_size:  # what it cannot know, it takes for anything
            token_ids = token_ids.clamp(max=self._draft_vocab_size - 1)
        plans = [backend.build_metadata(inputs.layouts[group]) for backend, group in self._attention_groups.values()]
        return self._run_model(token_ids, inputs.positions, inputs.prompt_lens, *plans)

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        *plans: AttentionMetadata,
    ) -> torch.Tensor:
        step = ForwardStep(dict(zip(self._attention_groups, plans, strict=True)), prompt_lens)
        hidden: torch.Tensor = self._model(token_ids, positions, step, None)
        return hidden
