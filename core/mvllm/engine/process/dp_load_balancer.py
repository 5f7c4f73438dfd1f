"""The data parallel load balancer: it sends a request to the replica with the lowest cost, counted in tokens.

    cost of a replica = its waiting prompt tokens + TOKENS_PER_SEQUENCE per unfinished sequence
                        + the tokens of this prompt that are not in its prefix cache

A cached prefix saves as many tokens as it has. If its replica is busier than another by more than that, the other one
computes the prefix too, and has it cached from then on. No replica starves: an idle one costs the prompt alone.

The contents of a replica's prefix cache are estimated from the prompts that were sent to it, in chunks; each chunk is
identified by a hash of itself and all chunks before it. Per replica as many chunks are kept as its KV cache holds, in
LRU order. Python's own hash of integers suffices, because a collision costs time only. It is the same in every process,
so front ends can exchange hashes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

TOKENS_PER_SEQUENCE = 512
"""The cost of an unfinished sequence, about the length of an output: a generated token costs a replica no less than a
prompt token."""

_MAX_PREFIXES = 1 << 16  # kept per replica: about 12 MB
_CHUNK = 64


class DPLoadBalancer:
    """Tracks the load and the estimated prefix cache of each replica.

    Args:
        num_replicas: The number of replicas.
        chunk: Tokens per chunk.

    Attributes:
        loads: Unfinished sequences of this front end, by replica.
        loads_elsewhere: Unfinished sequences of other front ends as last reported, by replica.
        records_new_prefixes: Whether to collect hashes for `pop_new_prefixes`; needed with other front ends only.
    """

    def __init__(self, num_replicas: int, chunk: int = _CHUNK) -> None:
        self.loads = [0] * num_replicas
        self.loads_elsewhere = [0] * num_replicas
        self.records_new_prefixes = False
        self._chunk = chunk
        self._max_prefixes = _MAX_PREFIXES
        self._prefixes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._sent: list[dict[int, None]] = [{} for _ in range(num_replicas)]
        self._round_robin_start = 0
        self._num_waiting_tokens = [0] * num_replicas  # tokens, as last reported
        self._num_sent = [0] * num_replicas  # sequences
        # Prompt tokens that no report can contain yet: (number of sequences sent up to them, tokens).
        self._unreported: list[deque[tuple[int, int]]] = [deque() for _ in range(num_replicas)]
        self._num_unreported = [0] * num_replicas  # tokens

    def set_cache_size(self, block_size: int, num_blocks: int) -> None:
        """Sets how many chunks are kept per replica: as many tokens as its KV cache holds.

        Args:
            block_size: Tokens per block.
            num_blocks: Blocks of one replica; 0 without prefix caching.
        """
        num_tokens = block_size * num_blocks
        self._chunk = max(self._chunk, block_size, -(-num_tokens // _MAX_PREFIXES))
        self._max_prefixes = num_tokens // self._chunk

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int, adapter: int = 0) -> int:
        """Chooses the replica for a request, and counts the request as sent to it.

        Args:
            prompt: Its token ids.
            salt, adapter: Prompts share cached prefixes only if both are equal.
            num_sequences: Sequences of the request.
        """
        hashes = self._prefix_hashes(prompt, salt, adapter) if self._max_prefixes else []
        cached = [self._num_cached_chunks(replica, hashes) for replica in range(len(self.loads))]
        count = len(self.loads)
        self._round_robin_start = (self._round_robin_start + 1) % count  # among equals, each in turn
        best = min(
            range(count),
            key=lambda replica: (self._cost(replica, cached[replica]), (replica - self._round_robin_start) % count),
        )
        self.loads[best] += num_sequences
        self._num_sent[best] += num_sequences
        tokens = max(1, len(prompt) - cached[best] * self._chunk)
        self._unreported[best].append((self._num_sent[best], tokens))
        self._num_unreported[best] += tokens
        if self.records_new_prefixes:
            self._sent[best].update(dict.fromkeys(hashes[cached[best] :]))
        self.record_prefixes(best, hashes)
        return best

    def record_prefixes(self, replica: int, hashes: Sequence[int]) -> None:
        """Records that a prompt with these chunk hashes, from the first chunk on, was sent to a replica."""
        cached = self._prefixes[replica]
        for hash_ in reversed(hashes):  # a prompt's last chunk is evicted before its first
            cached[hash_] = None
            cached.move_to_end(hash_)
        while len(cached) > self._max_prefixes:
            cached.popitem(last=False)

    def clear_prefixes(self) -> None:
        """Forgets all prefixes, after the replicas have reset their prefix caches."""
        for cached in self._prefixes:
            cached.clear()

    def update_load(self, replica: int, num_waiting_tokens: int, num_acknowledged: int) -> None:
        """Records a replica's report.

        Args:
            num_waiting_tokens: Prompt tokens of all front ends that it has not computed yet.
            num_acknowledged: How many of this front end's sequences it had received by then.
        """
        self._num_waiting_tokens[replica] = num_waiting_tokens
        unreported = self._unreported[replica]
        while unreported and unreported[0][0] <= num_acknowledged:
            self._num_unreported[replica] -= unreported.popleft()[1]

    def pop_new_prefixes(self) -> Iterable[tuple[int, list[int]]]:
        """The chunk hashes first sent to each replica since the last call."""
        for replica, hashes in enumerate(self._sent):
            if hashes:
                self._sent[replica] = {}
                yield replica, list(hashes)

    def finish_sequence(self, replica: int) -> None:
        """Removes a finished or aborted sequence from a replica's load."""
        self.loads[replica] -= 1
        if not self.loads[replica]:
            self._unreported[replica].clear()
            self._num_unreported[replica] = 0

    def _cost(self, replica: int, num_known: int) -> int:
        """The cost without the length of the prompt, which is the same for all replicas."""
        sequences = self.loads[replica] + self.loads_elsewhere[replica]
        waiting = self._num_waiting_tokens[replica] + self._num_unreported[replica]
        return waiting + TOKENS_PER_SEQUENCE * sequences - num_known * self._chunk

    def _prefix_hashes(self, prompt: Sequence[int], salt: str | None, adapter: int = 0) -> list[int]:
        hashes: list[int] = []
        hash_ = adapter if salt is None else hash((_salt_hash(salt), adapter))
        chunk, ids = self._chunk, tuple(prompt)
        for end in range(chunk, len(ids) + 1, chunk):
            hash_ = hash((hash_, ids[end - chunk : end]))
            hashes.append(hash_)
        return hashes

    def _num_cached_chunks(self, replica: int, hashes: Sequence[int]) -> int:
        """The number of leading chunks that were sent to a replica before."""
        cached = self._prefixes[replica]
        for count, hash_ in enumerate(hashes):
            if hash_ not in cached:
                return count
        return len(hashes)


def _salt_hash(salt: str) -> int:
    """An integer for a salt; Python's hash of a string differs between processes."""
    return int.from_bytes(hashlib.sha256(salt.encode(errors="surrogatepass")).digest()[:7])
