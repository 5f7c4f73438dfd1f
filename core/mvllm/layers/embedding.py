"""Token and position embeddings, and the head that turns hidden states into logits.

Tensor parallelism cuts the vocabulary into bands of ceil(vocab_size / ranks) rows; the last ranks may hold fewer real
rows, the rest of their band is zero:

    vocab_size = 10, 4 ranks    rank 0: 0 1 2 | rank 1: 3 4 5 | rank 2: 6 7 8 | rank 3: 9 · ·
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.weight_target import WeightTarget


class Embedding(nn.Module):
    """A table that every rank holds whole.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        num_embeddings, embedding_dim: Shape of the table.
    """

    def __init__(self, ctx: BuildContext, name: str, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.name = name
        self.weight = ctx.parameter(num_embeddings, embedding_dim)
        self._lookup = ctx.op("embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim).function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, embedding_dim]."""
        return self._lookup(ids, self.weight)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and what this rank takes of them."""
        everything = tuple(slice(0, size) for size in self.weight.shape)
        yield f"{self.name}.weight", WeightTarget(self.weight, tuple(self.weight.shape), everything, everything)


class VocabBand(nn.Module):
    """This rank's band of a [vocab_size, hidden_size] table.

    Attributes:
        weight: [band, hidden_size], or what an op provider's `prepare` made of it.
        first: The token id of its first row.
    """

    weight: Any

    def __init__(
        self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.band = -(-vocab_size // ctx.tp.world_size)
        self.first = self.band * ctx.tp.rank_in_group
        self.weight = ctx.parameter(self.band, hidden_size) if weight is None else weight
        self._tp = ctx.tp

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and what this rank takes of them."""
        first = min(self.first, self.vocab_size)
        stop = min(self.first + self.band, self.vocab_size)
        columns = slice(0, self.hidden_size)
        yield (
            f"{self.name}.weight",
            WeightTarget(
                self.weight,
                (self.vocab_size, self.hidden_size),
                (slice(first, stop), columns),
                (slice(0, stop - first), columns),
            ),
        )


class VocabEmbedding(VocabBand):
    """Token embedding, cut along the vocabulary."""

    def __init__(self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, name, vocab_size, hidden_size)
        self._lookup = ctx.op("embedding", num_embeddings=self.band, embedding_dim=hidden_size).function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden_size], the same on every rank."""
        if self._tp.world_size == 1:
            return self._lookup(ids, self.weight)
        return self._tp.all_reduce(self._lookup(ids, self.weight, self.first))


class LMHead(VocabBand):
    """Hidden states to logits.

    Args:
        ctx: Build context.
        name: The checkpoint module, of the token embedding where the head is tied to it.
        vocab_size, hidden_size: Shape of the whole table.
        tied_to: The token embedding whose weight is used, where this rank has it and the head is tied.
    """

    def __init__(
        self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__(ctx, name, vocab_size, hidden_size, weight=None if tied_to is None else tied_to.weight)
        self._tied = tied_to is not None
        self._op = ctx.op("linear", in_features=hidden_size, out_features=self.band, bias=False)
        self._linear = self._op.function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, vocab_size], the same on every rank."""
        logits = self._tp.all_gather(self._linear(hidden, self.weight, None), dim=-1)
        return logits[:, : self.vocab_size]

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Nothing where the embedding's own weight is used."""
        return iter(()) if self._tied else super().weight_targets()

    def prepare_weights(self) -> None:
        """Turns the loaded weight into the form that the op provider wants; a tied embedding keeps its own."""
        if self._op.prepare is not None:
            prepared = self._op.prepare(self.weight.data)
            del self.weight
            self.weight = prepared
