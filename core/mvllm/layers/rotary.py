"""Rotary position embedding: a precomputed table of cosines and sines, and the row of the table for each token.

With most scalings a token's row is its position. Two scalings depend on the sequence length when a token's key is
computed, and cached keys keep the rotation with which they were stored:

    dynamic    tokens beyond the original context increase the base as the sequence grows
    longrope   sequences beyond the original context use other frequencies

The length for a token at position p of a request with an n-token prompt is max(p + 1, n), as when the whole prompt is
computed at once and then token by token. It does not depend on chunked prefill or on recomputation after a preemption.
If n is within the original context, or p + 1 is not less than n, the length is a function of p, and the table suffices;
`prompt_lens` is needed only for tokens of longer prompts before the last one.

Keys of prompts beyond the original context depend on n as well as on the tokens, so a prefix cache may share their
blocks only between requests of equal n (dynamic), or among the long ones (longrope): see `prompt_cache_key`.

Multimodal models may have three positions for each token: temporal, height and width (M-RoPE, arXiv:2409.12191). Each
frequency belongs to one of them. The three are equal outside of images and videos, where a token needs one row of the
table. Inside, a row is made of three rows of the table:

    frequencies                      0  1  2  3  4  5  6  7
    sections (2, 3, 3)               t  t  h  h  h  w  w  w
    sections (2, 3, 3), interleaved  t  h  w  t  h  w  h  w
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.rope_scaling import dynamic_frequencies, frequencies, long_frequencies


@dataclass(frozen=True)
class CosSinRows:
    """The rows of cosines and sines of one step's tokens.

    Attributes:
        index: [T]: each token's row of `cos_sin`.
        cos_sin: [rows, rotary_dim] float32.
        query_scale: [T, 1, 1], compute dtype: factor on each token's queries; None for 1.
    """

    index: torch.Tensor
    cos_sin: torch.Tensor
    query_scale: torch.Tensor | None = None


class RotaryEmbedding(nn.Module):
    """Applies rotary embedding to queries and keys. All layers of a model share one instance.

    The tables are allocated by `prepare_weights`, or when they are first needed: the model is built before anybody has
    checked that `max_len` fits into memory.

    Args:
        ctx: Build context.
        rope: The checkpoint's RoPE parameters.
        max_len: Upper bound of positions.
        interleaved: The checkpoint rotates pairs of adjacent elements (GPT-J style), while the operation rotates
            elements half the rotary size apart (NeoX style). Elements of queries and keys are permuted alike, which
            does not change their products.
        query_scaling: (beta, n): the queries of position p have the factor 1 + beta · ln(1 + floor(p / n)), as in
            Llama 4; None for no factor.
        sections: Of models with three positions for each token: how many frequencies belong to the temporal position,
            the height and the width. None for one position.
        sections_interleaved: The frequencies of the three alternate, beginning with the temporal ones.

    Attributes:
        uses_prompt_lens: Whether `angles` needs `prompt_lens`.
        op: The operation.
        interleaved: As given.
        order: [head_size]: the permutation of the elements of a head; None if it is not interleaved.
        host_order: The same in host memory.
    """

    def __init__(
        self,
        ctx: BuildContext,
        rope: RopeParameters,
        max_len: int,
        *,
        interleaved: bool = False,
        query_scaling: tuple[float, int] | None = None,
        sections: tuple[int, int, int] | None = None,
        sections_interleaved: bool = False,
    ) -> None:
        super().__init__()
        if rope.rope_type == "dynamic":
            ctx.refuse_batch_invariance("The RoPE scaling 'dynamic'")
        self.rope = rope
        self.max_len = max_len
        self.uses_prompt_lens = rope.depends_on_length(max_len)
        self._device = ctx.device
        # In float32, torch's cosines depend on their place in the table and on the number of threads.
        self._in_float64 = ctx.batch_invariant
        self.op = ctx.op("rotary_embedding", head_size=rope.head_size, rotary_dim=rope.rotary_dim)
        self._rotate = self.op.function
        self.interleaved = interleaved
        self.host_order = _interleaved_order(rope) if interleaved else None
        self.order = None if self.host_order is None else self.host_order.to(ctx.device)
        # The factor of positions below n is 1.
        self._query_scaling = None if query_scaling is None or query_scaling[1] >= max_len else query_scaling
        self._dtype = ctx.dtype
        self._is_of_axis: tuple[torch.Tensor, ...] = ()
        if sections is not None:
            axes = _axis_of_each_frequency(rope, sections, interleaved=sections_interleaved)
            self._is_of_axis = tuple((axes == axis).repeat(2).to(ctx.device) for axis in (0, 1))

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables on the device."""
        width = self.rope.rotary_dim
        if self.rope.rope_type == "dynamic":
            width += self.rope.rotary_dim // 2
        elif self.uses_prompt_lens:
            width += self.rope.rotary_dim
        of_scales = 0 if self._query_scaling is None else self._dtype.itemsize
        return self.max_len * (width * torch.float32.itemsize + of_scales)

    def prepare_weights(self) -> None:
        """Allocates the tables, after the weights have been loaded."""
        self._tables  # noqa: B018  (cached)
        if self._query_scaling is not None:
            self._query_scales  # noqa: B018

    def angles(
        self,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None = None,
        rope_positions: torch.Tensor | None = None,
    ) -> CosSinRows:
        """The rows of a step's tokens, computed once for all layers.

        Args:
            positions: [T], integers.
            prompt_lens: [T], integers, as in ForwardStep; None if no token needs it.
            rope_positions: [3, T], integers below `max_len`, as in ForwardStep, for models with `sections`; None where
                the three positions of each token are its position.
        """
        if rope_positions is not None:
            return self._rows_of_axes(rope_positions)
        rows = self._rows(positions, prompt_lens)
        if self._query_scaling is None:
            return rows
        return replace(rows, query_scale=self._query_scales.index_select(0, positions).view(-1, 1, 1))

    def _rows(self, positions: torch.Tensor, prompt_lens: torch.Tensor | None) -> CosSinRows:
        table, by_length = self._tables
        if prompt_lens is None or not self.uses_prompt_lens:
            return CosSinRows(positions, table)
        if by_length is None:
            # The second part of the table, for long prompts, has the long frequencies at every position.
            return CosSinRows(positions + self.max_len * (prompt_lens > self.rope.native_len), table)
        inv_freq = by_length.index_select(0, torch.maximum(positions, prompt_lens - 1))
        rows = _cos_sin(positions.unsqueeze(-1) * inv_freq, 1.0)
        return CosSinRows(torch.arange(positions.shape[0], device=positions.device), rows)

    def _rows_of_axes(self, rope_positions: torch.Tensor) -> CosSinRows:
        """A row for each token, with the elements of each frequency from the row of its own position."""
        # torch.compile takes the tuple itself for a condition on a tensor.
        assert len(self._is_of_axis) == 2, "only models with sections have three positions for each token"
        table, _ = self._tables
        of_time = table.index_select(0, rope_positions[0])
        of_height, of_width = table.index_select(0, rope_positions[1]), table.index_select(0, rope_positions[2])
        is_time, is_height = self._is_of_axis
        rows = torch.where(is_time, of_time, torch.where(is_height, of_height, of_width))
        return CosSinRows(torch.arange(rows.shape[0], dtype=rope_positions.dtype, device=rows.device), rows)

    def forward(
        self, angles: CosSinRows, query: torch.Tensor, key: torch.Tensor, *, is_ordered: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates query [T, heads, head_size] and key [T, kv_heads, head_size]; their storage may be reused.

        Args:
            is_ordered: The elements of the heads are in the order of `order` already.
        """
        if self.order is not None and not is_ordered:
            query, key = query.index_select(-1, self.order), key.index_select(-1, self.order)
        return self._rotate(angles.index, query, key, angles.cos_sin)

    # Not buffers: casting a module's dtype must not touch the tables.
    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of each position; with the scaling `dynamic` also the frequencies of each length."""
        rope = self.rope
        by_length = (
            dynamic_frequencies(rope, torch.arange(1, self.max_len + 1)) if rope.rope_type == "dynamic" else None
        )
        table = self._build_table(by_length).to(self._device)
        return table, None if by_length is None else by_length.to(self._device)

    @cached_property
    def _query_scales(self) -> torch.Tensor:
        """[max_len], compute dtype: the factor on the queries of each position."""
        assert self._query_scaling is not None, "only models with a factor on queries read it"
        beta, length = self._query_scaling
        scales = 1 + beta * torch.log(1 + torch.floor(torch.arange(self.max_len) / length))
        return scales.to(self._dtype).to(self._device)

    def _build_table(self, by_length: torch.Tensor | None) -> torch.Tensor:
        positions = torch.arange(self.max_len).unsqueeze(-1).float()
        if by_length is not None:
            return _cos_sin(positions * by_length, 1.0)
        inv_freq, scale = frequencies(self.rope)
        table = self._rows_of(positions * inv_freq, scale)
        if not self.uses_prompt_lens:
            return table
        long_table = self._rows_of(positions * long_frequencies(self.rope)[0], scale)
        native = self.rope.native_len
        return torch.cat((table[:native], long_table[native:], long_table))

    def _rows_of(self, angles: torch.Tensor, scale: float) -> torch.Tensor:
        if not self._in_float64:
            return _cos_sin(angles, scale)
        return torch.cat((angles.double().cos().float() * scale, angles.double().sin().float() * scale), dim=-1)


def _interleaved_order(rope: RopeParameters) -> torch.Tensor:
    """Permutation of a head's elements that puts the first elements of all pairs before the second ones."""
    order = torch.arange(rope.head_size)
    order[: rope.rotary_dim] = order[: rope.rotary_dim].view(-1, 2).T.flatten()
    return order


def _axis_of_each_frequency(rope: RopeParameters, sections: tuple[int, int, int], *, interleaved: bool) -> torch.Tensor:
    """[rotary_dim / 2]: 0 for frequencies of the temporal position, 1 for those of the height, 2 for the width.

    Raises:
        ModelError: The sections do not fit the rotary dimension, or the scaling depends on the sequence's length.
    """
    count = rope.rotary_dim // 2
    if sum(sections) != count:
        raise ModelError(
            f"{rope.source}: mrope_section {list(sections)} should have a sum of {count}, half of the rotary dimension."
        )
    if rope.rope_type in ("dynamic", "longrope"):
        raise ModelError(
            f"{rope.source}: the RoPE scaling {rope.rope_type!r} is not supported with mrope_section. Use a checkpoint "
            "with another scaling."
        )
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(count, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _cos_sin(angles: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
