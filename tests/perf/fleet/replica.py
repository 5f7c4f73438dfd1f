"""One replica as a queue: prompts are computed one after the other, all running sequences generate at once.

While nothing changes, each step takes the same time and computes the same number of tokens. So a replica is described
by rates, and something has to be done only when a prompt is finished, a sequence is finished, or a request comes:

    step time s = step + sequence * n + kv_token * k + prompt_token * c      c prompt tokens per step while prompts wait
    prompt tokens per second = c / s          tokens per second of each sequence = 1 / s

Sequences are kept in a heap by the number of steps at which they end.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.perf.fleet.step_times import StepTimes
from tests.perf.fleet.workload import Request

_NEVER = float("inf")
_TOLERANCE = 1e-9  # seconds: an event that is so near has come; times are rounded


@dataclass(slots=True)
class Running:
    """A request on a replica.

    Attributes:
        request: The request.
        sent: When the client first sent it.
        cached_tokens: Prompt tokens that were found in the cache.
        work: The rest of the prompt, in tokens; tokens in a slower tier count as what their transfer takes.
        first_token: When its first token came; 0 before.
    """

    request: Request
    sent: float
    cached_tokens: int = 0
    work: float = 0.0
    first_token: float = 0.0


_NONE: tuple[Sequence[Running], Sequence[Running]] = ((), ())


class PrefixCache:
    """System prompts and conversations that a replica has cached, least recently used first. Sizes in tokens.

    Args:
        tier_tokens: Tokens that fit into a slower tier, host memory or a disk: it gets what the KV cache evicts.
    """

    def __init__(self, tier_tokens: int = 0) -> None:
        self.size = 0
        self.systems: OrderedDict[int, int] = OrderedDict()
        self.conversations: OrderedDict[int, int] = OrderedDict()
        self.tier: OrderedDict[tuple[bool, int], int] = OrderedDict()  # (is a system prompt, number)
        self.tier_size = 0
        self._tier_tokens = tier_tokens

    def find(self, request: Request) -> tuple[int, int]:
        """Leading prompt tokens that are in the KV cache, and those that are in the tier."""
        found = [0, 0]
        if request.system in self.systems:
            found[0] = request.system_tokens
        elif (True, request.system) in self.tier:
            found[1] = request.system_tokens
        else:
            return 0, 0
        is_in_tier = request.conversation not in self.conversations
        found[is_in_tier] += min(self.tokens_of(request.conversation), request.history_tokens)
        return found[0], found[1]

    def tokens_of(self, conversation: int) -> int:
        """Tokens of a conversation that are in the KV cache or in the tier."""
        tokens = self.conversations.get(conversation)
        return self.tier.get((False, conversation), 0) if tokens is None else tokens

    def store_system(self, request: Request) -> None:
        """Stores the request's system prompt."""
        if request.system not in self.systems:
            self.systems[request.system] = request.system_tokens
            self.size += request.system_tokens
            self._remove_from_tier(True, request.system)

    def store(self, request: Request, room: int) -> list[tuple[bool, int]]:
        """Stores all tokens of a finished request, and evicts others until `room` tokens hold all.

        Returns:
            (is a system prompt, number) of each entry that is in no tier any more.
        """
        self.store_system(request)
        self.systems.move_to_end(request.system)
        tokens = request.history_tokens + request.new_tokens + request.output_tokens
        self.size += tokens - self.conversations.pop(request.conversation, 0)
        self.conversations[request.conversation] = tokens
        self._remove_from_tier(False, request.conversation)
        return self.shrink(room)

    def shrink(self, room: int) -> list[tuple[bool, int]]:
        """Evicts entries until `room` tokens hold the others. System prompts are used often, so they go last."""
        evicted = []
        while self.size > room and (self.conversations or self.systems):
            is_system = not self.conversations
            number, tokens = (self.systems if is_system else self.conversations).popitem(last=False)
            self.size -= tokens
            if not self._tier_tokens:
                evicted.append((is_system, number))
                continue
            self.tier[is_system, number] = tokens
            self.tier_size += tokens
            while self.tier_size > self._tier_tokens:
                entry, tokens = self.tier.popitem(last=False)
                self.tier_size -= tokens
                evicted.append(entry)
        return evicted

    def _remove_from_tier(self, is_system: bool, number: int) -> None:
        if self.tier:
            self.tier_size -= self.tier.pop((is_system, number), 0)


