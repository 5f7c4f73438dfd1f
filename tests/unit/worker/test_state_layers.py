"""Sequence states on the worker: memory, slots in a step's inputs, and the passes of a step with draft tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.errors import CacheError, ConfigError
from mvllm.layers.context import ForwardStep, StatePasses
from mvllm.layers.state import SequenceState
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.checked_calls import checked_state_backend
from mvllm.platform.shapes import CaptureShapes, ShapePolicy, StepKind
from mvllm.platform.state import StateBackend, StateSpec, StateTensor
from mvllm.worker.state_layers import StateLayers
from tests.helpers.paged_driver import make_context
from tests.unit.worker.builders import HostRuntime, as_list, make_builder, make_new, make_plan, make_rows
from tests.unit.worker.fake_platform import FakePlatform

CONV, MATRIX = StateTensor((6, 3), "bfloat16"), StateTensor((2, 4, 5), "float32")
SPEC = StateSpec((CONV, MATRIX))
BYTES = 6 * 3 * 2 + 2 * 4 * 5 * 4


class StatePlatform(FakePlatform):
    """Claims states, and counts its backends."""

    capabilities = Capabilities(dtypes=("float32",), kv_dtypes=("float32",), state=True)

    def __init__(self, backend=StateBackend):
        super().__init__()
        self.backend, self.specs = backend, []

    def state_backend(self, spec):
        self.specs.append(spec)
        return self.backend(spec)


def make_layers(platform=None, count=2):
    layers = StateLayers(platform or StatePlatform(), HostRuntime())
    ctx = make_context()
    object.__setattr__(ctx, "state", layers.backend_for)
    layers.set_layers([SequenceState(ctx, (CONV, MATRIX)) for _ in range(count)])
    return layers


class TestMemory:
    def test_a_slot_has_the_bytes_of_all_layers(self):
        assert SPEC.bytes_per_sequence == BYTES
        assert make_layers(count=3).bytes_per_slot == 3 * BYTES

    def test_equal_specs_share_a_backend(self):
        platform = StatePlatform()
        make_layers(platform)
        assert platform.specs == [SPEC]

    def test_states_are_zeros_with_a_slot_for_padding(self):
        layers = make_layers()
        assert layers.has_missing_states
        layers.allocate(4)
        for layer in layers._layers:
            assert [(tuple(t.shape), t.dtype) for t in layer.state] == [
                ((5, 6, 3), torch.bfloat16),
                ((5, 2, 4, 5), torch.float32),
            ]
            assert not any(t.any() for t in layer.state)
        assert not layers.has_missing_states
        layers.free()
        assert layers.has_missing_states

    def test_states_that_do_not_fit_leave_no_layer_with_one(self):
        class Full(StateBackend):
            allocated = 0

            def allocate(self, num_slots, device):
                if Full.allocated:
                    raise MemoryError("no memory")
                Full.allocated += 1
                return super().allocate(num_slots, device)

        layers = make_layers(StatePlatform(Full))
        with pytest.raises(CacheError, match=r"The states of 4 sequences cannot be allocated.*no memory"):
            layers.allocate(4)
        assert all(not layer.state for layer in layers._layers)


class TestRefusals:
    def test_a_platform_that_does_not_claim_states_refuses_in_one_sentence(self):
        with pytest.raises(ConfigError) as caught:
            checked_state_backend(FakePlatform(), SPEC)
        assert str(caught.value) == (
            f"The model has layers with a sequence state ({BYTES} bytes per sequence and layer), but the platform "
            "'acme' does not claim Capabilities.state. Choose another platform, or a model with attention only."
        )

    def test_workers_with_several_devices_are_refused(self):
        ctx = make_context()
        object.__setattr__(ctx, "num_devices", 2)
        with pytest.raises(ConfigError, match="2 devices"):
            SequenceState(ctx, (CONV,))


class TestStepInputs:
    @pytest.fixture
    def rows(self):
        rows = make_rows()
        rows.apply_plan(
            make_plan(
                {},
                new_requests=[
                    make_new(3, list(range(20, 30)), [9, 2, 6], computed=4),
                    make_new(1, [5, 6, 7, 8], [1], num_prompt=2, computed=3),
                ],
            )
        )
        return rows

    def test_each_row_has_its_slots(self, rows):
        plan = make_plan({1: 1, 3: 5}, read_slots=[6, -1], write_slots=[2, 4])
        inputs = make_builder(rows, with_states=True).build(plan)
        layout = inputs.state_layout
        assert (layout.num_requests, layout.num_tokens, layout.max_query_len) == (2, 6, 5)
        assert (layout.kind, layout.num_decodes, layout.capture) == (StepKind.MIXED, 1, False)
        for name, values in (("query_start_loc", [0, 1, 6]), ("read_slots", [6, -1]), ("write_slots", [2, 4])):
            assert as_list(getattr(layout, name)) == as_list(getattr(layout, f"{name}_device")) == values
        assert layout.query_start_loc is inputs.layout.query_start_loc

    def test_one_copy_brings_everything_to_the_device(self, rows):
        runtime = HostRuntime()
        plan = make_plan({1: 1, 3: 5}, read_slots=[6, -1], write_slots=[2, 4])
        make_builder(rows, runtime=runtime, with_states=True, with_prompt_lens=True).build(plan)
        assert runtime.num_copies == 1

    def test_padding_has_slot_minus_one(self, rows):
        shapes = ShapePolicy(tokens=(8, 16), requests=(4,), pages=(4,), capture=CaptureShapes(decode=(4,)))
        builder = make_builder(rows, shapes, with_states=True, with_sample_rows=True)
        for plan, capture in (
            (make_plan({1: 1, 3: 5}, read_slots=[6, -1], write_slots=[2, 4]), False),
            (make_plan({1: 1, 3: 1}, read_slots=[6, 0], write_slots=[6, 1]), True),
        ):
            layout = builder.build(plan).state_layout
            assert as_list(layout.read_slots_device) == [*plan.read_slots, -1, -1]
            assert as_list(layout.write_slots_device) == [*plan.write_slots, -1, -1]
            assert layout.capture is capture

    def test_models_without_states_have_no_layout(self, rows):
        assert make_builder(rows).build(make_plan({1: 1, 3: 5})).state_layout is None

    def test_the_default_metadata_are_the_tensors_of_the_layout(self, rows):
        plan = make_plan({1: 1, 3: 5}, read_slots=[6, -1], write_slots=[2, 4])
        layout = make_builder(rows, with_states=True).build(plan).state_layout
        metadata = StateBackend(SPEC).build_metadata(layout)
        assert metadata.read_slots is layout.read_slots_device and metadata.max_query_len == 5
        step, x = ForwardStep({}, state_metadata=metadata), torch.ones(6, 2)
        state = SequenceState(make_context(), (CONV,))
        arguments = []
        y = state.run(lambda slots, x: arguments.append(slots) or x + 1, step, state.in_passes(x, step))
        assert arguments == [(metadata.query_start_loc, metadata.read_slots, metadata.write_slots, 5)]
        assert torch.equal(state.in_step(y, step), x + 1)


def verify_rows(first, drafts):
    """Rows 1 and 3, and row 2 without draft tokens, whose known tokens are computed but for the last ones.

    Args:
        first: By row, the first position that is not computed. Row r has r + 3 known tokens.
        drafts: By row.
    """
    rows = make_rows()
    new = [make_new(row, [10 * row + i for i in range(row + 3)], [row], computed=first[row]) for row in (1, 2, 3)]
    rows.apply_plan(make_plan({}, new_requests=new))
    for row, tokens in drafts.items():
        rows.history.set_draft_tokens(row, tokens)
    return rows


def passes_of(inputs):
    """Tokens, read slots and write slots of each pass."""
    order, begin, found = as_list(inputs.state_passes.order), 0, []
    for layout in (inputs.state_layout, *inputs.state_passes.drafts):
        tokens = order[begin : begin + layout.num_tokens]
        begin += layout.num_tokens
        for name in ("query_start_loc", "read_slots", "write_slots"):
            assert as_list(getattr(layout, name)) == as_list(getattr(layout, f"{name}_device"))
        found.append((tokens, as_list(layout.query_start_loc), as_list(layout.read_slots), as_list(layout.write_slots)))
    assert begin == len(order)
    return found


class TestDraftTokens:
    def test_each_pass_reads_what_the_one_before_has_written(self):
        """Row 3 computes two known tokens in the step."""
        rows = verify_rows({1: 3, 2: 4, 3: 4}, {1: [7, 8], 3: [9]})
        plan = make_plan(
            {1: 3, 2: 1, 3: 3},
            read_slots=[4, 5, -1], write_slots=[4, 5, 6],
            draft_token_ids={0: [7, 8], 2: [9]}, draft_slots={0: [0, 1], 2: [2]},
        )  # fmt: skip
        inputs = make_builder(rows, with_states=True, max_draft_tokens=2).build(plan)
        assert passes_of(inputs) == [
            ([0, 3, 4, 5], [0, 1, 2, 4], [4, 5, -1], [4, 5, 6]),
            ([1, 6], [0, 1, 2], [4, 6], [0, 2]),
            ([2], [0, 1], [0], [1]),
        ]
        order, place = as_list(inputs.state_passes.order), as_list(inputs.state_passes.place)
        assert [order[at] for at in place] == list(range(7))
        assert [each.max_query_len for each in (inputs.state_layout, *inputs.state_passes.drafts)] == [2, 1, 1]

    def test_captured_steps_have_all_passes_and_equal_sizes(self):
        rows = verify_rows({1: 3, 2: 4, 3: 5}, {1: [7]})
        shapes = ShapePolicy(tokens=(4, 16), requests=(4,), pages=(4,), capture=CaptureShapes(verify=(4,)))
        plan = make_plan(
            {1: 2, 2: 1},
            read_slots=[4, 5], write_slots=[4, 5], draft_token_ids={0: [7]}, draft_slots={0: [0]},
        )  # fmt: skip
        inputs = make_builder(rows, shapes, with_states=True, max_draft_tokens=2).build(plan)
        assert passes_of(inputs) == [
            ([0, 2, 0, 0], [0, 1, 2, 2, 2], [4, 5, -1, -1], [4, 5, -1, -1]),
            ([1, 0, 0, 0], [0, 1, 1, 1, 1], [4, -1, -1, -1], [0, -1, -1, -1]),
            ([0, 0, 0, 0], [0, 0, 0, 0, 0], [-1] * 4, [-1] * 4),
        ]
        assert as_list(inputs.state_passes.place)[:3] == [0, 4, 1] and len(inputs.state_passes.place) == 12
        assert all(each.capture for each in (inputs.state_layout, *inputs.state_passes.drafts))

    def test_results_come_back_in_the_order_of_the_tokens(self):
        rows = verify_rows({1: 3, 2: 4, 3: 5}, {1: [7, 8], 3: [9]})
        plan = make_plan(
            {1: 3, 2: 1, 3: 2},
            read_slots=[4, 5, 6], write_slots=[4, 5, 6],
            draft_token_ids={0: [7, 8], 2: [9]}, draft_slots={0: [0, 1], 2: [2]},
        )  # fmt: skip
        inputs = make_builder(rows, with_states=True, max_draft_tokens=2).build(plan)
        backend, passes = StateBackend(SPEC), inputs.state_passes
        drafts = tuple(map(backend.build_metadata, passes.drafts))
        metadata = backend.build_metadata(inputs.state_layout)
        step = ForwardStep({}, state_metadata=metadata, state_passes=StatePasses(passes.order, passes.place, drafts))
        cache, sums = SequenceState(make_context(), (CONV,)), torch.zeros(8)

        def add(slots, x):
            """The sum of a sequence's inputs so far, in place of a state."""
            _, read, write, _ = slots
            sums[write] = sums[read] + x
            return sums[write]

        x = inputs.token_ids.float()
        y = cache.in_step(cache.run(add, step, cache.in_passes(x, step)), step)
        a, a1, a2, b, c, c1 = x.tolist()
        assert y.tolist() == [a, a + a1, a + a1 + a2, b, c, c + c1]
        assert sums.tolist() == [a + a1, a + a1 + a2, c + c1, 0, a, b, c, 0]

    def test_accepted_draft_tokens_are_computed(self):
        rows = verify_rows({1: 3, 2: 4, 3: 5}, {})
        rows.append_sampled_tokens(np.array([1, 2]), np.array([6, 6]), {2: [7]})
        assert rows.num_computed[[1, 2]].tolist() == [3, 5]
        assert rows.history.num_tokens[[1, 2]].tolist() == [5, 7]


class TestBackend:
    def test_slots_are_copied_whole(self):
        backend = StateBackend(SPEC)
        state = backend.allocate(3, torch.device("cpu"))
        for tensor in state:
            tensor.copy_(torch.arange(4).view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape))
        backend.copy_slots(state, torch.tensor([2, 1]), torch.tensor([0, 3]))
        assert [[int(row.unique()) for row in tensor] for tensor in state] == [[2, 1, 2, 1]] * 2

    def test_every_element_is_filled(self):
        backend = StateBackend(SPEC)
        state = backend.allocate(3, torch.device("cpu"))
        backend.fill(state, float("nan"))
        assert all(tensor.isnan().all() for tensor in state)
