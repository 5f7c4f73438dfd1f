"""Suffix decoding: what followed the last tokens earlier in the request, or in recent outputs of other requests.

Source: SuffixDecoding, arXiv 2411.04975. Frequencies choose the draft tokens, and a longer match allows a longer draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from mvllm.extension_api.draft_heads import DraftStep, Proposer, ProposerContext
from mvllm_drafts.suffix_index import SEPARATOR, DraftLimits, SuffixIndex

MAX_TOKENS_OF_A_REQUEST = 1 << 17
"""Only so many of the last tokens of one request are indexed."""


class RecentOutputs:
    """The outputs of the last requests.

    Args:
        max_requests: Most requests; 0 keeps none.
        max_tokens: Most tokens of all.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._starts: deque[int] = deque()
        self._max_requests = max_requests
        self.index = SuffixIndex(max_tokens)

    def add(self, token_ids: np.ndarray) -> None:
        """Adds an output, int [n]; drops the oldest."""
        if not len(token_ids) or not self._max_requests:
            return
        before = self.index.num_tokens
        self.index.extend(np.append(token_ids, SEPARATOR))
        if self.index.num_tokens < before:  # it has begun again
            self._starts.clear()
            before = 0
        self._starts.append(before)
        if len(self._starts) > self._max_requests:
            self._starts.popleft()
            self.index.drop_before(self._starts[0])


class SuffixProposer(Proposer):
    """Proposes what followed the longest match, see SuffixIndex. No weights, no device."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        options = context.settings.options
        self._options = options
        self._depth: int = options["max_tree_depth"]
        self.outputs = RecentOutputs(options["max_cached_requests"], options["max_cached_tokens"])
        self._capacity = min(context.config.model.max_model_len + 1, MAX_TOKENS_OF_A_REQUEST)
        self._indexes: dict[int, SuffixIndex] = {}  # by row
        self._seen: dict[int, int] = {}  # by row: tokens of the history that are in its index
        self._first_outputs: dict[int, int] = {}  # by row: the first output token that `outputs` does not have

    def on_requests_added(self, rows: Sequence[int]) -> None:
        """See Proposer. The output of a preempted request up to now is known already."""
        for row in rows:
            self._indexes.pop(row, None)
            self._first_outputs[row] = int(self.context.rows.history.num_tokens[row])

    def on_requests_removed(self, rows: Sequence[int]) -> None:
        """See Proposer. Keeps their outputs."""
        history = self.context.rows.history
        for row in rows:
            self._indexes.pop(row, None)
            first = self._first_outputs.pop(row, None)
            if first is None:
                continue
            output = history.token_ids[row, first : history.num_tokens[row]]
            self.outputs.add(output[output >= 0])

    def propose(self, step: DraftStep) -> list[list[int]]:
        """See Proposer."""
        if not step.num_tokens:
            return [[] for _ in step.rows]
        options = self._options
        limits = DraftLimits(step.num_tokens, self._depth, options["max_spec_factor"], options["min_token_prob"])
        return [self._propose(row, limits) for row in step.rows.tolist()]

    def _propose(self, row: int, limits: DraftLimits) -> list[int]:
        """The draft tokens of one row, whose index is first brought up to date."""
        history = self.context.rows.history
        num_tokens = history.num_tokens.item(row)
        tokens = history.token_ids[row, :num_tokens]
        if tokens.item(-1) < 0:  # a placeholder: the token is not on the host yet
            return []
        index = self._indexes.get(row)
        if index is None:
            index = self._indexes[row] = SuffixIndex(self._capacity, can_copy_itself=True)
            self._seen[row] = 0
        index.extend(tokens[self._seen[row] :])
        self._seen[row] = num_tokens
        text = tokens[-self._depth :]
        own, others = index.search(text, limits), self.outputs.index.search(text, limits)
        return others.token_ids if others.score > own.score else own.token_ids
