"""The data parallel load balancer: it sends a request to the replica where it costs least, counted in tokens.

    cost of a replica = its waiting prompt tokens
                        + a share of the output tokens expected of its sequences
                        + a share of the tokens in its KV cache that requests use
                        + the tokens of this prompt that are not in its prefix cache
                        + the tokens that do not fit into its free KV blocks            (see `routing_cost`)

Replicas report what their prefix caches hold (`CacheChanges`), in chunks of the whole prompt. A prompt that was sent
and is not computed yet is in no report. So prompts count as cached where they were sent, until their request ends; then
only the reports count. Prompts of other front ends, which the coordinator passes on, count for some seconds. A replica
that has reported nothing is estimated from the prompts that were sent to it, as many as its KV cache holds.

What other front ends have sent in the last moments is in no report either. Each front end knows how much of its own is
not, and takes as much for each of the others: it chooses among the replicas which that would fill up (`choose_spread`).
So several front ends with the same reports do not send their requests to the same replica.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mvllm.kv_events.prefix_index import (
    PrefixIndex,
    RecentPrefixIndex,
    ids_with_items,
    prefix_keys,
    root_key,
    sharing_keys,
)
from mvllm.kv_events.routing_cost import (
    EXPECTED_OUTPUT_TOKENS,
    OUTPUT_TOKEN_WEIGHT,
    choose_spread,
    routing_cost,
)
from mvllm.messages.kv_events import CacheChanges
from mvllm.messages.multimodal import ItemSpan

_MAX_CHUNKS = 1 << 16  # estimated per replica: about 12 MB
_CHUNK = 64
_PASSED_ON_SECONDS = 10.0
"""How long a prompt of another front end counts as sent: by then it is computed, and reported, or has ended."""


class _SentPrompt:
    """A request of this front end: its replica and the keys that count as cached there because of it."""

    __slots__ = ("keys", "num_output_tokens", "num_sequences", "replica")

    def __init__(self, replica: int, keys: list[int], num_output_tokens: int, num_sequences: int) -> None:
        self.replica = replica
        self.keys = keys
        self.num_output_tokens = num_output_tokens  # of each sequence
        self.num_sequences = num_sequences  # unfinished


class DPLoadBalancer:
    """Tracks the load and the prefix cache of each replica.

    Args:
        num_replicas: The number of replicas.
        chunk: Tokens per chunk, as the replicas report them.
        clock: Returns the time in seconds.
        draw: Returns a random number in [0, 1).

    Attributes:
        loads: Unfinished sequences of this front end, by replica.
        loads_elsewhere: Unfinished sequences of other front ends as last reported, by replica.
        num_other_front_ends: Front ends that send requests to the same replicas.
        records_new_prefixes: Whether to collect keys for `pop_new_prefixes`; needed with other front ends only.
    """

    def __init__(
        self,
        num_replicas: int,
        chunk: int = _CHUNK,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.num_other_front_ends = 0
        self._draw = draw
        self.loads = [0] * num_replicas
        self.loads_elsewhere = [0] * num_replicas
        self.records_new_prefixes = False
        self._chunk = chunk
        self._clock = clock
        self._num_cache_tokens = 0  # of one replica's KV cache; 0 if not known
        self._is_caching = True
        self._reported: PrefixIndex[int] = PrefixIndex()
        self._sent: RecentPrefixIndex[int] = RecentPrefixIndex(_MAX_CHUNKS)
        for replica in range(num_replicas):
            self._reported.add_replica(replica)
            self._sent.add_replica(replica)
        self._has_reported = [False] * num_replicas
        self._new_prefixes: list[dict[int, None]] = [{} for _ in range(num_replicas)]
        self._passed_on: deque[tuple[float, int, Sequence[int]]] = deque()  # (when it ends, replica, keys)
        self._prompts: dict[str, _SentPrompt] = {}  # by request id of each sequence
        self._output_tokens = [0] * num_replicas  # expected of this front end's sequences
        self._round_robin_start = 0
        self._num_waiting_tokens = [0] * num_replicas  # as last reported
        self._num_used_tokens = [0] * num_replicas  # tokens in KV blocks that requests use, as last reported
        self._num_sent = [0] * num_replicas  # sequences
        # Prompt tokens that no report can contain yet: (number of sequences sent up to them, tokens).
        self._unreported: list[deque[tuple[int, int]]] = [deque() for _ in range(num_replicas)]
        self._num_unreported = [0] * num_replicas  # tokens

    def set_cache_size(self, chunk: int, num_tokens: int) -> None:
        """Sets the size of a replica's KV cache.

        Args:
            chunk: Tokens per chunk, as the replicas report them.
            num_tokens: Tokens that fit; 0 without prefix caching.
        """
        self._chunk, self._num_cache_tokens = chunk, num_tokens
        self._is_caching = num_tokens > 0
        self._sent.max_chunks = min(_MAX_CHUNKS, num_tokens // chunk)

    def choose(
        self,
        prompt: Sequence[int],
        salt: str | None,
        num_sequences: int,
        adapter_keys: Sequence[tuple[str, str]] = (),
        *,
        position_key: int = 0,
        items: Sequence[ItemSpan] = (),
        num_output_tokens: int = EXPECTED_OUTPUT_TOKENS,
        request_ids: Sequence[str] = (),
    ) -> int:
        """Chooses the replica for a request, and counts the request as sent to it.

        Args:
            prompt: Its token ids.
            salt, adapter_keys, position_key: Prompts share cached prefixes only if all are equal, see `sharing_keys`.
            num_sequences: Sequences of the request.
            items: Spans of its images, audio and embeddings.
            num_output_tokens: Output tokens expected of each sequence.
            request_ids: The ids of its sequences, for `finish_sequence`.
        """
        keys: list[int] = []
        if self._is_caching:
            self._forget_passed_on()
            keys = self._prefix_keys(prompt, salt, adapter_keys, position_key, items)
        found = self._reported.match(keys, self._sent)
        count = len(self.loads)
        self._round_robin_start = (self._round_robin_start + 1) % count  # among equals, each in turn
        length = len(prompt)
        costs = [self._cost(replica, length - found.get(replica, 0) * self._chunk) for replica in range(count)]
        if self.num_other_front_ends:
            uncached = length - max(found.values(), default=0) * self._chunk
            best = choose_spread(costs, self._unseen(uncached, num_sequences * num_output_tokens), self._draw)
        else:
            best = min(range(count), key=lambda r: (costs[r], (r - self._round_robin_start) % count))
        self._count_as_sent(best, length - found.get(best, 0) * self._chunk, num_sequences, num_output_tokens)
        sent = keys
        if self._has_reported[best]:
            sent = [key for key in keys if not self._reported.has(best, key)]
        self._sent.store(best, sent)
        prompt_sent = _SentPrompt(best, sent, num_output_tokens, num_sequences)
        self._prompts.update(dict.fromkeys(request_ids, prompt_sent))
        if self.records_new_prefixes:
            self._new_prefixes[best].update(dict.fromkeys(keys[found.get(best, 0) :]))
        return best

    def finish_sequence(self, replica: int, request_id: str | None = None) -> None:
        """Removes a finished or aborted sequence from a replica's load.

        Args:
            request_id: One of the `request_ids` that `choose` was given.
        """
        self.loads[replica] -= 1
        prompt = None if request_id is None else self._prompts.pop(request_id, None)
        self._output_tokens[replica] -= EXPECTED_OUTPUT_TOKENS if prompt is None else prompt.num_output_tokens
        if not self.loads[replica]:
            self._unreported[replica].clear()
            self._num_unreported[replica] = 0
            self._output_tokens[replica] = 0
        if prompt is not None:
            prompt.num_sequences -= 1
            if not prompt.num_sequences and self._has_reported[replica]:
                self._sent.remove(replica, prompt.keys)

    def update_cache(self, replica: int, changes: CacheChanges) -> None:
        """Records how a replica's prefix cache has changed."""
        self._has_reported[replica] = True
        if changes.cleared:
            self._reported.clear(replica)
            self._sent.clear(replica)
        self._reported.remove(replica, changes.removed)
        self._reported.store(replica, changes.stored)

    def record_prefixes(self, replica: int, keys: Sequence[int]) -> None:
        """Records that another front end has sent a prompt with these keys to a replica."""
        if self._is_caching:
            if self._has_reported[replica]:
                self._passed_on.append((self._clock() + _PASSED_ON_SECONDS, replica, keys))
            self._sent.store(replica, keys)

    def clear_prefixes(self) -> None:
        """Forgets all prefixes, when the replicas reset their prefix caches."""
        for replica in range(len(self.loads)):
            self._reported.clear(replica)
            self._sent.clear(replica)

    def update_load(
        self, replica: int, num_waiting_tokens: int, num_acknowledged: int, kv_cache_usage: float = 0.0
    ) -> None:
        """Records a replica's report.

        Args:
            num_waiting_tokens: Prompt tokens of all front ends that it has not computed yet.
            num_acknowledged: How many of this front end's sequences it had received by then.
            kv_cache_usage: Fraction of its KV blocks that requests use.
        """
        self._num_waiting_tokens[replica] = num_waiting_tokens
        self._num_used_tokens[replica] = round(kv_cache_usage * self._num_cache_tokens)
        unreported = self._unreported[replica]
        while unreported and unreported[0][0] <= num_acknowledged:
            self._num_unreported[replica] -= unreported.popleft()[1]

    def pop_new_prefixes(self) -> Iterable[tuple[int, list[int]]]:
        """The keys first sent to each replica since the last call."""
        for replica, keys in enumerate(self._new_prefixes):
            if keys:
                self._new_prefixes[replica] = {}
                yield replica, list(keys)

    def num_cached_tokens(self, replica: int, prompt: Sequence[int], salt: str | None = None) -> int:
        """Leading tokens of a prompt that count as cached on a replica."""
        found = self._reported.match(self._prefix_keys(prompt, salt), self._sent)
        return found.get(replica, 0) * self._chunk

    def _cost(self, replica: int, uncached: int) -> float:
        waiting = self._num_waiting_tokens[replica] + self._num_unreported[replica]
        output = self._output_tokens[replica] + EXPECTED_OUTPUT_TOKENS * self.loads_elsewhere[replica]
        used = self._num_used_tokens[replica]
        free = self._num_cache_tokens - used if self._num_cache_tokens else None
        return routing_cost(waiting, output, used, uncached, free)

    def _unseen(self, uncached: int, output: int) -> float:
        """Cost of what other front ends have sent and no report contains: each as much as this one, with a request.

        Args:
            uncached, output: Tokens of the request.
        """
        prompts = uncached + sum(self._num_unreported)
        outputs = output + EXPECTED_OUTPUT_TOKENS * sum(map(len, self._unreported))
        return self.num_other_front_ends * (prompts + OUTPUT_TOKEN_WEIGHT * outputs)

    def _count_as_sent(self, replica: int, uncached: int, num_sequences: int, num_output_tokens: int) -> None:
        self.loads[replica] += num_sequences
        self._num_sent[replica] += num_sequences
        self._output_tokens[replica] += num_sequences * num_output_tokens
        tokens = max(1, uncached)
        self._unreported[replica].append((self._num_sent[replica], tokens))
        self._num_unreported[replica] += tokens

    def _forget_passed_on(self) -> None:
        now = self._clock()
        while self._passed_on and self._passed_on[0][0] <= now:
            _, replica, keys = self._passed_on.popleft()
            self._sent.remove(replica, keys)

    def _prefix_keys(
        self,
        prompt: Sequence[int],
        salt: str | None,
        adapter_keys: Sequence[tuple[str, str]] = (),
        position_key: int = 0,
        items: Sequence[ItemSpan] = (),
    ) -> list[int]:
        if items:
            prompt = ids_with_items(prompt, items)
        return prefix_keys(prompt, self._chunk, root_key(sharing_keys(salt, position_key, adapter_keys, items)))