class Replica:
    """The queue of one replica.

    Args:
        times: Its step times.
        tier_tokens: Tokens that fit into a slower tier of its cache.

    Attributes:
        speed: Its speed, as a factor.
        accepts: Whether it takes new requests.
        is_alive: Whether it computes.
        waiting_tokens: Prompt tokens to compute.
        running_tokens: Tokens in the KV caches of running sequences.
        output_tokens: Tokens still to generate, of waiting and running requests.
        busy_seconds: How long it had work.
        version: Grows with every change of its rates: events of earlier versions are void.
    """

    def __init__(self, times: StepTimes, tier_tokens: int = 0) -> None:
        self.times, self.speed = times, 1.0
        self.accepts = self.is_alive = True
        self.cache = PrefixCache(tier_tokens)
        self._tier_tokens = tier_tokens
        self.waiting: deque[Running] = deque()
        self.version = 0
        self.waiting_tokens = 0.0
        self.running_tokens = 0.0
        self.output_tokens = 0.0
        self.busy_seconds = 0.0
        self._reserved = 0.0  # tokens that running requests will hold at their end
        self._prefilling: Running | None = None
        self._left = 0.0  # prompt tokens of `_prefilling` still to compute
        self._generating: list[tuple[float, int, Running]] = []  # (step at which it ends, number, request)
        self._steps = 0.0  # steps done
        self._now = 0.0
        self._count = 0

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self._generating) + (self._prefilling is not None)

    def find_cached(self, running: Running) -> None:
        """Finds what is cached of the request's prompt. The last token is computed in any case."""
        cached, loaded = self.cache.find(running.request)
        running.cached_tokens = min(cached + loaded, running.request.prompt_tokens - 1)
        running.work = running.request.prompt_tokens - running.cached_tokens
        if loaded:
            running.work += loaded * self.times.load_token / self.times.prompt_token

    def drop_cache(self) -> None:
        """Empties the cache and its tier."""
        self.cache = PrefixCache(self._tier_tokens)

    def add(self, now: float, running: Running) -> None:
        """Takes a request."""
        self.advance(now)
        self.waiting.append(running)
        self.waiting_tokens += running.work
        self.output_tokens += running.request.output_tokens
        self._start_next()
        self.version += 1

    def next_event(self) -> float:
        """When something has to be done next, if nothing else comes."""
        generating, step, soonest = self._generating, self._decode_seconds(), _NEVER
        if self._prefilling is not None:
            steps = self._steps_of_prompt()
            soonest = self._now + (step * steps + self.times.prompt_token * self._left) / self.speed
            step = (soonest - self._now) / max(steps, 1)
        else:
            step /= self.speed
        if generating:
            soonest = min(soonest, self._now + max(0.0, generating[0][0] - self._steps) * step)
        return soonest

    def advance(self, now: float) -> tuple[Sequence[Running], Sequence[Running]]:
        """Computes until `now`, which is not after `next_event`.

        Returns:
            Requests whose first token came, and requests that ended.
        """
        elapsed, self._now = now - self._now, now
        generating = self._generating
        if self._prefilling is not None or generating:
            self.busy_seconds += elapsed
            self._compute(elapsed)
        ends_prefill = self._prefilling is not None and self._left <= 0.0
        if not ends_prefill and (not generating or generating[0][0] > self._steps + 1e-6):
            return _NONE
        started = [self._end_prefill(now)] if ends_prefill else []
        ended = self._end_sequences()
        self._start_next()
        self.version += 1
        return started, ended

    def room_for_cache(self) -> int:
        """Tokens of the KV cache that running requests do not need."""
        return max(0, int(self.times.kv_tokens - self._reserved))

    def drop_all(self, now: float) -> list[Running]:
        """Forgets all requests, and returns them. The replica has failed, or restarts."""
        _, ended = self.advance(now)
        lost = [*ended, *self.waiting, *(running for _, _, running in self._generating)]
        if self._prefilling is not None:
            lost.append(self._prefilling)
        self.waiting.clear()
        self._generating.clear()
        self._prefilling = None
        self.waiting_tokens = self.running_tokens = self.output_tokens = self._reserved = self._left = 0.0
        self.version += 1
        return lost

    def _decode_seconds(self) -> float:
        """Seconds of a step without prompt tokens, at speed 1."""
        times = self.times
        return times.step + times.sequence * len(self._generating) + times.kv_token * self.running_tokens

    def _steps_of_prompt(self) -> float:
        """Steps that compute the rest of the prompt."""
        full, rest = divmod(self._left, self.times.max_prompt_tokens)
        return full + (rest > 0)

    def _compute(self, elapsed: float) -> None:
        decode = self._decode_seconds()
        if self._prefilling is None:
            steps = elapsed * self.speed / decode + _TOLERANCE / decode
        else:
            steps_left = max(1.0, self._steps_of_prompt())
            total = (decode * steps_left + self.times.prompt_token * self._left) / self.speed
            share = elapsed / total if total - elapsed > _TOLERANCE else 1.0
            done = self._left * share
            steps = steps_left * share
            self._left -= done
            self.waiting_tokens -= done
        generated = steps * len(self._generating)
        self._steps += steps
        self.output_tokens -= min(generated, self.output_tokens)

    def _end_prefill(self, now: float) -> Running:
        running = self._prefilling
        assert running is not None
        self._prefilling, self._left = None, 0.0
        running.first_token = now
        self.output_tokens -= 1.0
        self._count += 1
        self.running_tokens += running.request.held_tokens
        heapq.heappush(self._generating, (self._steps + running.request.output_tokens - 1, self._count, running))
        return running

    def _end_sequences(self) -> list[Running]:
        """Ends the sequences whose last step is done."""
        generating, ended = self._generating, []
        while generating and generating[0][0] <= self._steps + 1e-6:
            running = heapq.heappop(generating)[2]
            request = running.request
            ended.append(running)
            self._reserved -= request.prompt_tokens + request.output_tokens
            self.running_tokens -= request.held_tokens
        if not generating:
            self.running_tokens = 0.0
        return ended

    def _start_next(self) -> None:
        """Starts to compute the first waiting prompt, if a row and KV blocks are free."""
        if self._prefilling is not None or not self.waiting or len(self._generating) >= self.times.max_sequences:
            return
        first = self.waiting[0].request
        needed = first.prompt_tokens + first.output_tokens
        if self._generating and self._reserved + needed > self.times.kv_tokens:
            return
        self._prefilling = self.waiting.popleft()
        self._reserved += needed
        self._left = max(1.0, self._prefilling.work)
