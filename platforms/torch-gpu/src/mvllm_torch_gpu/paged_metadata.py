"""PagedMetadata: a step's block tables and lengths on the device, for the attention kernels and for captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch

from mvllm.plugin_api import StepKind


@dataclass(frozen=True)
class PagedMetadata:
    """Metadata of one step for all layers of a KV cache group.

    Attributes:
        query_start_loc, seq_lens, block_table, slot_mapping: Those of BatchLayout, int32 on the device.
        max_query_len, max_seq_len: As in BatchLayout, or larger.
        block_size: Tokens per block.
        kind, capture: As in BatchLayout.
        visible_lens: As in BatchLayout, on the device; None in causal steps. Never in a captured step.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    block_size: int
    kind: StepKind = StepKind.MIXED
    capture: bool = False
    visible_lens: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return len(self.slot_mapping)

    @property
    def pages(self) -> int:
        """Width of the block table."""
        return self.block_table.shape[1]

    def is_decode(self, num_tokens: int) -> bool:
        """Whether the step has `num_tokens` requests with one token each, padding included."""
        return self.max_query_len == 1 and len(self.seq_lens) == self.num_tokens == num_tokens

    def static_buffers(self, table: torch.Tensor) -> Self:
        """Input buffers of a graph for steps with this number of requests; block tables are copied into `table`."""
        return replace(
            self,
            query_start_loc=torch.empty_like(self.query_start_loc),
            seq_lens=torch.empty_like(self.seq_lens),
            block_table=table,
            slot_mapping=torch.empty_like(self.slot_mapping),
            max_seq_len=table.shape[1] * self.block_size,
        )

    def parts_to_fill(self, step: PagedMetadata) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a buffer of this metadata and the step's tensor to copy into it."""
        yield self.query_start_loc, step.query_start_loc
        yield self.seq_lens, step.seq_lens
        yield self.block_table[:, : step.pages], step.block_table
        yield self.slot_mapping, step.slot_mapping
