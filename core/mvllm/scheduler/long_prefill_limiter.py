"""How much of a step's token budget long prompts get while other requests can use it.

A prompt of 100,000 tokens would take the whole budget of dozens of steps, and later requests would wait. So a step is
planned in two rounds. In round 1 a request with more than `threshold` tokens to compute gets `threshold` tokens, for at
most `max_long_partial_prefills` requests; other requests follow. In round 2 the rest of the budget goes to the requests
that were held back, in service order:

    budget 2048, threshold 1024     long prompt A, long prompt B, short prompt c of 300 tokens, decoding d
    round 1                         A 1024                        c 300                         d 1
    round 2                         A 1024 + 723

So a single prompt gets the whole budget, and long prompts are computed one after the other.
"""

from __future__ import annotations

import sys

from mvllm.config.engine_config import SchedulerConfig
from mvllm.scheduler.request import Request


class LongPrefillLimiter:
    """Limits the requests of round 1, and records those held back.

    Args:
        config: The limits.

    Attributes:
        held_back: Running requests that got fewer tokens than they have to compute, with their positions in the batch;
            -1 for those that got none.
        were_limited: A request was limited since `start_step`. Only then the step needs a second round, and the next
            step needs `start_step`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        threshold = config.long_prefill_token_threshold
        if threshold is None:
            threshold = config.max_num_batched_tokens // 2
        self._threshold = threshold if threshold and config.enable_chunked_prefill else sys.maxsize
        self._most = config.max_long_partial_prefills
        self._num_left = self._most
        self.held_back: list[tuple[Request, int]] = []
        self.were_limited = False

    def start_step(self) -> None:
        """Begins round 1 of a step."""
        self._num_left = self._most
        self.were_limited = False
        self.held_back = []

    def disable_limit(self) -> None:
        """Begins round 2, in which nothing is limited."""
        self._num_left = sys.maxsize

    @property
    def has_room(self) -> bool:
        """Whether one more long prompt may be computed in this round."""
        return self._num_left > 0

    def num_allowed_tokens(self, num_tokens: int) -> int:
        """How many of its `num_tokens` uncomputed tokens a request may compute in this round; may be 0."""
        if num_tokens <= self._threshold or self._num_left > self._most:
            return num_tokens
        self.were_limited = True
        if not self._num_left:
            return 0
        self._num_left -= 1
        return self._threshold
