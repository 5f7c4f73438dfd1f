"""Chooses how many draft tokens the rows of a step get, from measured tokens per second.

Whether drafts pay depends on how many are accepted, and on what their verification costs, which grows with the number
of rows. Neither is modelled. For each size of batch the number of drafts is a place on a ladder, and a few steps at a
neighbouring place show whether that one gives more tokens per second:

    ladder   0   1   2   4   8        8 is num_speculative_tokens
                     ^   ^
                     |   a trial of some steps
                     the present number

While trials fail they become rare. Only steps count in which every row generates, and which follow a step of the same
size whose drafts had the same number: the drafts that a step verifies were proposed in the step before.
"""

from __future__ import annotations

from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput

_MANY_ROWS = 8
"""With so many rows the first steps have no drafts: computing costs more than reading weights."""

_TRIAL_STEPS = 5
_WEIGHT = 1 / 16
"""Weight of a new step in the averages of the present number."""
_LEAST_GAIN = 1.02
_FIRST_INTERVAL, _FIRST_INTERVAL_OF_MANY, _LONGEST_INTERVAL = 16, 64, 4096
"""Steps between two trials; the first two are for few and for many rows."""


class _Rate:
    """Moving averages of the tokens and seconds of steps."""

    __slots__ = ("count", "seconds", "tokens")

    def __init__(self) -> None:
        self.count, self.tokens, self.seconds = 0, 0.0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a step. One that takes much longer than the others counts as if it took a bit longer."""
        self.count += 1
        if self.count > 1:
            seconds = min(seconds, 2 * self.seconds)
        weight = max(_WEIGHT, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


class _Ladder:
    """The number of drafts for one size of batch.

    Args:
        lengths: The numbers to choose from, rising.
        place: Index of the first one.
        interval: Steps before the first trial.

    Attributes:
        place: Index of the present number, or of the one that is tried.
    """

    def __init__(self, lengths: list[int], place: int, interval: int) -> None:
        self._lengths = lengths
        self.place = self._settled = place
        self._rate, self._trial = _Rate(), _Rate()
        self._direction = 1 if place == 0 else -1
        self._interval = self._until_trial = interval

    def add_step(self, tokens: int, seconds: float) -> None:
        """Adds a step at `place`, and moves on the ladder if it is time."""
        if self.place != self._settled:
            self._trial.add(tokens, seconds)
            if self._trial.count == _TRIAL_STEPS:
                self._end_trial()
            return
        self._rate.add(tokens, seconds)
        self._until_trial -= 1
        if self._until_trial <= 0:
            if not 0 <= self._settled + self._direction < len(self._lengths):
                self._direction = -self._direction
            self.place, self._trial = self._settled + self._direction, _Rate()

    def _end_trial(self) -> None:
        if self._trial.tokens_per_second > _LEAST_GAIN * self._rate.tokens_per_second:
            self._settled, self._rate, self._interval = self.place, self._trial, _FIRST_INTERVAL
            self._until_trial = _TRIAL_STEPS  # the next place in this direction may be better still
            return
        self.place = self._settled
        self._direction = -self._direction
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        self._until_trial = self._interval


class DraftLength:
    """The number of drafts of one scheduler's steps.

    Args:
        most: `num_speculative_tokens`.
    """

    def __init__(self, most: int) -> None:
        lengths = [0]
        while 2 ** (len(lengths) - 1) < most:
            lengths.append(2 ** (len(lengths) - 1))
        self._lengths = [*lengths, most]
        self._ladders: dict[int, _Ladder] = {}  # by the number of binary digits of the number of rows
        self._chosen: dict[int, tuple[int, int, bool, float]] = {}  # step in flight: see start_step
        self._last = (-1, -1)
        self._last_results_time = 0.0

    def start_step(self, plan: SchedulerOutput, now: float) -> int:
        """Records that a step was planned. Returns how many tokens the drafts may have that are proposed after it."""
        num_rows = len(plan.rows)
        size = num_rows.bit_length()
        ladder = self._ladders.get(size)
        if ladder is None:
            ladder = self._ladders[size] = (
                _Ladder(self._lengths, 0, _FIRST_INTERVAL_OF_MANY)
                if num_rows >= _MANY_ROWS
                else _Ladder(self._lengths, len(self._lengths) - 1, _FIRST_INTERVAL)
            )
        num_drafts = sum(map(len, plan.draft_token_ids.values()))
        generates = plan.total_num_scheduled_tokens == num_rows + num_drafts
        chosen = size, ladder.place
        is_steady, self._last = generates and chosen == self._last, chosen if generates else (-1, -1)
        self._chosen[plan.step] = *chosen, is_steady, now
        return self._lengths[ladder.place]

    def end_step(self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Records the results of a step."""
        size, place, is_steady, planned = self._chosen.pop(plan.step)
        seconds = now - max(planned, self._last_results_time)
        self._last_results_time = now
        ladder = self._ladders.get(size)
        if is_steady and ladder is not None and ladder.place == place and plan.rows:
            tokens = len(plan.rows) + sum(map(len, output.further_token_ids.values()))
            ladder.add_step(tokens, seconds)
