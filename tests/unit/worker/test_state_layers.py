"""Sequence states on the worker: memory, slots in a step's inputs, and the way back after rejected draft tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.errors import CacheError, ConfigError
from mvllm.layers.context import ForwardStep
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
        state = SequenceState(make_context(), (CONV,))
        assert state.arguments(ForwardStep({}, state_metadata=metadata)) == (
            metadata.query_start_loc,
            metadata.read_slots,
            metadata.write_slots,
            5,
        )


class TestRejectedDrafts:
    @pytest.mark.parametrize(("accepted", "computed"), [([7, 8], 7), ([7], 4), ([], 4)])
    def test_a_row_goes_back_unless_all_its_drafts_are_accepted(self, accepted, computed):
        """Row 2 has five known tokens, four of them computed, and verifies two draft tokens."""
        rows = make_rows()
        rows.apply_plan(make_plan({}, new_requests=[make_new(2, [1, 2, 3, 4, 5], [0], computed=4)]))
        rows.num_computed[2] = 5
        rows.verified[2] = (4, 2)
        rows.append_sampled_tokens(np.array([2]), np.array([6]), {2: accepted} if accepted else {})
        assert rows.num_computed[2] == computed
        assert rows.history.num_tokens[2] == 6 + len(accepted) and not rows.verified

    def test_rows_of_models_without_states_keep_what_they_have(self):
        rows = make_rows()
        rows.apply_plan(make_plan({}, new_requests=[make_new(2, [1, 2, 3, 4, 5], [0], computed=4)]))
        rows.num_computed[2] = 5
        rows.append_sampled_tokens(np.array([2]), np.array([6]), {2: [7]})
        assert rows.num_computed[2] == 6


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
