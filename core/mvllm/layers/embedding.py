"""Token and position embeddings, and the language-model head.

Tensor parallelism shards the vocabulary into ceil(vocab_size / ranks) rows per rank; the last ranks may hold fewer real
rows and zeros after them:

    vocab_size = 10, 4 ranks    rank 0: 0 1 2 | rank 1: 3 4 5 | rank 2: 6 7 8 | rank 3: 9 · ·
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import resolve_linear_op, unloaded_linear_op
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.quantized_matrix import Lookup, Product, QuantizedMatrix
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target
from mvllm.ops.registry import ResolvedOp


class Embedding(nn.Module):
    """An embedding table that every rank holds whole.

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
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target(f"{self.name}.weight", self.weight)


class VocabShard(nn.Module):
    """This rank's rows of a [vocab_size, hidden_size] table.

    Attributes:
        band: Number of rows on this rank, padding included.
        first: The token id of its first row.
        layout: The real rows, as parts of the checkpoint matrix.
        partitions: As in Linear.
    """

    partitions: Mapping[str, int] = {"weight": 0}

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        is_head: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.band = -(-vocab_size // (ctx.tp.world_size * ctx.num_devices)) * ctx.num_devices
        self.first = self.band * ctx.tp.rank_in_group
        first, stop = min(self.first, vocab_size), min(self.first + self.band, vocab_size)
        part = Part(name, vocab_size, slice(first, stop), slice(0, stop - first))
        self.layout = MatrixLayout(
            (part,), hidden_size, slice(0, hidden_size), self.band, is_head=is_head, tied=tied, partition=0
        )
        self._tp = ctx.tp


class VocabEmbedding(VocabShard):
    """Token embedding, sharded along the vocabulary.

    Attributes:
        weight: [band, hidden_size]; after loading the prepared weight of a tied head that shares it. None until then
            if that is quantized.
        shared_by: The tied head whose prepared weight is used; in a tuple, so that it is not a submodule.
    """

    weight: Any

    def __init__(self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__(ctx, name, vocab_size, hidden_size)
        self.weight = ctx.parameter(self.band, hidden_size)
        self.shared_by: tuple[LMHead, ...] = ()
        self._lookup = ctx.op("embedding", num_embeddings=self.band, embedding_dim=hidden_size).function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden_size], the same on every rank."""
        if self._tp.world_size == 1:
            return self._lookup(ids, self.weight)
        return self._tp.all_reduce(self._lookup(ids, self.weight, self.first))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank; none if rows are read from a quantized head."""
        return iter(()) if self.weight is None else float_targets(self.layout, self.weight)

    def share(self, head: LMHead) -> None:
        """Called while the model is built: rows are looked up in the weight of a tied head."""
        self.shared_by = (head,)
        if isinstance(head.weight, QuantizedMatrix):
            self.weight = None

    def prepare_weights(self) -> None:
        """If a tied head shares the weight, prepares the head and looks rows up in its weight."""
        for head in self.shared_by:
            self._lookup = head.adopt_tied_weight()
            del self.weight
            self.weight = head.weight


class LMHead(VocabShard):
    """The language-model head: hidden states to logits.

    Args:
        ctx: Build context.
        name: The checkpoint module; the token embedding's for a tied head.
        vocab_size, hidden_size: Shape of the whole table.
        tied: The checkpoint stores the head under the embedding's name only.
        tied_to: The token embedding of this rank whose weight a tied head uses.

    Attributes:
        weight: [band, hidden_size], or the result of an op provider's `prepare`. For a quantized head a
            QuantizedMatrix, and after loading the weight argument of its linear op.
        is_made_from_embedding: Its weight is made from that of the token embedding, which stays as it is loaded.
    """

    weight: Any

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool = False,
        tied_to: VocabEmbedding | None = None,
    ) -> None:
        super().__init__(ctx, name, vocab_size, hidden_size, is_head=True, tied=tied)
        embedding = None if tied_to is None else tied_to.weight
        self._reads_floats = embedding is None
        matrix = ctx.quantized(self.layout, embedding)
        if matrix is not None:
            self.weight = matrix
        else:
            self.weight = ctx.parameter(self.band, hidden_size) if embedding is None else embedding
        self._op: ResolvedOp | None = None
        self._lookup: Lookup | None
        if matrix is None:
            self._op = ctx.op("linear", in_features=hidden_size, out_features=self.band, bias=False)
            self._lookup = self._op.lookup
        else:
            self._lookup = matrix.lookup
        self._shares = tied_to is not None and self._lookup is not None
        self.is_made_from_embedding = tied_to is not None and not self._shares
        if tied_to is not None and self._shares:
            tied_to.share(self)
        self._linear: Product = unloaded_linear_op if self._op is None else self._op.function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, vocab_size], the same on every rank."""
        logits = self._tp.all_gather(self._linear(hidden, self.weight, None), dim=-1)
        return logits[:, : self.vocab_size]

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The targets of the head; none if it uses the embedding's weight."""
        if isinstance(self.weight, QuantizedMatrix):
            return self.weight.targets()
        return float_targets(self.layout, self.weight) if self._reads_floats else iter(())

    def prepare_weights(self) -> None:
        """Prepares the loaded weight, unless the token embedding has already done so.

        A tied embedding keeps its unprepared weight if the provider has no lookup for the prepared one.
        """
        if not self._shares:
            self._prepare()

    def adopt_tied_weight(self) -> Lookup:
        """Prepares the token embedding's weight; returns the lookup of its rows."""
        assert self._lookup is not None, "a head is adopted if its rows can be looked up"
        self._prepare()
        return self._lookup

    def _prepare(self) -> None:
        self._linear, prepared = resolve_linear_op(self.weight, self._op)
        del self.weight
        self.weight = prepared
