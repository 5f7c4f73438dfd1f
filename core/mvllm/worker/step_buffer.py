"""The buffer of one step's inputs: its parts, as `step_inputs.py` draws them, and what attention and states read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from mvllm.platform.attention import BatchLayout
from mvllm.platform.shapes import StepKind
from mvllm.platform.state import StateLayout
from mvllm.worker.state_passes import part_sizes, slots_layout

_Buffer = TypeVar("_Buffer", np.ndarray, torch.Tensor)
LayoutSizes = tuple[int, int, int, int, int, int, int, int, tuple[int, ...]]
"""The fields of a BufferLayout, in their order."""


@dataclass(frozen=True)
class BufferLayout:
    """The parts of a step's buffer after padding. Two steps with equal layouts have equal shapes throughout.

    Attributes:
        tokens, requests, logits_rows, pages: T, R, L, P.
        prompt_lens, sample_rows: Sizes of these parts; 0 without them.
        num_groups: Groups of layers.
        state_slots: Sizes of `read_slots` and `write_slots`; 0 without sequence states.
        state_passes: Tokens of each pass over the layers with states, see `state_passes.py`; none for a single pass.
    """

    tokens: int
    requests: int
    logits_rows: int
    pages: int
    prompt_lens: int
    sample_rows: int
    num_groups: int
    state_slots: int = 0
    state_passes: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of the parts, in the order of the picture in `step_inputs.py`."""
        table = self.requests * self.pages
        first = [*[self.tokens] * 3, self.requests + 1, self.requests, self.logits_rows, table]
        optional = [self.prompt_lens, self.sample_rows, self.state_slots, self.state_slots]
        groups = [self.tokens, table] * (self.num_groups - 1)
        return [*first, *optional, *groups, *part_sizes(self.tokens, self.requests, self.state_passes)]

    @cached_property
    def size(self) -> int:
        """Elements of the buffer."""
        return sum(self.sizes)

    @cached_property
    def slot_and_table_indices(self) -> list[tuple[int, int]]:
        """Index of each group's slots and block table among the parts."""
        return [(2, 6), *((i, i + 1) for i in range(11, self.first_pass_part, 2))]

    @property
    def first_pass_part(self) -> int:
        """Index of the first part of `state_passes`."""
        return 11 + 2 * (self.num_groups - 1)

    def parts(self, buffer: _Buffer) -> list[_Buffer]:
        """The parts of a buffer. Slices rather than `split`, whose results some devices do not accept as indices."""
        stops: list[int] = list(accumulate(self.sizes))
        return [buffer[a:b] for a, b in zip([0, *stops], stops, strict=False)]

    def layouts(
        self,
        arrays: list[dict[str, Any]],
        *,
        block_size: int,
        max_query_len: int,
        max_seq_len: int,
        kind: StepKind = StepKind.MIXED,
        num_decodes: int = 0,
        capture: bool = False,
    ) -> list[BatchLayout]:
        """One BatchLayout for each group.

        Args:
            arrays: From `arrays_of_groups`.
        """
        shared: dict[str, Any] = {
            "num_requests": self.requests,
            "num_tokens": self.tokens,
            "max_query_len": max_query_len,
            "max_seq_len": max_seq_len,
            "block_size": block_size,
            "kind": kind,
            "num_decodes": num_decodes,
            "capture": capture,
        }
        return [BatchLayout(**shared, **of_group) for of_group in arrays]

    def arrays_of_groups(self, parts: list[np.ndarray], views: list[torch.Tensor]) -> list[dict[str, Any]]:
        """The arrays of each group's BatchLayout by their names, from the parts on the host and on the device."""
        shape = (self.requests, self.pages)
        shared = {
            "query_start_loc": parts[3],
            "seq_lens": parts[4],
            "query_start_loc_device": views[3],
            "seq_lens_device": views[4],
        }
        return [
            shared
            | {
                "block_table": parts[block_table_index].reshape(shape),
                "slot_mapping": parts[slot_mapping_index],
                "block_table_device": views[block_table_index].view(shape),
                "slot_mapping_device": views[slot_mapping_index],
            }
            for slot_mapping_index, block_table_index in self.slot_and_table_indices
        ]

    def state_layout(
        self,
        parts: list[np.ndarray],
        views: list[torch.Tensor],
        of: BatchLayout,
        *,
        is_static: bool,
        most_known: int = 0,
    ) -> StateLayout | None:
        """The StateLayout of a step, or of its first pass; None without sequence states.

        Args:
            parts, views: The parts on the host and on the device.
            of: The BatchLayout of the step.
            is_static: `max_query_len` must depend on the shape and on whether token i belongs to request i only, since
                a compiler may take it for a constant.
            most_known: Of a step with several passes: most tokens of a request in the first one.
        """
        if not self.state_slots:
            return None
        max_query_len, num_tokens, kind, starts = of.max_query_len, self.tokens, of.kind, 3
        if self.state_passes:
            num_tokens, starts = self.state_passes[0], self.first_pass_part + 2
            kind = StepKind.DECODE if kind is StepKind.VERIFY else kind
            max_query_len = most_known
            if of.capture:
                max_query_len = 1 if kind is StepKind.DECODE else num_tokens
        elif is_static and (max_query_len != 1 or self.tokens != self.requests):
            max_query_len = self.tokens
        return slots_layout(
            parts,
            views,
            (starts, 9, 10),
            self.requests,
            num_tokens,
            max_query_len=max_query_len,
            kind=kind,
            num_decodes=of.num_decodes,
            capture=of.capture,
        )


class LayoutBuffer:
    """The parts of a staging buffer, kept while steps have the same layout.

    Args:
        layout: The layout.
        staging: The staging buffer, [size of the layout or more].
        sizes: The fields of the layout.

    Attributes:
        layout, sizes: As given.
        host: The leading elements of the buffer, those of the layout.
        parts: The parts of `host`.
    """

    def __init__(self, layout: BufferLayout, staging: torch.Tensor, sizes: LayoutSizes) -> None:
        self.layout, self.sizes = layout, sizes
        self.host = staging[: layout.size]
        self.parts = layout.parts(self.host.numpy())
        self._shared: tuple[list[torch.Tensor], list[dict[str, Any]]] | None = None

    def arrays_on(self, device: torch.Tensor) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """The parts on the device, and the arrays of each group's BatchLayout by their names.

        They are kept only if the device shares the host's memory: a copy must not live longer than its step.

        Args:
            device: Result of copying `host` to the device.
        """
        if device is self.host and self._shared is not None:
            return self._shared
        views = self.layout.parts(device)
        found = views, self.layout.arrays_of_groups(self.parts, views)
        if device is self.host:
            self._shared = found
        return found
