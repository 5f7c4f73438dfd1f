"""Which of several replicas a request goes to: the one where it costs least, counted in tokens.

    cost of a replica = prompt tokens that wait there + TOKENS_PER_SEQUENCE for each sequence it has
                        + the tokens of this prompt that it does not have in its cache

So a cached prefix is worth as many tokens as it has, and no more: where the replica that has it is busier than another
by that much, the other computes the prefix, too, and has it from then on. No replica starves, since one with nothing to
do costs the prompt alone.

What a replica has cached is not known here, only what it was sent: prompts, chunk by chunk, each chunk named by a hash
of itself and all before it. Of each replica as much is remembered as its KV cache holds, the least recently sent is
forgotten first. Python's own hash of numbers will do, since a wrong guess costs time and nothing else. It is the same
in every process, so that front ends can tell each other what they have sent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

TOKENS_PER_SEQUENCE = 512
"""What a sequence counts from its coming to its end. About the length of an answer: a token that is generated costs a
replica no less than one of a prompt."""

_MAX_PREFIXES = 1 << 16  # that are remembered of each replica: some 12 MB
_CHUNK = 64


class DPLoadBalancer:
    """Counts what replicas have to do and remembers what they were sent.

    Args:
        num_replicas: How many there are.
        chunk: Tokens per chunk.

    Attributes:
        loads: Sequences under way, by replica.
        elsewhere: Those of other front ends, as last told.
        records_new_prefixes: Whether `pop_new_prefixes` is called; without other front ends, nobody wants to know.
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
        # Tokens that no report can have counted yet, each with the number of sequences sent up to it.
        self._unreported: list[deque[tuple[int, int]]] = [deque() for _ in range(num_replicas)]
        self._num_unreported = [0] * num_replicas  # tokens

    def set_cache_size(self, block_size: int, num_blocks: int) -> None:
        """Remembers as much of each replica as its KV cache holds, in chunks that are large enough for that.

        Args:
            num_blocks: 0 where nothing is kept for other requests.
        """
        num_tokens = block_size * num_blocks
        self._chunk = max(self._chunk, block_size, -(-num_tokens // _MAX_PREFIXES))
        self._max_prefixes = num_tokens // self._chunk

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int, adapter: int = 0) -> int:
        """The replica for a request, which counts as sent to it.

        Args:
            prompt: Its token ids.
            salt, adapter: Only prompts for which both are equal share anything.
            num_sequences: Sequences of the request.
        """
        names = self._prefix_hashes(prompt, salt, adapter) if self._max_prefixes else []
        known = [self._num_cached_chunks(replica, names) for replica in range(len(self.loads))]
        count = len(self.loads)
        self._round_robin_start = (self._round_robin_start + 1) % count  # among equals, each in turn
        best = min(
            range(count),
            key=lambda replica: (self._cost(replica, known[replica]), (replica - self._round_robin_start) % count),
        )
        self.loads[best] += num_sequences
        self._num_sent[best] += num_sequences
        tokens = max(1, len(prompt) - known[best] * self._chunk)
        self._unreported[best].append((self._num_sent[best], tokens))
        self._num_unreported[best] += tokens
        if self.records_new_prefixes:
            self._sent[best].update(dict.fromkeys(names[known[best] :]))
        self.record_prefixes(best, names)
        return best

    def record_prefixes(self, replica: int, names: Sequence[int]) -> None:
        """A replica was sent a prompt whose chunks have these names, from the first on."""
        known = self._prefixes[replica]
        for name in reversed(names):  # so that a prompt's end is forgotten before its beginning
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._max_prefixes:
            known.popitem(last=False)

    def clear_prefixes(self) -> None:
        """The caches of all replicas have been emptied."""
        for known in self._prefixes:
            known.clear()

    def update_load(self, replica: int, num_waiting_tokens: int, num_acknowledged: int) -> None:
        """What a replica has said of itself.

        Args:
            num_waiting_tokens: Of all front ends' prompts that it has not computed yet.
            num_acknowledged: How many of the sequences that were sent from here it had taken by then.
        """
        self._num_waiting_tokens[replica] = num_waiting_tokens
        unreported = self._unreported[replica]
        while unreported and unreported[0][0] <= num_acknowledged:
            self._num_unreported[replica] -= unreported.popleft()[1]

    def pop_new_prefixes(self) -> Iterable[tuple[int, list[int]]]:
        """What was new to each replica in the requests since the last call."""
        for replica, names in enumerate(self._sent):
            if names:
                self._sent[replica] = {}
                yield replica, list(names)

    def finish_sequence(self, replica: int) -> None:
        """A sequence of a replica has ended."""
        self.loads[replica] -= 1
        if not self.loads[replica]:
            self._unreported[replica].clear()
            self._num_unreported[replica] = 0

    def _cost(self, replica: int, num_known: int) -> int:
        """Up to what is the same for all replicas: the length of the prompt."""
        sequences = self.loads[replica] + self.loads_elsewhere[replica]
        waiting = self._num_waiting_tokens[replica] + self._num_unreported[replica]
        return waiting + TOKENS_PER_SEQUENCE * sequences - num_known * self._chunk

    def _prefix_hashes(self, prompt: Sequence[int], salt: str | None, adapter: int = 0) -> list[int]:
        names: list[int] = []
        name = adapter if salt is None else hash((_salt_hash(salt), adapter))
        chunk, ids = self._chunk, tuple(prompt)
        for end in range(chunk, len(ids) + 1, chunk):
            name = hash((name, ids[end - chunk : end]))
            names.append(name)
        return names

    def _num_cached_chunks(self, replica: int, names: Sequence[int]) -> int:
        """Chunks from the first on that a replica was sent."""
        known = self._prefixes[replica]
        for count, name in enumerate(names):
            if name not in known:
                return count
        return len(names)


def _salt_hash(salt: str) -> int:
    """A number for a salt; texts have other hashes in every process."""
    return int.from_bytes(hashlib.sha256(salt.encode(errors="surrogatepass")).digest()[:7])
