"""Step inputs of a plan: token ids, positions, slots and batch layout; padding has no effect."""

from __future__ import annotations

import tracemalloc
import weakref
from dataclasses import fields
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from mvllm import PoolingParams
from mvllm.errors import ConfigError
from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.step_inputs import StepInputs
from mvllm.worker.warm_up import dummy_inputs, profile_shape
from tests.unit.worker.builders import (
    BLOCK_SIZE,
    HostRuntime,
    as_list,
    make_builder,
    make_new,
    make_plan,
    make_rows,
    slots_of,
)

LONG = list(range(20, 30))
LONG_BLOCKS = [9, 2, 6]


def mixed_rows():
    """Row 3 continues a prompt of ten tokens at its fifth; row 1 decodes its fourth token."""
    rows = make_rows()
    rows.apply_plan(
        make_plan(
            {},
            new_requests=[
                make_new(3, LONG, LONG_BLOCKS, computed=4),
                make_new(1, [5, 6, 7, 8], [1], num_prompt=2, computed=3),
            ],
        )
    )
    return rows


class TestWithFreeShapes:
    def test_tokens_positions_and_slots_follow_the_batch_order(self):
        inputs = make_builder(mixed_rows()).build(make_plan({3: 5, 1: 1}))
        assert as_list(inputs.token_ids) == [24, 25, 26, 27, 28, 8]
        assert as_list(inputs.positions) == [4, 5, 6, 7, 8, 3]
        assert as_list(inputs.layout.slot_mapping) == [*slots_of(LONG_BLOCKS, range(4, 9)), *slots_of([1], range(3, 4))]

    def test_the_layout_has_counts_and_offsets(self):
        layout = make_builder(mixed_rows()).build(make_plan({3: 5, 1: 1})).layout
        assert (layout.num_requests, layout.num_tokens, layout.block_size) == (2, 6, BLOCK_SIZE)
        assert (layout.max_query_len, layout.max_seq_len) == (5, 9)
        assert as_list(layout.query_start_loc) == [0, 5, 6]
        assert as_list(layout.seq_lens) == [9, 4]
        assert layout.block_table.shape == (2, 3)
        assert as_list(layout.block_table[0]) == LONG_BLOCKS
        assert layout.block_table[1, 0] == 1

    def test_only_rows_at_the_end_of_their_tokens_sample(self):
        inputs = make_builder(mixed_rows()).build(make_plan({3: 5, 1: 1}))
        assert as_list(inputs.sampling_positions) == [1]
        assert as_list(inputs.logits_indices) == [5]
        inputs = make_builder(mixed_rows()).build(make_plan({3: 6, 1: 1}))
        assert as_list(inputs.sampling_positions) == [0, 1]
        assert as_list(inputs.logits_indices) == [5, 6]

    def test_a_decode_step_has_the_same_inputs_as_a_mixed_one(self):
        rows = mixed_rows()
        rows.num_computed[3] = 9
        inputs = make_builder(rows).build(make_plan({1: 1, 3: 1}))
        assert as_list(inputs.token_ids) == [8, 29]
        assert as_list(inputs.positions) == [3, 9]
        assert as_list(inputs.layout.slot_mapping) == slots_of([1], range(3, 4)) + slots_of(LONG_BLOCKS, range(9, 10))
        assert as_list(inputs.logits_indices) == [0, 1]

    def test_one_copy_transfers_all_inputs_to_the_device(self):
        runtime = HostRuntime()
        layout = make_builder(mixed_rows(), runtime=runtime).build(make_plan({3: 5, 1: 1})).layout
        assert runtime.num_copies == 1
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            host, device = getattr(layout, name), getattr(layout, f"{name}_device")
            assert host.dtype == np.int32 and as_list(host) == as_list(device)

    def test_the_next_step_does_not_change_the_buffer_of_the_last(self):
        builder = make_builder(mixed_rows())
        first = builder.build(make_plan({3: 5})).layout
        before = as_list(first.slot_mapping)
        builder.build(make_plan({1: 1}))
        assert as_list(first.slot_mapping) == before

    def test_a_step_of_few_rows_copies_their_blocks_only(self):
        rows = make_rows(max_rows=512, max_model_len=BLOCK_SIZE * 512)
        rows.apply_plan(make_plan({}, new_requests=[make_new(row, [5, 6], [row]) for row in (7, 500)]))
        rows.history.num_tokens[7] = rows.num_computed[7] = BLOCK_SIZE * 512 - 1
        builder = make_builder(rows)
        builder.build(make_plan({7: 1, 500: 2}))
        tracemalloc.start()
        try:
            inputs = builder.build(make_plan({7: 1, 500: 2}))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert inputs.layout.block_table.shape == (2, 512)
        assert peak < rows.block_table.nbytes / 4

    def test_prompt_lengths_are_given_to_models_that_read_them(self):
        inputs = make_builder(mixed_rows(), ShapePolicy(tokens=(8, 16)), with_prompt_lens=True).build(
            make_plan({3: 5, 1: 1})
        )
        assert inputs.prompt_lens is not None
        assert as_list(inputs.prompt_lens) == [10] * 5 + [2, 0, 0]
        assert make_builder(mixed_rows()).build(make_plan({1: 1})).prompt_lens is None

    @pytest.mark.parametrize(("plan", "longest"), [({3: 5, 1: 1}, 10), ({3: 1, 1: 1}, 10), ({1: 1}, 0)])
    def test_steps_know_the_longest_prompt_that_they_read_a_part_of(self, plan, longest):
        inputs = make_builder(mixed_rows(), ShapePolicy(tokens=(8, 16)), with_prompt_lens=True).build(make_plan(plan))
        assert inputs.longest_partial_prompt == longest
        rows = mixed_rows()
        rows.num_computed[3] = 9  # the last token of the prompt
        assert make_builder(rows, with_prompt_lens=True).build(make_plan({3: 1})).longest_partial_prompt == 0


