"""Copies of blocks and states of the backends, on the host: the conformance suite's tests of the KVT clauses."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvllm.plugin_api import WorkerContext
from mvllm.testing.attention_cases import make_spec
from mvllm.testing.suite import test_kvt_transfer as suite
from mvllm_cpu.runtime import CPURuntime

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

from mvllm_torch_gpu import block_copies  # noqa: E402
from mvllm_torch_gpu.attention import TritonAttention  # noqa: E402

LATENT = {"num_kv_heads": 1, "head_size": 48, "value_head_size": 32, "values_in_keys": True}


@pytest.fixture
def runtime() -> CPURuntime:
    return CPURuntime(WorkerContext())


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A platform whose attention is that of the Triton kernels; blocks are written through the cache's tensors."""
    monkeypatch.setattr(suite, "checked_attention_backend", lambda platform, spec: TritonAttention(spec))
    kv_dtypes = ("float32", "int8", "float8_e4m3fn")
    return SimpleNamespace(
        platform=None, capabilities=SimpleNamespace(kv_dtypes=kv_dtypes, mla=True, sparse_attention=False)
    )


def fill(harness: suite.CacheHarness, blocks: range, seed: int) -> None:
    """Stores random bytes, where the suite stores random keys and values: the kernels are slow on the interpreter."""
    generator = torch.Generator().manual_seed(seed)
    for part in harness.kv:
        bits = part.view(torch.uint8)
        for block in blocks:
            bits[block] = torch.randint(0, 120, bits.shape[1:], generator=generator).to(torch.uint8)


def test_blocks_are_copied_whole_and_alone(
    subject: SimpleNamespace, runtime: CPURuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "write", fill)
    suite.test_blocks_that_come_back_have_the_same_contents(subject, runtime, "float32")
    suite.test_copies_change_no_other_block(subject, runtime, "float32")


def test_formats_name_what_the_bytes_depend_on(subject: SimpleNamespace, runtime: CPURuntime) -> None:
    suite.test_formats_name_what_the_bytes_depend_on(subject, runtime, "float32")
    spec = make_spec(kv_dtype="float8_e4m3fn")
    formats = set()
    for float8 in ("float8_e4m3fn", "float8_e4m3fnuz"):
        backend = TritonAttention(spec, float8=float8)
        formats.add(backend.block_format(backend.allocate(1, 16, runtime.device), 16))
    assert len(formats) == 2, "the bits of the two float8 formats mean other numbers"


def test_states_are_rows_of_bytes() -> None:
    tensors = (torch.randn(4, 3, 2), torch.randn(4, 5).bfloat16())
    before = [tensor.clone() for tensor in tensors]
    out = np.empty((2, 24 + 10), np.uint8)
    assert block_copies.export_rows(tensors, np.array([3, 1]), out) is None
    block_copies.import_rows(tensors, np.array([0, 2]), out)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, torch.stack([old[3], old[1], old[1], old[3]]))


def test_the_latent_cache_has_one_part() -> None:
    spec = replace(make_spec(), **LATENT)
    backend = TritonAttention(spec)
    kv = backend.allocate(3, 16, torch.device("cpu"))
    out = np.empty((1, 16 * backend.kv_layout().bytes_per_token), np.uint8)
    kv[0].copy_(torch.randn(kv[0].shape))
    backend.export_blocks(kv, np.array([2]), out)
    assert out.tobytes() == kv[0][2].numpy().tobytes()
