"""FlatLogprobs: the log-probabilities of many positions in a few lists instead of one dict a position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from mvllm.engine.frontend.outputs import Logprob, PositionLogprobMap


@dataclass
class FlatLogprobs(Sequence[PositionLogprobMap]):
    """Log-probabilities by position, as `SamplingParams(flat_logprobs=True)` returns them.

    It reads as the list of dicts that it replaces, except that a position without any (the first of a prompt) reads
    as an empty dict. The garbage collector sees a constant number of objects, whatever the length.

        position i    token_ids[start_indices[i] : end_indices[i]], and likewise logprobs, ranks, decoded_tokens

    Attributes:
        start_indices, end_indices: By position, the range of its entries in the other lists.
        token_ids, logprobs, ranks, decoded_tokens: By entry, see `Logprob`; the token at a position is its first.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: PositionLogprobMap | None) -> None:
        """Adds the entries of the next position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobMap: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobMap | FlatLogprobs:
        if isinstance(index, int):
            entries = range(self.start_indices[index], self.end_indices[index])
            return {
                self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in entries
            }
        found = FlatLogprobs()
        for i in range(*index.indices(len(self))):
            found.append(self[i])
        return found

    def __iter__(self) -> Iterator[PositionLogprobMap]:
        return (self[i] for i in range(len(self)))
