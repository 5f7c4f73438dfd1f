"""Chooses a replica for each request: the one where it costs least, see `routing_cost`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

from mvllm.extension_api.kv_events import (
    EXPECTED_OUTPUT_TOKENS,
    PrefixIndex,
    RecentPrefixIndex,
    Replica,
    prefix_keys,
    routing_cost,
)

CHUNK = 64
"""Default tokens per chunk of a prefix."""


@dataclass
class ReplicaLoad:
    """The load that a replica reports; of all its clients together.

    Attributes:
        waiting_tokens: Prompt tokens that it has not computed yet.
        running_tokens: Tokens in the KV cache of its running sequences.
        free_tokens: Tokens that fit into KV blocks that no request uses; None if that is not known.
    """

    waiting_tokens: int = 0
    running_tokens: int = 0
    free_tokens: int | None = None


@dataclass
class _Sent:
    """What this router has sent to a replica and what has not ended: tokens."""

    waiting: int = 0
    running: int = 0
    output: int = 0


@dataclass
class RoutedRequest(Generic[Replica]):
    """A request that was sent to a replica.

    Attributes:
        replica: The replica.
        num_tokens: Tokens of its prompt.
        num_cached_tokens: Leading tokens that were expected in the replica's cache.
        num_output_tokens: Output tokens expected of it.
        new_keys: Keys of the chunks behind the cached ones.
        sent: The replica's counters of what was sent to it.
        is_computed: Its prompt is computed, see `PrefixRouter.prompt_computed`.
        is_finished: It has ended.
    """

    replica: Replica
    num_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    new_keys: list[int]
    sent: _Sent
    is_computed: bool = False
    is_finished: bool = False


class PrefixRouter(Generic[Replica]):
    """Routes requests to replicas that may come and go. Not thread-safe.

    What replicas have cached is read from their events where they publish them (`index`, fed by `KVEventSubscriber`),
    and otherwise estimated from what was sent to them.

    Args:
        chunk: Tokens per chunk of a prefix; with events, a multiple of the block size.
        max_chunks: Estimated chunks per replica.

    Attributes:
        index: What the replicas that publish events have cached. Call `store`, `remove` and `clear` as they say.
    """

    def __init__(self, *, chunk: int = CHUNK, max_chunks: int = 1 << 16) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, not {chunk}.")
        self.chunk = chunk
        self.index: PrefixIndex[Replica] = PrefixIndex()
        self._estimate: RecentPrefixIndex[Replica] = RecentPrefixIndex(max_chunks)
        self._sent: dict[Replica, _Sent] = {}
        self._reports: dict[Replica, ReplicaLoad] = {}
        self._with_events: set[Replica] = set()
        self._turn = 0

    @property
    def replicas(self) -> list[Replica]:
        """All replicas."""
        return list(self._sent)

    def add_replica(self, replica: Replica, *, has_events: bool = False) -> None:
        """Adds a replica, with an empty cache. One that is known is not changed.

        Args:
            has_events: Its cache is in `index`. Then what was sent to it counts only until the prompt is computed.
        """
        if replica not in self._sent:
            self.index.add_replica(replica)
            self._estimate.add_replica(replica)
            self._sent[replica] = _Sent()
            self._reports[replica] = ReplicaLoad()
            if has_events:
                self._with_events.add(replica)

    def remove_replica(self, replica: Replica) -> None:
        """Forgets a replica. Unknown ones are ignored; so are its requests that end later."""
        if replica in self._sent:
            self.index.remove_replica(replica)
            self._estimate.remove_replica(replica)
            del self._sent[replica], self._reports[replica]
            self._with_events.discard(replica)

    def choose(
        self,
        token_ids: Sequence[int],
        *,
        root: int = 0,
        num_output_tokens: int = EXPECTED_OUTPUT_TOKENS,
        among: Collection[Replica] | None = None,
    ) -> RoutedRequest[Replica]:
        """Chooses the replica for a request, and counts the request as sent to it.

        Args:
            token_ids: Its prompt; or any other integers, such as the bytes of a text.
            root: Prompts share cached prefixes only if it is equal, see `root_key`.
            num_output_tokens: Output tokens expected of it.
            among: The replicas that may be chosen; None for all.

        Raises:
            LookupError: There is no replica.
        """
        names = [each for each in self._sent if among is None or each in among]
        if not names:
            raise LookupError("No replica is there to take the request. Add one, or retry later.")
        keys = prefix_keys(token_ids, self.chunk, root)
        found = self.index.match(keys, self._estimate)
        self._turn = (self._turn + 1) % len(names)  # among equals, each in turn
        length, chunk = len(token_ids), self.chunk
        costs = [self._cost(each, length - found.get(each, 0) * chunk) for each in names]
        count = len(names)
        chosen = min(range(count), key=lambda i: (costs[i], (i - self._turn) % count))
        replica = names[chosen]
        num_cached = found.get(replica, 0)
        sent = self._sent[replica]
        routed = RoutedRequest(replica, length, num_cached * chunk, num_output_tokens, keys[num_cached:], sent)
        sent.waiting += length - routed.num_cached_tokens
        sent.output += num_output_tokens
        self._estimate.store(replica, routed.new_keys if replica in self._with_events else keys)
        return routed

    def prompt_computed(self, routed: RoutedRequest[Replica]) -> None:
        """The request's first output has arrived. Idempotent."""
        sent = routed.sent
        if routed.is_computed or routed.is_finished or self._sent.get(routed.replica) is not sent:
            return
        routed.is_computed = True
        sent.waiting -= routed.num_tokens - routed.num_cached_tokens
        sent.running += routed.num_tokens
        self._drop_estimate(routed)

    def finish(self, routed: RoutedRequest[Replica]) -> None:
        """The request has ended, in any way. Idempotent."""
        sent = routed.sent
        if routed.is_finished or self._sent.get(routed.replica) is not sent:
            return
        routed.is_finished = True
        if routed.is_computed:
            sent.running -= routed.num_tokens
        else:
            sent.waiting -= routed.num_tokens - routed.num_cached_tokens
            self._drop_estimate(routed)
        sent.output -= routed.num_output_tokens

    def report(self, replica: Replica, load: ReplicaLoad) -> None:
        """Records the load that a replica reports. Unknown replicas are ignored."""
        if replica in self._reports:
            self._reports[replica] = load

    def cost(self, replica: Replica) -> float:
        """The load of a replica in tokens: what a request of no tokens would cost there."""
        return self._cost(replica, 0)

    def _cost(self, replica: Replica, uncached: int) -> float:
        sent, report = self._sent[replica], self._reports[replica]
        # A report contains what was sent some time ago, also by others; what was sent includes the newest.
        waiting, running = max(sent.waiting, report.waiting_tokens), max(sent.running, report.running_tokens)
        return routing_cost(waiting, sent.output, running, uncached, report.free_tokens)

    def _drop_estimate(self, routed: RoutedRequest[Replica]) -> None:
        if routed.replica in self._with_events:  # its events say what is cached
            self._estimate.remove(routed.replica, routed.new_keys)
