"""Which of several replicas a request goes to: where its prompt's beginning is cached, unless others have less to do.

What each replica has cached is not known here, only what it was sent: the prompts' beginnings, chunk by chunk, each
chunk named by a hash of itself and all before it. Python's own hash of numbers will do, since a wrong guess costs time
and nothing else. It is the same in every process, so that front ends can tell each other what they have sent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_MOST_CHUNKS = 32  # of a prompt that are looked at
_MOST_NAMES = 16384  # that are remembered of each replica
_SPARE = 2  # sequences that a replica may have more than the least loaded one and still be chosen for its cache,
_SHARE = 1.25  # and by which factor


class ReplicaChoice:
    """Counts what replicas have to do and remembers what they were sent.

    Args:
        num_replicas: How many there are.

    Attributes:
        chunk: Tokens per chunk.
        loads: Sequences under way, by replica.
        elsewhere: Those of other front ends, as last told.
        is_told: Whether `take_sent` is called; without other front ends, nobody wants to know.
    """

    def __init__(self, num_replicas: int, chunk: int = 64) -> None:
        self.loads = [0] * num_replicas
        self.elsewhere = [0] * num_replicas
        self.chunk = chunk
        self.is_told = False
        self._names: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._sent: list[dict[int, None]] = [{} for _ in range(num_replicas)]
        self._turn = 0

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int) -> int:
        """The replica for a request, which counts as sent to it.

        Args:
            prompt: Its token ids.
            salt: Only prompts of the same salt share anything.
            num_sequences: Sequences of the request.
        """
        names = self._chunk_names(prompt, salt)
        loads = [own + others for own, others in zip(self.loads, self.elsewhere)]
        best = self._least_loaded(loads)
        limit = loads[best] * _SHARE + _SPARE
        longest = self._num_known(best, names)
        for replica, load in enumerate(loads):
            if load <= limit and (known := self._num_known(replica, names)) > longest:
                best, longest = replica, known
        self.loads[best] += num_sequences
        if self.is_told:
            self._sent[best].update(dict.fromkeys(names[self._num_known(best, names) :]))
        self.learn(best, names)
        return best

    def learn(self, replica: int, names: Sequence[int]) -> None:
        """A replica was sent a prompt whose chunks have these names, from the first on."""
        known = self._names[replica]
        for name in reversed(names):  # so that a prompt's end is forgotten before its beginning
            known[name] = None
            known.move_to_end(name)
        while len(known) > _MOST_NAMES:
            known.popitem(last=False)

    def take_sent(self) -> Iterable[tuple[int, list[int]]]:
        """What was new to each replica in the requests since the last call."""
        for replica, names in enumerate(self._sent):
            if names:
                self._sent[replica] = {}
                yield replica, list(names)

    def end(self, replica: int) -> None:
        """A sequence of a replica has ended."""
        self.loads[replica] -= 1

    def _least_loaded(self, loads: Sequence[int]) -> int:
        """The one with the least to do; among equals, each in turn."""
        count = len(loads)
        self._turn = (self._turn + 1) % count
        return min(range(count), key=lambda replica: (loads[replica], (replica - self._turn) % count))

    def _chunk_names(self, prompt: Sequence[int], salt: str | None) -> list[int]:
        names: list[int] = []
        name = 0 if salt is None else _salt_name(salt)
        for end in range(self.chunk, min(len(prompt), _MOST_CHUNKS * self.chunk) + 1, self.chunk):
            name = hash((name, *prompt[end - self.chunk : end]))
            names.append(name)
        return names

    def _num_known(self, replica: int, names: Sequence[int]) -> int:
        known = self._names[replica]
        for count, name in enumerate(names):
            if name not in known:
                return count
        return len(names)


def _salt_name(salt: str) -> int:
    """A number for a salt; texts have other hashes in every process."""
    return int.from_bytes(hashlib.sha256(salt.encode(errors="surrogatepass")).digest()[:7])
