"""Elementwise operations with batch_invariant: the bits of an element do not depend on the tensor around it."""

from __future__ import annotations

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.plugin_api import OpCase
from mvllm_cpu import elementwise_rows

PROVIDERS = {provider.op: provider for provider in elementwise_rows.providers()}


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", PROVIDERS)
def test_bits_do_not_depend_on_other_elements_or_threads(op, dtype, set_threads):
    function = PROVIDERS[op].function
    x = (torch.randn(elementwise_rows.LONGEST // 5 + 3, 11, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    set_threads(1)
    whole = function(x)
    torch.testing.assert_close(whole, SCHEMAS[op].reference(x))
    for count in (1, 3):
        set_threads(count)
        assert torch.equal(function(x), whole)
        for rows in (1, 2, 7, 100):
            assert torch.equal(function(x[-rows:]), whole[-rows:])
        assert torch.equal(function(x[:, 3:5]), whole[:, 3:5])
    assert torch.equal(torch.cat([function(row) for row in x[:200]]), whole[:200].flatten())


def test_they_are_used_with_batch_invariant_only():
    for op, provider in PROVIDERS.items():
        assert provider.supports(OpCase(op, "float32", {"size": 3}, batch_invariant=True)) == []
        assert provider.supports(OpCase(op, "float32", {"size": 3}))
