"""Attention without kernels against exact attention: every supported kind of layer, mixed steps, rejected specs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from mvllm.plugin_api import WorkerContext
from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance
from mvllm_cpu.runtime import CPURuntime
from mvllm_xpu import attention
from mvllm_xpu.attention import SdpaAttention

MIXED = [(0, 3), (17, 1), (16, 2), (40, 1), (0, 1)]
LATENT = {"num_heads": 4, "num_kv_heads": 1, "head_size": 48, "value_head_size": 32, "values_in_keys": True}

runtime = functools.cache(lambda: CPURuntime(WorkerContext()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 9},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "sliding_window": 20},
        {"head_size": 24, "value_head_size": 16},
        LATENT,
        {**LATENT, "sliding_window": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("together", [attention.GATHERED_TOKENS, 1], ids=["together", "one by one"])
def test_attention_is_exact_for_every_kind_of_layer(fields, together, monkeypatch):
    monkeypatch.setattr(attention, "GATHERED_TOKENS", together)
    spec = make_spec(**{"head_size": 16, **fields})
    assert SdpaAttention.validate(spec) == []
    case = make_case(spec, MIXED, block_size=4, padding=3, padding_requests=2)
    found = run(SdpaAttention(spec), runtime(), case, poison=float("nan"), move_blocks=True)
    real = case.num_real_tokens
    assert found.dtype == case.query.dtype and found.shape == (real + 3, spec.num_heads * spec.value_size)
    assert (found[:real].double() - expected(case)).abs().max() < tolerance(spec.dtype, spec.kv_dtype)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"soft_cap": 20.0}, "soft caps"),
        ({"sinks": True}, "sinks"),
        ({"kv_dtype": "int8"}, "KV cache dtype int8"),
        ({"dtype": "float64"}, "compute dtype float64"),
    ],
)
def test_unsupported_layers_are_rejected_with_the_reason(fields, message):
    assert any(message in reason for reason in SdpaAttention.validate(make_spec(**fields)))


def test_blocks_are_copied_to_bytes_and_back():
    backend = SdpaAttention(make_spec(dtype="bfloat16"))
    kv = backend.allocate(4, 16, torch.device("cpu"))
    for part in kv:
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in kv]
    data = np.empty((2, 16 * backend.kv_layout().bytes_per_token), np.uint8)
    assert backend.export_blocks(kv, np.array([3, 0]), data) is None
    assert backend.import_blocks(kv, np.array([1, 2]), data) is None
    for part, old in zip(kv, before, strict=True):
        assert torch.equal(part, torch.stack([old[0], old[3], old[0], old[3]]))
    assert backend.block_format(kv, 16) != SdpaAttention(make_spec(dtype="float16")).block_format(kv, 16)
