"""Proposers of draft tokens for speculative decoding: the interface, n-gram lookup, and their construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mvllm.sampling.sampler import Sampler
from mvllm.sampling.token_history import TokenHistory
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.model_forward import ModelForward
from mvllm.worker.spec_decode.draft_model import DraftModelProposer
from mvllm.worker.step_inputs import StepInputBuilder, StepInputs


class Proposer(Protocol):
    """Proposes draft tokens. Their quality changes the speed of generation, never the tokens."""

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """Requests were added to rows, with their cached prefixes."""

    def propose(self, rows: np.ndarray, others: np.ndarray, step: StepInputs) -> list[list[int]]:
        """Proposes draft tokens after a step, for rows that have sampled in it.

        Every row of the step is in `rows` or in `others`.

        Args:
            rows: int64 [n]: distinct.
            others: int64 [m]: rows without draft tokens, because their prompts are not complete, because each of their
                tokens must be known before the next one is sampled, or because they compute tokens again.
            step: The inputs of the step.

        Returns:
            For each of `rows` at most `num_speculative_tokens` tokens, or none.
        """


class NgramProposer:
    """Finds the last tokens of a sequence earlier in it, and proposes the tokens that followed there.

        a b c d e . . . . b c       the last 2 tokens also occur before d e
                            d e     the draft tokens

    The longest match counts, and among equally long ones the latest. It needs no weights, and pays off where text is
    copied: quotations, edited code, lists.

    Args:
        history: The rows' tokens.
        num_tokens: Most draft tokens of a request.
        shortest: Shortest match.
        longest: Longest match that is looked for.
    """

    def __init__(self, history: TokenHistory, *, num_tokens: int, shortest: int, longest: int) -> None:
        self._history = history
        self._num_tokens = num_tokens
        self._shortest = shortest
        self._longest = longest

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """Does nothing."""

    def propose(self, rows: np.ndarray, others: np.ndarray, step: StepInputs) -> list[list[int]]:
        """See Proposer."""
        history = self._history
        return [self._tokens_after_match(history.token_ids[row, : history.num_tokens[row]]) for row in rows.tolist()]

    def _tokens_after_match(self, tokens: np.ndarray) -> list[int]:
        """The tokens that followed the longest match."""
        found = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1 if len(found) else 0
        for back in range(1, min(self._longest, len(tokens))):
            longer = found[found >= back]
            longer = longer[tokens[longer - back] == tokens[-1 - back]]
            if not len(longer):
                break
            found, length = longer, back + 1
        if length < self._shortest:
            return []
        begin = int(found[-1]) + 1
        known = tokens[begin : begin + self._num_tokens].tolist()
        # A match near the end is shorter than the draft: it is repeated.
        return [known[i % len(known)] for i in range(self._num_tokens)]


def make_proposer(
    forward: ModelForward, rows: InputBatch, make_sampler: Callable[[], Sampler], block_size: int
) -> Proposer | None:
    """The proposer of the engine's speculative config; None without one, and on pipeline stages but the last.

    Args:
        forward: The forward pass of the served model. The draft model is compiled as that one is.
        rows: The worker's rows.
        make_sampler: Makes the sampler of a draft model.
        block_size: Tokens per KV block.
    """
    config, draft = forward.config.speculative, forward.loader.draft
    if config is None or not forward.pipeline.is_last:
        return None
    if draft is None:
        return NgramProposer(
            rows.history,
            num_tokens=config.num_speculative_tokens,
            shortest=config.prompt_lookup_min,
            longest=config.prompt_lookup_max,
        )
    scheduler, draft_forward = forward.config.scheduler, draft.forward(forward.layers)
    forward.compile(draft_forward)
    inputs = StepInputBuilder(
        rows,
        block_size=block_size,
        max_tokens=scheduler.max_num_batched_tokens + scheduler.max_num_seqs,
        max_rows=scheduler.max_num_seqs,
        runtime=forward.runtime,
        shapes=forward.shapes(),
        with_prompt_lens=draft.model.uses_prompt_lens,
        with_states=bool(draft.model.state_layers()),
        is_causal=True,  # it sees placeholders instead of images, and its limit of tokens may be inside of one
    )
    return DraftModelProposer(
        draft,
        draft_forward,
        forward.config.model,
        rows=rows,
        block_size=block_size,
        inputs=inputs,
        sampler=make_sampler(),
        num_tokens=config.num_speculative_tokens,
        first_state_slot=forward.layers.states.num_slots if draft.model.state_layers() else None,
    )
