"""Requests with the shape of published traces: conversations that share system prompts, bursts, heavy tails.

| property | model | after |
|---|---|---|
| arrivals | Gamma-distributed gaps, coefficient of variation 2 | BurstGPT: gaps of real services fit Gamma |
| rate over a day | 1 + a sin, scaled to the length of the run | BurstGPT: daily periods |
| lengths | log-normal: heavy tails | BurstGPT: heavy-tailed prompts and outputs |
| pauses | log-normal, median 60 s | KVCache in the wild: 80 % of the reuses within 10 minutes |
| shared prompts | Zipf over 200 system prompts | the same: 10 % of the blocks have 77 % of the reuses |
| reuse | the ideal share of cached prompt tokens is printed | the same: 62 % and 54 % with an endless cache |

BurstGPT is arXiv 2401.17644, KVCache in the wild arXiv 2506.02634. The parameters of the distributions are ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens, times in seconds.

    Attributes:
        rate: Conversations that begin per second, on average.
        seconds: New conversations begin until then.
        burstiness: Coefficient of variation of the gaps between them; 1 for a Poisson process.
        daily: Amplitude of the rate's sine, as a fraction of the rate; one period is `seconds` long.
        step_at, step_factor: From this time on the rate is multiplied.
        turns: Mean number of requests of a conversation.
        pause: Median time between an answer and the next request.
        num_system_prompts: Different system prompts.
        document_share: Share of conversations that begin with a long document.
    """

    rate: float
    seconds: float
    burstiness: float = 2.0
    daily: float = 0.0
    step_at: float = float("inf")
    step_factor: float = 1.0
    turns: float = 3.0
    pause: float = 60.0
    num_system_prompts: int = 200
    system_tokens: float = 1000.0
    question_tokens: float = 200.0
    document_share: float = 0.15
    document_tokens: float = 6000.0
    output_tokens: float = 200.0
    most_tokens: int = 32_000


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        arrival: When the client sends it, in seconds.
        conversation: Its conversation.
        system: Its system prompt.
        system_tokens: Tokens of the system prompt.
        history_tokens: Tokens between the system prompt and the newest question: earlier turns.
        new_tokens: Tokens of the newest question.
        output_tokens: Tokens that it generates.
        turns_left: Requests of the conversation that follow.
        num_tries: How often it was sent.
        prompt_tokens: All tokens of the prompt.
        held_tokens: Tokens in the KV cache while it generates, on average.
    """

    arrival: float
    conversation: int
    system: int
    system_tokens: int
    history_tokens: int
    new_tokens: int
    output_tokens: int
    turns_left: int
    num_tries: int = 0
    prompt_tokens: int = field(init=False)
    held_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.system_tokens + self.history_tokens + self.new_tokens
        self.held_tokens = self.prompt_tokens + self.output_tokens / 2


class Conversations:
    """The requests of a workload. A later turn arrives when the turn before it has been answered and read.

    Args:
        workload: The workload.
        seed: Of all random numbers.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        rng, load = self._rng, workload
        weights = 1.0 / np.arange(1, load.num_system_prompts + 1)
        self._system_shares = weights / weights.sum()
        self._system_lengths = self._lengths(load.system_tokens, 0.8, load.num_system_prompts)
        self._start_times = np.fromiter(self._starts(), dtype=np.float64)
        count = len(self._start_times)
        self._systems = rng.choice(load.num_system_prompts, size=count, p=self._system_shares)
        self._turns = rng.geometric(1.0 / load.turns, size=count)
        first = self._lengths(load.question_tokens, 1.1, count)
        documents = self._lengths(load.document_tokens, 0.8, count)
        self._first = np.where(rng.random(count) < load.document_share, first + documents, first)
        self._first_outputs = rng.standard_normal((count, 2))[:, 1]

    def first_requests(self) -> Iterator[Request]:
        """The first request of each conversation, in order of time."""
        load, lengths = self._workload, self._system_lengths.tolist()
        columns = (self._start_times, self._systems, self._first, self._first_outputs, self._turns)
        for i, (start, system, new, output, turns) in enumerate(zip(*map(_numbers, columns), strict=True)):
            output_tokens = _length(load.output_tokens, 0.9, output, 4096)
            yield Request(start, i, system, lengths[system], 0, new, output_tokens, turns - 1)

    def next_turn(self, request: Request, answered: float) -> Request | None:
        """The conversation's next request; None if there is none."""
        if not request.turns_left:
            return None
        load, rng = self._workload, self._rng
        history = request.history_tokens + request.new_tokens + request.output_tokens
        if request.system_tokens + history > load.most_tokens:
            return None
        pause, question, output = rng.standard_normal(3).tolist()
        return Request(
            answered + load.pause * float(np.exp(pause)),
            request.conversation,
            request.system,
            request.system_tokens,
            history,
            _length(load.question_tokens, 1.1, question, load.most_tokens),
            _length(load.output_tokens, 0.9, output, 4096),
            request.turns_left - 1,
        )

    def _lengths(self, median: float, sigma: float, count: int) -> np.ndarray:
        values = median * np.exp(self._rng.normal(0.0, sigma, count))
        return np.clip(values, 1, self._workload.most_tokens).astype(np.int64)

    def _starts(self) -> Iterator[float]:
        """Start times: gaps with mean 1, stretched by the rate at each time."""
        load, shape = self._workload, 1.0 / self._workload.burstiness**2
        now = 0.0
        while True:
            for gap in self._rng.gamma(shape, 1.0 / shape, 4096):
                rate = load.rate * (1.0 + load.daily * np.sin(2.0 * np.pi * (now / load.seconds - 0.25)))
                if now >= load.step_at:
                    rate *= load.step_factor
                now += gap / rate
                if now >= load.seconds:
                    return
                yield now


def _length(median: float, sigma: float, normal: float, most: int) -> int:
    """A log-normal length, from a standard normal number."""
    return max(1, min(most, int(median * np.exp(sigma * normal))))


def _numbers(column: np.ndarray, count: int = 4096) -> Iterator[Any]:
    """The elements as Python numbers, of which few are in memory at once."""
    for start in range(0, len(column), count):
        yield from column[start : start + count].tolist()


class Replay(Conversations):
    """Given requests at given times. Answers cause no further ones."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def first_requests(self) -> Iterator[Request]:
        """Copies of the requests, in order of time."""
        for request in sorted(self._requests, key=lambda request: request.arrival):
            yield replace(request, turns_left=0, num_tries=0)

    def next_turn(self, request: Request, answered: float) -> Request | None:
        """None."""
        return None


def ideal_hit_rate(requests: list[Request]) -> float:
    """The share of prompt tokens that an endless cache, shared by all requests, would have had."""
    systems: set[int] = set()
    found = total = 0
    heap = [(request.arrival, i) for i, request in enumerate(requests)]
    heapq.heapify(heap)
    while heap:
        request = requests[heapq.heappop(heap)[1]]
        total += request.prompt_tokens
        if request.system in systems:
            found += request.system_tokens
        systems.add(request.system)
        found += request.history_tokens
    return found / max(1, total)
