"""Attention of long prompts by cuDNN: the division into parts, with a function of torch operations in its place."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from mvllm.plugin_api import WorkerContext
from mvllm.testing.attention_cases import expected, make_case, make_layout, make_spec, run, tolerance
from mvllm_cpu.runtime import CPURuntime

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

import mvllm_torch_gpu.attention  # noqa: E402
from mvllm_torch_gpu import attention_libraries, cudnn_attention  # noqa: E402
from mvllm_torch_gpu.attention_library import UNSUPPORTED  # noqa: E402
from mvllm_torch_gpu.autotuned_attention import AutotunedAttention  # noqa: E402

KERNELS = importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS


@pytest.fixture
def shapes(monkeypatch):
    """Puts torch operations in the place of the device's; the shapes (rows, columns, causal) of dense attention."""
    seen: list[tuple[int, int, bool]] = []

    def dense_attention(query, key, value, *, scale, causal):
        seen.append((len(query), len(key), causal))
        group = query.shape[1] // key.shape[1]
        key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return found.to(query.dtype), scores.logsumexp(-1)

    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, function)
    monkeypatch.setattr(cudnn_attention, "dense_attention", dense_attention)
    for name, value in (("LEAST_TOKENS", 512), ("ROW_STEP", 256)):
        monkeypatch.setattr(cudnn_attention, name, value)
    monkeypatch.setattr(cudnn_attention, "has_cudnn", lambda module: True)
    return seen


def backend_of(**fields):
    spec = make_spec(**{"dtype": "float16", **fields})
    found, reasons = attention_libraries.libraries_for(spec, ("cudnn",))
    assert found, reasons
    return AutotunedAttention(spec, found, forced=True)


@pytest.mark.parametrize(
    ("requests", "dense"),
    [
        ([(0, 512)], [(512, 512, True)]),
        ([(0, 600)], [(768, 768, True)]),
        ([(1024, 512)], [(512, 512, True), (512, 1024, False)]),
        ([(7, 1), (40, 1), (1500, 700), (0, 513)], [(1280, 1280, True), (1280, 1024, False), (768, 768, True)]),
    ],
)
def test_long_prompts_are_exact_and_their_shapes_are_rounded_up(requests, dense, shapes):
    backend = backend_of()
    case = make_case(backend.spec, requests, block_size=16, padding=3, padding_requests=1)
    found = run(backend, CPURuntime(WorkerContext()), case)
    assert found.isfinite().all(), "rows of padding, too"
    off = (found[: case.num_real_tokens].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert shapes == dense


def test_values_that_are_not_finite_behind_the_last_token_change_nothing(shapes):
    backend = backend_of()
    case = make_case(backend.spec, [(1030, 600)], block_size=64)
    found = run(backend, CPURuntime(WorkerContext()), case, poison=float("nan"))
    off = (found.double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert len(shapes) == 2


def test_a_prompt_for_which_the_memory_does_not_suffice_uses_the_kernels(shapes, monkeypatch):
    def without_memory(query, key, value, *, scale, causal):
        shapes.append((len(query), len(key), causal))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cudnn_attention, "dense_attention", without_memory)
    backend = backend_of()
    case = make_case(backend.spec, [(40, 1), (9, 520)], block_size=16, padding=3)
    found = run(backend, CPURuntime(WorkerContext()), case)
    off = (found[: case.num_real_tokens].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert len(shapes) == 1


def test_a_sequence_whose_gathered_keys_and_values_exceed_the_limit_uses_the_kernels(shapes):
    spec = make_spec(dtype="float16", num_heads=32, num_kv_heads=32, head_size=128)
    [library] = attention_libraries.libraries_for(spec, ("cudnn",))[0]
    layout = make_layout([(0, 600)], np.zeros((1, 38), np.int32), 16)
    assert library.plan(layout, torch.device("cpu")) is not UNSUPPORTED
    layout.seq_lens = np.array([1 << 17], np.int32)  # 2 GiB: more than an int32 holds
    assert library.plan(layout, torch.device("cpu")) is UNSUPPORTED


@pytest.mark.parametrize("requests", [[(0, 511)], [(9, 1), (0, 600), (30, 2)], [(40, 1), (50, 1)]])
def test_steps_with_shorter_prompts_use_the_kernels(requests, shapes):
    backend = backend_of()
    case = make_case(backend.spec, requests, block_size=16)
    found = run(backend, CPURuntime(WorkerContext()), case)
    off = (found.double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert not shapes


@pytest.mark.parametrize(
    ("fields", "reason"), [({"sliding_window": 9}, "no sliding window"), ({"head_size": 256}, "up to 128")]
)
def test_layers_that_cudnn_does_not_support_are_refused(fields, reason, shapes):
    found, reasons = attention_libraries.libraries_for(make_spec(**{"dtype": "float16", **fields}), ("cudnn",))
    assert not found and any(reason in text for text in reasons)


def test_hosts_without_cudnn_do_not_use_it():
    found, [reason] = attention_libraries.libraries_for(make_spec(dtype="float16"), ("cudnn",))
    assert not found and "compute capability 9.0" in reason
