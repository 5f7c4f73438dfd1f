"""Which of several replicas a request goes to: where its prompt's beginning is cached, unless others have less to do.

What each replica has cached is not known here, only what it was sent: the prompts' beginnings, chunk by chunk, each
chunk named by a hash of itself and all before it. Python's own hash will do, since a wrong guess costs time and nothing
else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MOST_CHUNKS = 32  # of a prompt that are looked at
_MOST_NAMES = 16384  # that are remembered of each replica
_SPARE = 2  # sequences that a replica may have more than the least loaded one and still be chosen for its cache,
_SHARE = 1.25  # and by which factor


class ReplicaChoice:
    """Counts what replicas have to do and remembers what they were sent.

    Args:
        num_replicas: How many there are.
        chunk: Tokens per chunk.

    Attributes:
        loads: Sequences under way, by replica.
    """

    def __init__(self, num_replicas: int, chunk: int) -> None:
        self.loads = [0] * num_replicas
        self._chunk = chunk
        self._names: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._turn = 0

    def choose(self, prompt: Sequence[int], salt: str | None, num_sequences: int) -> int:
        """The replica for a request, which counts as sent to it.

        Args:
            prompt: Its token ids.
            salt: Only prompts of the same salt share anything.
            num_sequences: Sequences of the request.
        """
        names = self._chunk_names(prompt, salt)
        best = self._least_loaded()
        limit = self.loads[best] * _SHARE + _SPARE
        longest = self._num_known(best, names)
        for replica, load in enumerate(self.loads):
            if load <= limit and (known := self._num_known(replica, names)) > longest:
                best, longest = replica, known
        self.loads[best] += num_sequences
        self._remember(best, names)
        return best

    def end(self, replica: int) -> None:
        """A sequence of a replica has ended."""
        self.loads[replica] -= 1

    def _least_loaded(self) -> int:
        """The one with the least to do; among equals, each in turn."""
        count = len(self.loads)
        self._turn = (self._turn + 1) % count
        return min(range(count), key=lambda replica: (self.loads[replica], (replica - self._turn) % count))

    def _chunk_names(self, prompt: Sequence[int], salt: str | None) -> list[int]:
        names: list[int] = []
        name = hash(salt)
        for end in range(self._chunk, min(len(prompt), _MOST_CHUNKS * self._chunk) + 1, self._chunk):
            name = hash((name, *prompt[end - self._chunk : end]))
            names.append(name)
        return names

    def _num_known(self, replica: int, names: Sequence[int]) -> int:
        known = self._names[replica]
        for count, name in enumerate(names):
            if name not in known:
                return count
        return len(names)

    def _remember(self, replica: int, names: Sequence[int]) -> None:
        known = self._names[replica]
        for name in reversed(names):  # so that a prompt's end is forgotten before its beginning
            known[name] = None
            known.move_to_end(name)
        while len(known) > _MOST_NAMES:
            known.popitem(last=False)
