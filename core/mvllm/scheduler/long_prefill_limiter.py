"""How much of a step's token budget long prompts get while other requests can use it, or wait for the step's end.

A prompt of 100,000 tokens would take the whole budget of dozens of steps, and later requests would wait. So a step is
planned in two rounds. In round 1 a request with more than `threshold` tokens to compute gets `threshold` tokens, for at
most `max_long_partial_prefills` requests; other requests follow. In round 2 the rest of the budget goes to the requests
that were held back, in service order:

    budget 2048, threshold 1024     long prompt A, long prompt B, short prompt c of 300 tokens, decoding d
    round 1                         A 1024                        c 300                         d 1
    round 2                         A 1024 + 723

So a single prompt gets the whole budget, and long prompts are computed one after the other.

In a step in which requests generate, round 2 gives nothing to a prompt whose share is a *cap*, because the longer step
would delay their tokens:

    prompt                          share in round 1                                            is a cap
    long                            long_prefill_token_threshold                                if that is configured
    very long (LONG_STEPS steps)    see StepTimeModel.prompt_tokens_within                      always

With several long prompts waiting, throughput counts more: the share of a very long prompt grows by their number.
"""

from __future__ import annotations

import sys

from mvllm.config.engine_config import SchedulerConfig
from mvllm.scheduler.request import Request
from mvllm.scheduler.step_time_model import StepTimeModel

LONG_STEPS = 4
"""A prompt is very long if it needs more than so many whole steps."""


class LongPrefillLimiter:
    """Limits the requests of round 1, and records those held back.

    Args:
        config: The limits.
        step_times: Estimates the times of steps; None for no limit on them.

    Attributes:
        held_back: Running requests that got fewer tokens than they have to compute, with their positions in the batch;
            -1 for those that got none.
        were_limited: A request was limited since `start_step`. Only then the step needs a second round, and the next
            step needs `start_step`.
        is_capped: The share of a request in this step is a cap.
        num_waiting: Long prompts that waited for other long prompts in the last step.
        num_partial: Prompts that are partly computed, and not completed in this step. Only counted if
            `max_num_partial_prefills` is set.
    """

    def __init__(self, config: SchedulerConfig, step_times: StepTimeModel | None = None) -> None:
        threshold = config.long_prefill_token_threshold
        self._has_cap = bool(threshold)
        if threshold is None:
            threshold = config.max_num_batched_tokens // 2
        self._threshold = threshold if threshold and config.enable_chunked_prefill else sys.maxsize
        self._most = config.max_long_partial_prefills
        self._num_left = self._most
        self._step_times = step_times
        self._slowdown = config.long_prefill_slowdown or 0.0
        self._very_long = LONG_STEPS * config.max_num_batched_tokens
        if step_times is None or not config.enable_chunked_prefill or threshold == 0:
            self._very_long = sys.maxsize
        self.max_partial = config.max_num_partial_prefills
        self.is_capped = False
        self.held_back: list[tuple[Request, int]] = []
        self.were_limited = False
        self.num_waiting = 0
        self.num_partial = 0

    def start_step(self) -> None:
        """Begins round 1 of a step."""
        self._num_left = self._most
        self.were_limited = self.is_capped = False
        self.held_back = []
        self.num_partial = 0

    def start_round_2(self, *, others_generate: bool) -> bool:
        """Begins round 2. Returns whether the requests held back may have more tokens.

        Args:
            others_generate: Whether a request in the step generates.
        """
        if others_generate and self.is_capped:
            return False
        self._num_left = sys.maxsize
        return True

    @property
    def has_room(self) -> bool:
        """Whether one more long prompt may be computed in this round."""
        return self._num_left > 0

    def is_very_long(self, num_tokens: int) -> bool:
        """Whether a request that starts with so many uncomputed tokens is limited by the times of steps."""
        return num_tokens > self._very_long

    def num_allowed_tokens(self, num_tokens: int, *, is_very_long: bool) -> int:
        """How many of its `num_tokens` uncomputed tokens a request may compute in this round; may be 0."""
        if self._num_left > self._most:
            return num_tokens
        threshold, is_cap = self._threshold, self._has_cap
        if is_very_long and self._step_times is not None:
            fitting = self._step_times.prompt_tokens_within(1 + (self._slowdown - 1) * (1 + self.num_waiting))
            if fitting is not None and fitting < threshold:
                threshold, is_cap = fitting, True
        if num_tokens <= threshold:
            return num_tokens
        self.were_limited = True
        if not self._num_left:
            return 0
        self._num_left -= 1
        self.is_capped |= is_cap
        return threshold

    def can_start(self, num_tokens: int, budget: int) -> bool:
        """Whether a waiting prompt with so many uncomputed tokens may start, under `max_num_partial_prefills`."""
        is_whole = num_tokens <= min(budget, self._threshold)
        return is_whole or self.max_partial is None or self.num_partial < self.max_partial