class SharedMemory(HostRuntime):
    """A device that shares the host's memory."""

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host


def as_lists(inputs: StepInputs) -> dict[str, object]:
    """All fields, those of layouts by group."""
    found: dict[str, object] = {}
    for name in (field.name for field in fields(inputs)):
        value = getattr(inputs, name)
        if name == "layouts":
            for group, layout in enumerate(value):
                found |= {f"{each.name} {group}": getattr(layout, each.name) for each in fields(layout)}
        elif name == "built":
            found |= {f"built {i}": each for i, each in enumerate(value)}
        else:
            found[name] = value
    return {
        name: (value.dtype, value.tolist()) if isinstance(value, np.ndarray | torch.Tensor) else value
        for name, value in found.items()
    }


class TestOneDecodingRow:
    """Its steps are built by fewer calls, and have the inputs of any other step."""

    @pytest.mark.parametrize("runtime", [HostRuntime, SharedMemory])
    @pytest.mark.parametrize("num_groups", [1, 2])
    def test_the_inputs_are_those_of_any_step(self, runtime, num_groups):
        rows = make_rows(num_groups=num_groups)
        blocks = [[9, 2, 6, 4][i:] + [3] * i for i in range(num_groups)]
        rows.apply_plan(make_plan({}, new_requests=[make_new(2, LONG, *blocks, computed=9)]))
        builder, other = (make_builder(rows, runtime=runtime()) for _ in range(2))
        for position in range(9, 15):
            found = builder.build(make_plan({2: 1}))
            expected = other.build_rows(
                np.array([2]), np.array([position], np.int32), np.array([1], np.int32), np.array([0])
            )
            assert as_lists(found) == as_lists(expected)
            assert found.host_ids_and_positions()[0].tolist() == [LONG[9] if position == 9 else position]
            rows.num_computed[2] += 1
            rows.append_sampled_tokens(np.array([2]), np.array([position + 1]), {})

    def test_a_chunk_of_one_token_of_a_longer_prompt_does_not_sample(self):
        rows = make_rows()
        rows.apply_plan(make_plan({}, new_requests=[make_new(2, LONG, LONG_BLOCKS, computed=4)]))
        inputs = make_builder(rows).build(make_plan({2: 1}))
        assert as_list(inputs.sampling_positions) == [] and as_list(inputs.token_ids) == [24]
        assert inputs.num_logits == 0 and not inputs.selects_all

    def test_a_pooling_row_does_not_sample(self):
        rows = make_rows()
        rows.apply_plan(make_plan({}, new_requests=[make_new(2, LONG, LONG_BLOCKS, computed=9)]))
        rows.pooling.set_row(2, PoolingParams())
        assert as_list(make_builder(rows).build(make_plan({2: 1})).sampling_positions) == []


