"""Drives a model's graphs in a graph program like PagedDriver drives a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.platform.attention import AttentionSpec, BatchLayout
from mvllm.platform.graph_compiler import GraphCompiler, GraphProgram
from mvllm.platform.state import StateArguments
from mvllm.platform.step_graph import StateValue, StepSizes
from mvllm_graph.arrays import to_numpy, to_torch
from mvllm_graph.parts import distinct_inputs
from mvllm_graph.recorded_calls import RecordedAttention, RecordedGroup, recording_providers
from mvllm_graph.run_parts import run_graph
from mvllm_graph.trace import TracedModel, trace_model
from tests.helpers.paged_driver import PagedDriver, load_model, make_context


def trace_checkpoint(
    folder: Path, compiler: GraphCompiler, group: GroupCoordinator | None = None, **settings: object
) -> TracedModel:
    """The graphs of a checkpoint for a compiler; with a group those of one tensor-parallel rank."""
    backends: dict[AttentionSpec, RecordedAttention] = {}
    ctx = dataclasses.replace(
        make_context(
            providers=recording_providers(compiler.operations()),
            tp=None if group is None else RecordedGroup(group.spec),
        ),
        attention=lambda spec: backends.setdefault(spec, RecordedAttention(spec)),
    )
    known = compiler.operations()
    return trace_model(load_model(folder, ctx, **settings), collectives=known, operations=known)


class GraphDriver(PagedDriver):
    """Runs steps of a traced model in a program of a compiler.

    Args:
        traced: The model.
        compiler: Makes the program.
        group: The tensor-parallel ranks.
        settings: As in PagedDriver.

    Attributes:
        program: The program.
        given: Names of the arrays that the program has got, in order.
    """

    def __init__(
        self, traced: TracedModel, compiler: GraphCompiler, group: GroupCoordinator | None = None, **settings: Any
    ) -> None:
        self._traced, self._group = traced, group
        self.program: GraphProgram = compiler.program(traced.graphs)
        self.given: list[str] = []
        for name, tensor in traced.arrays.items():
            self.program.set_weight(name, to_numpy(tensor))
            self.given.append(name)
        self.program.finish_weights()
        super().__init__(**settings)

    def _allocate(self, num_blocks: int, num_slots: int) -> None:
        self.program.allocate_caches(num_blocks, self.block_size)
        states = distinct_inputs(self._traced.graphs, "state")
        if states:
            self.program.allocate_states(num_slots)
        for value in states.values():
            assert isinstance(value, StateValue)
            self.program.write_state(value, np.full((num_slots + 1, *value.tensor.shape), np.nan, np.float32))

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor,
        layout: BatchLayout,
        slots: StateArguments,
    ) -> torch.Tensor:
        arrays = {
            "token_ids": ids.numpy(),
            "positions": positions.numpy(),
            "prompt_lens": prompt_lens.numpy(),
            "query_start_loc": layout.query_start_loc,
            "seq_lens": layout.seq_lens,
            "block_table.0": layout.block_table,
            "slot_mapping.0": layout.slot_mapping,
            "read_slots": slots.read_slots.numpy(),
            "write_slots": slots.write_slots.numpy(),
        }
        count, pages = len(ids), layout.block_table.shape[1]
        sizes = StepSizes(count, layout.num_requests, pages, count, layout.max_query_len, layout.max_seq_len)
        hidden = self.run_graph("model", arrays, sizes)
        head = {"hidden": hidden, "logits_indices": np.arange(count, dtype=np.int32)}
        return to_torch(self.run_graph("head", head, sizes), self._traced.whole["head"].outputs[0].dtype).float()

    def run_graph(self, name: str, arrays: Mapping[str, np.ndarray], sizes: StepSizes) -> np.ndarray:
        """Runs one graph; its inputs keep their values."""
        before = {key: array.copy() for key, array in arrays.items()}
        (output,) = run_graph(self._traced.whole[name], self.program, arrays, sizes, self._group)
        for key, array in before.items():
            np.testing.assert_array_equal(arrays[key], array)
        return output
