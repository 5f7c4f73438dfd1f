"""Estimates how long a step takes, from the times of earlier steps: a step of generating requests, and a prompt token.

    seconds of a step = seconds of a step without prompts + prompt tokens x seconds per prompt token

Both are moving averages, so they follow the load, the context lengths and the machine. Ordinary steps, in which
requests generate and no very long prompt takes part, say what latency between two tokens is usual.
"""

from __future__ import annotations

from collections import deque

from mvllm.messages.scheduler_output import SchedulerOutput

_FALLS, _RISES = 1 / 4, 1 / 16
"""Weights of a new value below and above the average: a step that is slow for another reason counts little."""

_WEIGHT = 1 / 8
"""Weight of a new step in the average cost of prompt tokens."""

_MAX_AGE = 64
"""After so many steps with prompt tokens one step without is needed, since the number of requests may have changed."""

_FIRST_TOKENS = 128
"""Prompt tokens of a step before their cost is known."""

_MIN_TOKENS = 16
"""A prompt always gets as many, so that it makes progress."""

UNNOTICED_SECONDS = 0.02
"""A latency between two tokens that no reader notices: 50 tokens in a second."""

_ORDINARY_WEIGHT = 1 / 64
_NUM_ORDINARY = 512
"""Ordinary steps whose times are kept."""

_MIN_SECONDS = 1e-9
"""A smaller cost of a step's prompt tokens is none: the average tends to 0 while steps with prompts take no longer."""


class StepTimeModel:
    """The estimate of one scheduler.

    A step is the time between the results of two steps, which is also the latency between two tokens of a request.
    """

    def __init__(self) -> None:
        self._decode_seconds = 0.0  # of a step without prompts; 0 before the first one
        self._prompt_seconds = self._prompt_tokens = 0.0  # moving averages over steps with prompts
        self._age = 0
        self._ordinary_seconds = 0.0  # moving average over ordinary steps
        self._ordinary = deque[float](maxlen=_NUM_ORDINARY)
        self._longest_ordinary = 0.0  # 99th percentile
        self._planned: dict[int, tuple[float, bool]] = {}  # steps in flight: when planned, is ordinary
        self._last_results_time = 0.0

    def start_step(self, step: int, now: float, *, is_ordinary: bool) -> None:
        """Records that a step has been planned. Arguments as for `add_step`."""
        self._planned[step] = now, is_ordinary

    def end_step(self, plan: SchedulerOutput, now: float) -> None:
        """Records the time since the results of the previous step, or since the plan if it was made later."""
        planned, is_ordinary = self._planned.pop(plan.step)
        start = max(planned, self._last_results_time)
        self._last_results_time = now
        if plan.rows:
            num_drafts = sum(map(len, plan.draft_token_ids.values()))
            num_prompt_tokens = plan.total_num_scheduled_tokens - len(plan.rows) - num_drafts
            self.add_step(num_prompt_tokens, now - start, is_ordinary=is_ordinary)

    def add_step(self, num_prompt_tokens: int, seconds: float, *, is_ordinary: bool = True) -> None:
        """Records a step.

        Args:
            num_prompt_tokens: Its tokens beyond one for each request.
            seconds: How long it took.
            is_ordinary: Requests generate in it, and no prompt is limited.
        """
        if num_prompt_tokens > 0:
            self._age += 1
            if self._decode_seconds:
                further = max(0.0, seconds - self._decode_seconds)
                self._prompt_seconds += _WEIGHT * (further - self._prompt_seconds)
                self._prompt_tokens += _WEIGHT * (num_prompt_tokens - self._prompt_tokens)
        else:
            self._add_decode_step(seconds)
        if is_ordinary:
            average = self._ordinary_seconds or seconds
            self._ordinary_seconds = average + _ORDINARY_WEIGHT * (min(seconds, 4 * average) - average)
            self._ordinary.append(seconds)
            self._longest_ordinary = 0.0

    def _add_decode_step(self, seconds: float) -> None:
        """Records a step without prompts."""
        self._age = 0
        average = self._decode_seconds
        if not average or seconds < average / 2:  # the first step may have compiled something
            self._decode_seconds = seconds
            self._ordinary_seconds = self._longest_ordinary = 0.0
            self._ordinary.clear()
        elif seconds < average:
            self._decode_seconds += _FALLS * (seconds - average)
        else:
            self._decode_seconds += _RISES * (min(seconds, 4 * average) - average)

    def prompt_tokens_within(self, slowdown: float) -> int | None:
        """Tokens of a very long prompt in a step with requests that generate; None while nothing is known.

        With them the average latency between two tokens grows `slowdown` times. There are more if a step with them is
        no longer than UNNOTICED_SECONDS, and than the longest ordinary steps. Now and then 0, until `start_pause`: then
        a step without prompt tokens is needed.
        """
        if not self._decode_seconds:
            return None
        if self._age > _MAX_AGE:
            return 0
        if self._prompt_seconds < _MIN_SECONDS:
            return _FIRST_TOKENS
        seconds_per_token = self._prompt_seconds / self._prompt_tokens
        further = (slowdown - 1) * max(self._decode_seconds, self._ordinary_seconds)
        unnoticed = min(UNNOTICED_SECONDS, self._find_longest_ordinary()) - self._decode_seconds
        return max(_MIN_TOKENS, int(max(further, unnoticed) / seconds_per_token))

    def start_pause(self) -> None:
        """A very long prompt gets no tokens in the step being planned, because `prompt_tokens_within` was 0."""
        self._age = 0

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """The time of one more prompt token in a step; None while it is not known."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_seconds >= _MIN_SECONDS else None

    def _find_longest_ordinary(self) -> float:
        """The 99th percentile of the ordinary steps' times."""
        if not self._longest_ordinary and self._ordinary:
            self._longest_ordinary = sorted(self._ordinary)[len(self._ordinary) * 99 // 100]
        return self._longest_ordinary
