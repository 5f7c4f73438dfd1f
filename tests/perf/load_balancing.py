"""Simulation of data-parallel load balancing: prefix-cache hits of the replicas and their balance.

Conversations with one system prompt of 8k tokens run on four replicas, each of which can cache some of the
conversations. A replica computes prompts one after the other and generates for all its sequences at once. Run:

    python -m tests.perf.load_balancing

The last workload has prompts of 24k to 56k tokens in an own document each, and caches that hold few of them, so that
what was sent differs from what is still cached. `reported` follows the replicas' reports of their caches, as
DPLoadBalancer does with engine cores; `estimated` is the same rule without reports.

Prints, for each rule: the share of prompt tokens found in a cache, the busiest replica's work over the mean, the time
to first token (mean and 95th percentile), and the cost of a choice for a prompt of 100k tokens.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.kv_events.prefix_index import chunk_tokens, prefix_keys
from mvllm.messages.kv_events import CacheChanges

BLOCK = 16
CHUNK = chunk_tokens(BLOCK)


class Rule(Protocol):
    """Chooses a replica; is informed of finished sequences and of waiting tokens."""

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int) -> int: ...
    def finish_sequence(self, replica: int) -> None: ...
    def update_load(self, replica: int, num_waiting_tokens: int, num_acknowledged: int) -> None: ...


class Reported(DPLoadBalancer):
    """The rule with reports of the replicas' caches."""


class LeastLoaded:
    """The replica with the fewest sequences."""

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        self.turn = 0

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int) -> int:
        self.turn += 1
        count = len(self.loads)
        best = min(range(count), key=lambda replica: (self.loads[replica], (replica - self.turn) % count))
        self.loads[best] += num_sequences
        return best

    def finish_sequence(self, replica: int) -> None:
        self.loads[replica] -= 1

    def update_load(self, replica: int, num_waiting_tokens: int, num_acknowledged: int) -> None: ...


