"""How much of a step a long prompt may take while others have something to compute.

A prompt of 100,000 tokens would take the whole budget of dozens of steps, and every request behind it would wait. So a
step is planned in two rounds. In the first one a request with more than `threshold` tokens to compute gets that many,
and only so many requests get a share at all; the others have the rest. What is left then goes to those that were held
back, in the order of service:

    budget 2048, threshold 1024     long prompt A, long prompt B, short prompt c of 300 tokens, decoding d
    round 1                         A 1024                        c 300                         d 1
    round 2                         A 1024 + 723

So a prompt that is alone has the whole budget, and long prompts are computed one after the other.
"""

from __future__ import annotations

import sys

from mvllm.config.engine_config import SchedulerConfig
from mvllm.scheduler.request import Request


class LongPrefillLimiter:
    """Deals out the first round of a step, and notes who was held back in it.

    Args:
        config: The limits.

    Attributes:
        held_back: Requests that got less than they have to compute, and their position in the batch, -1 where they got
            nothing. Running ones only.
        were_limited: Whether anybody has got less than it asked for since `begin`. Only then a second round is needed,
            and `begin` before the next step.
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
        """Begins the first round of a step."""
        self._num_left = self._most
        self.were_limited = False
        self.held_back = []

    def disable_limit(self) -> None:
        """Begins the second round, in which nothing is limited."""
        self._num_left = sys.maxsize

    @property
    def has_room(self) -> bool:
        """Whether one more long prompt may be computed in this round."""
        return self._num_left > 0

    def num_allowed_tokens(self, num_tokens: int) -> int:
        """How many of the tokens that a request has to compute it may compute in this round; may be none."""
        if num_tokens <= self._threshold or self._num_left > self._most:
            return num_tokens
        self.were_limited = True
        if not self._num_left:
            return 0
        self._num_left -= 1
        return self._threshold
