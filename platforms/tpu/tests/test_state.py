"""Memory for sequence states is checked before it is allocated, and exists when `allocate` returns."""

from __future__ import annotations

import pytest
import torch

from mvllm.plugin_api import StateSpec, StateTensor
from mvllm_tpu.platform import make_platform
from mvllm_tpu.state import XlaStateBackend

SPEC = StateSpec((StateTensor((4, 3), "float32"), StateTensor((8,), "bfloat16")))
HOST = torch.device("cpu")


def test_the_room_for_all_slots_is_required_before_the_allocation():
    calls = []
    backend = XlaStateBackend(SPEC, lambda *given: calls.append(given), lambda: calls.append("materialized"))
    state = backend.allocate(5, HOST)
    assert calls == [(6 * (4 * 3 * 4 + 8 * 2), HOST, "The sequence states of a layer"), "materialized"]
    assert [tuple(tensor.shape) for tensor in state] == [(6, 4, 3), (6, 8)] and not any(map(torch.any, state))


def test_states_that_do_not_fit_are_a_memory_error():
    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pytest.raises(MemoryError, match="states of 5 sequences do not fit: RESOURCE_EXHAUSTED"):
        XlaStateBackend(SPEC, lambda *given: None, fail).allocate(5, HOST)


def test_the_platform_claims_states_and_provides_their_operations(host, installed):
    installed("torch_tpu")
    platform = make_platform()
    assert platform.capabilities.state
    assert {provider.op for provider in platform.ops()} == {"causal_conv1d", "ssd", "gated_delta_rule", "kda"}
    installed()
    assert platform.ops() == ()
