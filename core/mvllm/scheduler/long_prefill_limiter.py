"""How much of a step's token budget long prompts get while other requests can use it, or wait for the step's end.

A prompt of 100,000 tokens would take the whole budget of dozens of steps, and later requests would wait. So a step is
planned in two rounds. In round 1 the first request with more than `threshold` tokens to compute gets `threshold`
tokens, and other such requests get none; short requests follow. In round 2 the rest of the budget goes to the requests
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
from typing import NamedTuple

from mvllm.config.engine_config import SchedulerConfig
from mvllm.scheduler.step_time_model import StepTimeModel

LONG_STEPS = 4
"""A prompt is very long if it needs more than so many whole steps."""


class PromptShare(NamedTuple):
    """How many of its uncomputed tokens a request may compute in a round.

    Attributes:
        num_tokens: Most tokens; 0 if it waits for another long prompt.
        is_limited: It has more tokens to compute.
        is_cap: See the module.
        is_very_long: It is limited by the times of steps.
        is_pause: It gets nothing so that the times of steps can be estimated anew.
    """

    num_tokens: int
    is_limited: bool = False
    is_cap: bool = False
    is_very_long: bool = False
    is_pause: bool = False


WHOLE = PromptShare(sys.maxsize)
"""The share of a request that is not limited."""
_WHOLE = (WHOLE, WHOLE._replace(is_very_long=True))


class LongPrefillLimiter:
    """Gives long prompts their shares. `share` asks, `take` changes.

    Args:
        config: The limits.
        step_times: Estimates the times of steps; None for no limit on them.

    Attributes:
        were_limited: A share was limited since `start_step`. Only then the step needs a second round, and the next step
            needs `start_step`.
        is_capped: The share of a request in this step is a cap.
        num_waiting: Long prompts that waited for other long prompts in the last step.
    """

    def __init__(self, config: SchedulerConfig, step_times: StepTimeModel | None = None) -> None:
        threshold = config.long_prefill_token_threshold
        self._has_cap = bool(threshold)
        if threshold is None:
            threshold = config.max_num_batched_tokens // 2
        self._threshold = threshold if threshold and config.enable_chunked_prefill else sys.maxsize
        self._step_times = step_times
        self._slowdown = config.long_prefill_slowdown or 0.0
        self._very_long = LONG_STEPS * config.max_num_batched_tokens
        if step_times is None or not config.enable_chunked_prefill or threshold == 0:
            self._very_long = sys.maxsize
        self._is_taken = False
        self._is_round_2 = False
        self.is_capped = False
        self.were_limited = False
        self.num_waiting = 0

    def start_step(self) -> None:
        """Begins round 1 of a step."""
        self._is_taken = self._is_round_2 = self.were_limited = self.is_capped = False

    def start_round_2(self, *, others_generate: bool) -> bool:
        """Begins round 2. Returns whether the requests held back may have more tokens.

        Args:
            others_generate: Whether a request in the step generates.
        """
        self._is_round_2 = not (others_generate and self.is_capped)
        return self._is_round_2

    @property
    def has_room(self) -> bool:
        """Whether one more long prompt may be computed in this round."""
        return self._is_round_2 or not self._is_taken

    def is_very_long(self, num_tokens: int) -> bool:
        """Whether a request that starts with so many uncomputed tokens is limited by the times of steps."""
        return num_tokens > self._very_long

    def share(self, num_tokens: int, *, is_very_long: bool) -> PromptShare:
        """The share in this round of a request with so many uncomputed tokens. No side effects."""
        if self._is_round_2:
            return _WHOLE[is_very_long]
        threshold, is_cap, is_pause = self._threshold, self._has_cap, False
        if is_very_long and self._step_times is not None:
            fitting = self._step_times.prompt_tokens_within(1 + (self._slowdown - 1) * (1 + self.num_waiting))
            if fitting is not None and fitting < threshold:
                threshold, is_cap, is_pause = fitting, True, not fitting
        if num_tokens <= threshold:
            return _WHOLE[is_very_long]
        return PromptShare(
            num_tokens=0 if self._is_taken else threshold,
            is_limited=True,
            is_cap=is_cap and not self._is_taken,
            is_very_long=is_very_long,
            is_pause=is_pause,
        )

    def take(self, share: PromptShare) -> None:
        """Records that a request has its share in this round."""
        if not share.is_limited:
            return
        self.were_limited = self._is_taken = True
        self.is_capped |= share.is_cap
        if share.is_pause and self._step_times is not None:
            self._step_times.start_pause()