class TestKeptBuffers:
    """Steps of equal sizes use the same parts of the staging buffers."""

    @pytest.mark.parametrize("runtime", [HostRuntime, SharedMemory])
    def test_steps_of_changing_sizes_have_the_inputs_of_a_new_builder(self, runtime):
        rows = mixed_rows()
        builder = make_builder(rows, runtime=runtime())
        for scheduled in ({3: 5, 1: 1}, {3: 5, 1: 1}, {3: 2}, {1: 1}, {3: 5, 1: 1}, {1: 1}, {3: 2}, {3: 2}):
            plan = make_plan(scheduled)
            assert as_lists(builder.build(plan)) == as_lists(make_builder(rows, runtime=runtime()).build(plan))

    def test_a_copy_on_the_device_lives_no_longer_than_its_step(self):
        copies = []

        class Copies(HostRuntime):
            def to_device(self, host):
                found = super().to_device(host)
                copies.append(weakref.ref(found))
                return found

        builder = make_builder(mixed_rows(), runtime=Copies())
        for _ in range(3):
            builder.build(make_plan({3: 5, 1: 1}))
        assert len(copies) == 3 and not any(copy() is not None for copy in copies)

    def test_other_token_ids_are_read_in_place_of_the_built_ones(self):
        inputs = make_builder(mixed_rows(), runtime=SharedMemory()).build(make_plan({3: 5, 1: 1}))
        inputs.token_ids = inputs.token_ids.clamp(max=26)
        assert inputs.host_ids_and_positions()[0].tolist() == [24, 25, 26, 26, 26, 8]


class TestGroupsOfLayers:
    OTHER_BLOCKS: ClassVar = [4, 11, 3]

    def rows(self):
        rows = make_rows(num_groups=2)
        begin = [
            make_new(3, LONG, LONG_BLOCKS, self.OTHER_BLOCKS, computed=4),
            make_new(1, [5, 6, 7, 8], [1], [8], num_prompt=2, computed=3),
        ]
        rows.apply_plan(make_plan({}, new_requests=begin))
        return rows

    @pytest.mark.parametrize("shapes", [ShapePolicy(), ShapePolicy(tokens=(8, 16), requests=(3, 4), pages=(2, 8))])
    @pytest.mark.parametrize("scheduled", [{3: 5, 1: 1}, {1: 1, 3: 1}])
    def test_each_has_its_own_slots_and_blocks_and_shares_the_rest(self, scheduled, shapes):
        runtime = HostRuntime()
        inputs = make_builder(self.rows(), shapes, runtime=runtime).build(make_plan(scheduled))
        assert runtime.num_copies == 1
        first, second = inputs.layouts
        assert first.query_start_loc is second.query_start_loc and first.seq_lens is second.seq_lens
        for layout, tables in ((first, {3: LONG_BLOCKS, 1: [1]}), (second, {3: self.OTHER_BLOCKS, 1: [8]})):
            slots = [
                slot
                for row, count in scheduled.items()
                for slot in slots_of(tables[row], range(4 if row == 3 else 3, (4 if row == 3 else 3) + count))
            ]
            assert as_list(layout.slot_mapping) == slots + [-1] * (layout.num_tokens - len(slots))
            for i, row in enumerate(scheduled):
                known = tables[row][: layout.block_table.shape[1]]
                assert as_list(layout.block_table[i, : len(known)]) == known
            assert not layout.block_table[len(scheduled) :].any()
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
                assert as_list(getattr(layout, name)) == as_list(getattr(layout, f"{name}_device"))

    def test_the_largest_step_fits_the_buffer(self):
        rows = make_rows(num_groups=3)
        tokens = [1] * 16
        begin = [make_new(row, tokens, [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]) for row in range(4)]
        rows.apply_plan(make_plan({}, new_requests=begin))
        builder = make_builder(rows, with_prompt_lens=True, with_sample_rows=True)
        inputs = builder.build(make_plan({0: 4, 1: 4, 2: 4, 3: 4}))
        assert [as_list(layout.slot_mapping)[:4] for layout in inputs.layouts] == [
            slots_of([block], range(4)) for block in (1, 5, 9)
        ]


