"""Chats and a long prompt on a simulated device, whose time passes only with the tokens of its steps.

A step takes base + tokens x per_token + positions x per_position seconds, where positions are those that its prompt
tokens attend to. As many chats as wanted are always there: when one ends, another one arrives.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mvllm.config.engine_config import SchedulerConfig
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: for itself, for each token, and for each position that a prompt token attends to."""

    base: float
    per_token: float
    per_position: float = 0.0


@dataclass
class Latencies:
    """Seconds of one run.

    Attributes:
        between_tokens: Between two tokens of a chat, sorted.
        first_tokens: Until the first token of the chats that arrived, sorted.
        long_prompts: Until the first token of each long prompt, in the order of their ends.
    """

    between_tokens: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    long_prompts: list[float] = field(default_factory=list)

    def p99(self) -> float:
        return self.between_tokens[int(0.99 * len(self.between_tokens))]


class SimulatedLoad:
    """Runs chats, with or without long prompts.

    Args:
        cost: Of a step.
        num_chats: Chats at once.
        long_prompts: Lengths of the prompts that arrive together after `warm_up` seconds.
        max_seconds: Simulated time after the warm-up; with long prompts the run ends earlier, with their first tokens.
        depth: Steps in flight; 2 is asynchronous scheduling.
        output_tokens: Fewest and most tokens of a chat.
        limits: Fields of SchedulerConfig.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        num_chats: int = 64,
        long_prompts: tuple[int, ...] = (),
        warm_up: float = 5.0,
        max_seconds: float = 30.0,
        depth: int = 2,
        output_tokens: tuple[int, int] = (100, 300),
        max_num_batched_tokens: int = 2048,
        **limits: float | None,
    ) -> None:
        self._now = 0.0
        self._cost, self._depth, self._output_tokens = cost, depth, output_tokens
        self._rng = random.Random(1)
        self._long_prompts, self._warm_up, self._max_seconds = long_prompts, warm_up, max_seconds
        max_model_len = max((4096, *(length + 64 for length in long_prompts)))
        config = SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, **limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            config,
            max_model_len=max_model_len,
            kv_cache=KVCacheManager(
                num_blocks=(num_chats * 4096 + sum(long_prompts)) // BLOCK_SIZE + 256, block_size=BLOCK_SIZE
            ),
            clock=lambda: self._now,
        )
        self._num_added = 0
        self._arrivals: dict[str, float] = {}
        self._last_tokens: dict[str, float] = {}
        for _ in range(num_chats):
            self._add_chat()

    def run(self) -> Latencies:
        """Runs the load once."""
        found, scheduler = Latencies(), self.scheduler
        in_flight: list[tuple[SchedulerOutput, list[int], float]] = []
        waiting_for = 0
        begin, end = self._warm_up, self._warm_up + self._max_seconds
        device_free = 0.0
        while self._now < end:
            if self._long_prompts and self._now >= begin and not waiting_for and not found.long_prompts:
                waiting_for = len(self._long_prompts)
                for i, length in enumerate(self._long_prompts):
                    self._add(f"long {i}", length, 1)
            while len(in_flight) < self._depth:
                plan = scheduler.schedule()
                sampled = {r.row for r in scheduler.requests.running if r.num_tokens == r.num_computed_tokens + 1}
                device_free = max(device_free, self._now) + self._seconds(plan)
                in_flight.append((plan, [5 if row in sampled else -1 for row in plan.rows], device_free))
            plan, tokens, ready = in_flight.pop(0)
            self._now = ready
            outputs = scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, tokens)).outputs
            for output in outputs:
                name = output.request_id
                if output.new_token_ids:
                    self._record(name, found, measured=self._now >= begin)
                if output.finish_reason is not None:
                    if name.startswith("long"):
                        waiting_for -= 1
                        found.long_prompts.append(self._now - self._arrivals[name])
                        if not waiting_for:
                            end = self._now
                    else:
                        self._add_chat()
        found.between_tokens.sort()
        found.first_tokens.sort()
        return found

    def _record(self, name: str, found: Latencies, *, measured: bool) -> None:
        last = self._last_tokens.get(name)
        self._last_tokens[name] = self._now
        if measured and not name.startswith("long"):
            if last is not None:
                found.between_tokens.append(self._now - last)
            else:
                found.first_tokens.append(self._now - self._arrivals[name])

    def _seconds(self, plan: SchedulerOutput) -> float:
        attended = 0
        if self._cost.per_position:
            computed = {r.row: r.num_computed_tokens for r in self.scheduler.requests.running}
            attended = sum(
                count * computed.get(row, 0) for row, count in zip(plan.rows, plan.num_scheduled_tokens) if count > 1
            )
        tokens = plan.total_num_scheduled_tokens
        return self._cost.base + tokens * self._cost.per_token + attended * self._cost.per_position

    def _add_chat(self) -> None:
        self._add(f"chat {self._num_added}", self._rng.randint(50, 600), self._rng.randint(*self._output_tokens))

    def _add(self, name: str, num_tokens: int, max_tokens: int) -> None:
        self._num_added += 1
        self._arrivals[name] = self._now
        params = SamplingParams(max_tokens=max_tokens, detokenize=False)
        prompt = [hash((self._num_added, i)) % 100_000 for i in range(num_tokens)]
        self.scheduler.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, eos_token_ids=[])
        )