class FirstTokens(LeastLoaded):
    """The replica that was sent most of the first 2,048 tokens, if it has few more sequences than the least loaded."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self.names: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int) -> int:
        names, name = [], 0
        for end in range(64, min(len(prompt), 2048) + 1, 64):
            name = hash((name, *prompt[end - 64 : end]))
            names.append(name)
        self.turn = (self.turn + 1) % len(self.loads)
        best = min(range(len(self.loads)), key=lambda r: (self.loads[r], (r - self.turn) % len(self.loads)))
        limit, longest = self.loads[best] * 1.25 + 2, self._known(best, names)
        for replica, load in enumerate(self.loads):
            if load <= limit and (known := self._known(replica, names)) > longest:
                best, longest = replica, known
        self.loads[best] += num_sequences
        for name in reversed(names):
            self.names[best][name] = None
            self.names[best].move_to_end(name)
        while len(self.names[best]) > 16384:
            self.names[best].popitem(last=False)
        return best

    def _known(self, replica: int, names: Sequence[int]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.names[replica]), len(names))


@dataclass
class Workload:
    """Conversations over replicas. Lengths in tokens, times in seconds."""

    num_replicas: int = 4
    num_conversations: int = 160
    turns: int = 8
    system: int = 8192
    question: int = 200
    answer: int = 200
    think: float = 12.0
    cache: int = 150_000
    prefill_rate: float = 20_000.0
    step: float = 0.02
    one_prompt_for_all: bool = True
    longest_document: int = 0


@dataclass
class Replica:
    """A replica: when it finishes its prompts, and which blocks it caches."""

    num_blocks: int
    free_at: float = 0.0
    work: int = 0
    queued: list[tuple[float, int]] = field(default_factory=list)  # when each prompt is done, and its number of tokens
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    keys: dict[int, int] = field(default_factory=dict)  # of the cached blocks that end a chunk

    def num_cached(self, names: Sequence[int]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.blocks), len(names))

    def hold(self, text: Sequence[int]) -> CacheChanges:
        """Caches the blocks of a text; returns the changes of the cache as it reports them."""
        names, keys, per_chunk = block_names(text), prefix_keys(text, CHUNK), CHUNK // BLOCK
        ends = dict(zip(names[per_chunk - 1 :: per_chunk], keys))  # the last block of each chunk
        stored = [key for name, key in ends.items() if name not in self.blocks]
        self.keys.update(ends)
        for name in reversed(names):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        evicted = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.num_blocks)]
        removed = {self.keys.pop(name) for name in evicted if name in self.keys}
        return CacheChanges(stored=[key for key in stored if key not in removed], removed=list(removed))


@dataclass(frozen=True)
class Outcome:
    """Results of all requests."""

    hits: float
    imbalance: float
    mean_wait: float
    late_wait: float


def simulate(rule: Rule, load: Workload, seed: int = 0) -> Outcome:
    """Simulates all conversations."""
    rng = random.Random(seed)
    replicas = [Replica(load.cache // BLOCK) for _ in range(load.num_replicas)]
    shared = [rng.randrange(1 << 17) for _ in range(load.system)]
    own = [[rng.randrange(1 << 17) for _ in range(load.system)] for _ in range(load.num_conversations)]
    for text in own:
        text += [rng.randrange(1 << 17) for _ in range(rng.randint(load.longest_document // 3, load.longest_document))]
    texts = [list(shared) if load.one_prompt_for_all else each for each in own]
    hits = total = 0
    taken = [0] * load.num_replicas
    waits: list[float] = []
    # (time, what: 0 for an end and 1 for a question, conversation or replica, turn)
    events = [(rng.uniform(0, load.think), 1, i, 0) for i in range(load.num_conversations)]
    heapq.heapify(events)
    while events:
        now, what, index, turn = heapq.heappop(events)
        if what == 0:
            rule.finish_sequence(index)
            continue
        for number, replica in enumerate(replicas):
            replica.queued = [each for each in replica.queued if each[0] > now]
            rule.update_load(number, sum(tokens for _, tokens in replica.queued), taken[number])
        text = texts[index]
        text += [rng.randrange(1 << 17) for _ in range(load.question)]
        chosen = rule.choose(text, None, 1)
        taken[chosen] += 1
        replica, names = replicas[chosen], block_names(text)
        cached = replica.num_cached(names) * BLOCK
        hits, total = hits + cached, total + len(text)
        report(rule, chosen, replica.hold(text))
        todo = len(text) - cached
        replica.work += todo + load.answer
        replica.free_at = max(now, replica.free_at) + todo / load.prefill_rate
        replica.queued.append((replica.free_at, todo))
        waits.append(replica.free_at - now)
        ended = replica.free_at + load.answer * load.step
        text += [rng.randrange(1 << 17) for _ in range(load.answer)]
        report(rule, chosen, replica.hold(text))
        heapq.heappush(events, (ended, 0, chosen, 0))
        if turn + 1 < load.turns:
            heapq.heappush(events, (ended + rng.expovariate(1 / load.think), 1, index, turn + 1))
    work = [replica.work for replica in replicas]
    late = statistics.quantiles(waits, n=20)[-1]
    return Outcome(hits / total, max(work) / statistics.mean(work), statistics.mean(waits), late)


def report(rule: Rule, replica: int, changes: CacheChanges) -> None:
    if isinstance(rule, Reported):
        rule.update_cache(replica, changes)


def block_names(text: Sequence[int]) -> list[int]:
    names, name = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        name = hash((name, *text[end - BLOCK : end]))
        names.append(name)
    return names


def fitted(load: Workload, kind: type[DPLoadBalancer] = DPLoadBalancer) -> DPLoadBalancer:
    choice = kind(load.num_replicas)
    choice.set_cache_size(CHUNK, load.cache)
    return choice


RULES: dict[str, Callable[[Workload], Rule]] = {
    "fewest sequences": lambda load: LeastLoaded(load.num_replicas),
    "first 2,048 tokens": lambda load: FirstTokens(load.num_replicas),
    "whole prompt, estimated": fitted,
    "whole prompt, reported": lambda load: fitted(load, Reported),
}


def main() -> None:
    for title, load in (
        ("one system prompt of 8k tokens", Workload()),
        ("the same, fewer conversations than fill the caches", Workload(num_conversations=60)),
        ("the same, at twice the rate", Workload(think=4.0)),
        ("each conversation has a prompt of its own", Workload(num_conversations=40, one_prompt_for_all=False)),
        (
            "each conversation has a document of 24k to 56k tokens",
            Workload(num_conversations=16, one_prompt_for_all=False, longest_document=48_000, turns=6, think=30.0),
        ),
    ):
        print(f"{title}: {load.num_conversations} conversations, {load.num_replicas} replicas of {load.cache:,} tokens")
        for name, make in RULES.items():
            found = simulate(make(load), load)
            print(
                f"  {name:30} {100 * found.hits:5.1f} % found, busiest {found.imbalance:.2f} of the mean, "
                f"first token after {found.mean_wait * 1e3:6.0f} ms, 95 % within {found.late_wait * 1e3:6.0f} ms"
            )
    prompt = [random.randrange(1 << 17) for _ in range(100_000)]
    choice = fitted(Workload(cache=4_000_000))
    choice.choose(prompt, None, 1)
    begun = time.process_time()
    for _ in range(50):
        choice.choose(prompt, None, 1)
    print(f"A choice for 100,000 tokens takes {(time.process_time() - begun) / 50 * 1e3:.2f} ms of a processor.")


if __name__ == "__main__":
    main()