class TestWithBuckets:
    SHAPES = ShapePolicy(tokens=(8, 16), requests=(3, 4), pages=(2, 8))

    def build(self):
        return make_builder(mixed_rows(), self.SHAPES).build(make_plan({3: 5, 1: 1}))

    def test_every_size_is_a_bucket(self):
        inputs, layout = self.build(), self.build().layout
        assert (layout.num_tokens, layout.num_requests) == (8, 3)
        assert len(inputs.token_ids) == len(inputs.positions) == len(layout.slot_mapping) == 8
        assert len(layout.query_start_loc) == 4 and len(layout.seq_lens) == 3
        assert layout.block_table.shape == (3, 8)
        assert len(inputs.logits_indices) == 3

    def test_real_rows_are_the_same_as_without_padding(self):
        inputs, free = self.build(), make_builder(mixed_rows()).build(make_plan({3: 5, 1: 1}))
        assert as_list(inputs.token_ids)[:6] == as_list(free.token_ids)
        assert as_list(inputs.positions)[:6] == as_list(free.positions)
        assert as_list(inputs.layout.slot_mapping)[:6] == as_list(free.layout.slot_mapping)
        assert as_list(inputs.layout.block_table[:2, :3]) == as_list(free.layout.block_table)
        assert as_list(inputs.sampling_positions) == as_list(free.sampling_positions)
        assert as_list(inputs.logits_indices)[:1] == as_list(free.logits_indices)

    def test_padding_stores_nothing_reads_nothing_and_has_no_request(self):
        inputs, layout = self.build(), self.build().layout
        assert as_list(layout.slot_mapping)[6:] == [-1, -1]
        assert as_list(inputs.token_ids)[6:] == as_list(inputs.positions)[6:] == [0, 0]
        assert as_list(layout.query_start_loc) == [0, 5, 6, 6]
        assert as_list(layout.seq_lens) == [9, 4, 0]
        assert not layout.block_table[2].any(), "a block that exists"
        assert not layout.block_table[:, 5:].any(), "wider than any sequence"
        assert as_list(inputs.logits_indices)[1:] == [0, 0]

    def test_the_largest_padded_step_fits_the_buffer(self):
        rows = make_rows()
        rows.apply_plan(make_plan({}, new_requests=[make_new(row, [row] * 4, [row]) for row in range(4)]))
        full = ShapePolicy(tokens=(16,), requests=(4,), pages=(4,))
        inputs = make_builder(rows, full, with_prompt_lens=True).build(make_plan(dict.fromkeys(range(4), 4)))
        assert inputs.layout.block_table.shape == (4, 4)
        assert as_list(inputs.logits_indices) == [3, 7, 11, 15]
        assert inputs.prompt_lens is not None
        assert as_list(inputs.prompt_lens) == [4] * 16

    def test_a_step_that_samples_nothing_has_no_logits(self):
        inputs = make_builder(mixed_rows(), self.SHAPES).build(make_plan({3: 5}))
        assert len(inputs.sampling_positions) == len(inputs.logits_indices) == 0

    def test_limits_beyond_the_largest_bucket_are_refused_at_start(self):
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 16.*is 8"):
            make_builder(make_rows(), ShapePolicy(tokens=(8,)))


class TestProfileInputs:
    def make(self, *, max_tokens=40, max_rows=4, max_model_len=64, shapes=None):
        shape = profile_shape(shapes or ShapePolicy(), max_tokens, max_rows, max_model_len, BLOCK_SIZE)
        loader = SimpleNamespace(model=SimpleNamespace(uses_prompt_lens=False))
        forward = SimpleNamespace(runtime=HostRuntime(), loader=loader, has_states=False, is_static=False)
        return dummy_inputs(forward, shape, block_size=BLOCK_SIZE)

    def test_it_is_the_largest_step(self):
        layout = self.make().layout
        assert (layout.num_tokens, layout.num_requests) == (40, 4)
        assert as_list(layout.query_start_loc) == [0, 10, 20, 30, 40]
        assert layout.block_table.shape == (4, 3)

    def test_it_stores_nothing_and_reads_block_0(self):
        layout = self.make().layout
        assert set(as_list(layout.slot_mapping)) == {-1}
        assert not layout.block_table.any()

    def test_no_sequence_is_longer_than_the_model_allows(self):
        inputs = self.make(max_rows=2, max_model_len=7)
        assert inputs.layout.num_tokens == 14
        assert int(inputs.positions.max()) == 6

    def test_uneven_tokens_are_spread_without_losing_one(self):
        layout = self.make(max_tokens=10, max_rows=4).layout
        assert as_list(layout.query_start_loc) == [0, 3, 6, 9, 10]
        assert as_list(layout.seq_lens) == [3, 3, 3, 1]

    def test_it_is_padded_like_any_step(self):
        inputs = self.make(max_tokens=10, shapes=ShapePolicy(tokens=(16,), requests=(8,), pages=(4,)))
        assert (inputs.layout.num_tokens, inputs.layout.num_requests) == (16, 8)
        assert inputs.layout.block_table.shape == (8, 4)
        assert len(inputs.logits_indices) == 8
        assert as_list(inputs.layout.query_start_loc) == [0, 3, 6, 9, 10, 10, 10, 10, 10]
