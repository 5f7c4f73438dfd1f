"""A platform's paged attention gives what core's reference gives, through the contract alone."""

from __future__ import annotations

import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from tests.helpers.attention_cases import make_case, make_spec, run

# Largest difference allowed where values are of order one: both sides round once to the compute dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}

BATCHES = {
    "one prompt": [(0, 37)],
    "one decode": [(100, 1)],
    "decodes around the edges of blocks": [(14, 1), (15, 1), (16, 1), (31, 1), (0, 1)],
    "prompts and decodes": [(0, 20), (50, 1), (0, 1), (300, 1)],
    "chunks of prompts": [(16, 16), (33, 40), (7, 2)],
}


@pytest.fixture(params=TOLERANCE)
def dtype(request, platform):
    if request.param not in platform.capabilities.dtypes:
        pytest.skip(f"the platform does not offer {request.param}")
    return request.param


def assert_agrees(platform, runtime, spec, requests):
    backend = platform.attention_backend(spec)
    assert type(backend).validate(spec) == []
    block_size = backend.kv_layout().block_sizes[0]
    case = make_case(spec, requests, block_size=block_size)
    expected = run(ReferenceAttention(spec), case, poison=False)
    found = run(backend, case.on(runtime), poison=False)
    found = runtime.to_host(found).wait()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found.double() - expected.double()).abs().max() < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(platform, runtime, dtype, batch):
    assert_agrees(platform, runtime, make_spec(dtype=dtype), BATCHES[batch])


@pytest.mark.parametrize("head_size", [40, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_every_shape_of_heads(platform, runtime, dtype, heads, head_size):
    assert_agrees(platform, runtime, make_spec(*heads, head_size, dtype), BATCHES["prompts and decodes"])


@pytest.mark.parametrize("feature", ["sliding_window", "soft_cap", "sinks"])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_feature_that_it_declares(platform, runtime, dtype, batch, feature):
    if not getattr(platform.capabilities, feature):
        pytest.skip(f"the platform does not offer {feature}")
    values = {"sliding_window": 12, "soft_cap": 4.0, "sinks": True}
    assert_agrees(platform, runtime, make_spec(dtype=dtype, **{feature: values[feature]}), BATCHES[batch])


def test_a_request_does_not_see_what_earlier_tenants_left_in_its_blocks(platform, runtime, dtype):
    spec = make_spec(dtype=dtype)
    backend = platform.attention_backend(spec)
    case = make_case(spec, BATCHES["prompts and decodes"], block_size=backend.kv_layout().block_sizes[0]).on(runtime)
    clean, poisoned = (runtime.to_host(run(backend, case, poison=p)).wait() for p in (False, True))
    assert torch.equal(clean, poisoned)


def test_blocks_are_copied_whole(platform, runtime, dtype):
    spec = make_spec(dtype=dtype)
    backend = platform.attention_backend(spec)
    case = make_case(spec, [(40, 1)], block_size=backend.kv_layout().block_sizes[0]).on(runtime)
    direct = run(backend, case, poison=False)
    assert torch.equal(
        runtime.to_host(run(backend, case, poison=False, move_blocks=True)).wait(), runtime.to_host(direct).wait()
    )


def test_allocation_that_cannot_fit_raises_memory_error(platform, runtime):
    backend = platform.attention_backend(make_spec())
    block_size = backend.kv_layout().block_sizes[0]
    too_many = 4 * runtime.memory().total // (backend.kv_layout().bytes_per_token * block_size)
    with pytest.raises(MemoryError):
        backend.allocate(too_many, block_size, runtime.device)
