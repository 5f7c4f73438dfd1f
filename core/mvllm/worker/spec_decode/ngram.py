"""Drafts by n-gram lookup."""

from __future__ import annotations

import numpy as np

from mvllm.worker.spec_decode.proposer import DraftStep, Proposer, ProposerContext


class NgramProposer(Proposer):
    """Finds the last tokens of a sequence earlier in it, and proposes the tokens that followed there.

        a b c d e . . . . b c       the last 2 tokens also occur before d e
                            d e     the draft tokens

    The longest match counts, and among equally long ones the latest. It needs no weights, and pays off where text is
    copied: quotations, edited code, lists.
    """

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._shortest, self._longest = settings.prompt_lookup_min, settings.prompt_lookup_max

    def propose(self, step: DraftStep) -> list[list[int]]:
        """See Proposer."""
        if not step.num_tokens:
            return [[] for _ in step.rows]
        history = self.context.rows.history
        known = (history.token_ids[row, : history.num_tokens[row]] for row in step.rows.tolist())
        return [tokens_after_match(tokens, step.num_tokens, self._shortest, self._longest) for tokens in known]


def tokens_after_match(tokens: np.ndarray, num_tokens: int, shortest: int, longest: int) -> list[int]:
    """The tokens that followed the longest match.

    Args:
        tokens: int [n]: a sequence.
        num_tokens: How many tokens to return, if there is a match.
        shortest, longest: Tokens of a match.
    """
    found = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1 if len(found) else 0
    for back in range(1, min(longest, len(tokens))):
        longer = found[found >= back]
        longer = longer[tokens[longer - back] == tokens[-1 - back]]
        if not len(longer):
            break
        found, length = longer, back + 1
    if length < shortest:
        return []
    begin = int(found[-1]) + 1
    known = tokens[begin : begin + num_tokens].tolist()
    # A match near the end is shorter than the draft: it is repeated.
    return [known[i % len(known)] for i in range(num_tokens)]
