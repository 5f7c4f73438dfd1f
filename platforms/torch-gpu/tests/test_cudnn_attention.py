"""Attention of long prompts by cuDNN, with torch's operation on the host: everything else is the real code."""

from __future__ import annotations

import importlib
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mvllm.plugin_api import WorkerContext
from mvllm.testing.attention_cases import expected, make_case, make_layout, make_spec, run, store, tolerance
from mvllm.testing.attention_diagnosis import assert_near
from mvllm_cpu.runtime import CPURuntime

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

import mvllm_torch_gpu.attention  # noqa: E402
from mvllm_torch_gpu import attention_libraries, cudnn_attention  # noqa: E402
from mvllm_torch_gpu.attention_library import UNSUPPORTED  # noqa: E402
from mvllm_torch_gpu.autotuned_attention import AutotunedAttention  # noqa: E402

KERNELS = importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS
on_device = importlib.import_module("platforms.torch-gpu.tests.on_device")
operation = importlib.import_module("platforms.torch-gpu.tests.cudnn_operation")


@pytest.fixture
def calls(monkeypatch):
    """Puts torch's operation on the host, with the rules of the device's; its calls."""
    for name, function in KERNELS.items():
        monkeypatch.setattr(mvllm_torch_gpu.attention, name, function)
    for name, value in on_device.HOST_SIZES.items():
        monkeypatch.setattr(cudnn_attention, name, value)
    monkeypatch.setattr(cudnn_attention, "has_cudnn", lambda module: True)
    with operation.on_the_host() as made:
        yield made


def shapes(calls):
    return [call.shape for call in calls]


def backend_of(**fields):
    # Few keys have most of the weight. With nearly equal weights every result, and every error, would be close to 0.
    spec = make_spec(**{"dtype": "float16", "scale": 0.5, **fields})
    found, reasons = attention_libraries.libraries_for(spec, ("cudnn",))
    assert found, reasons
    return AutotunedAttention(spec, found, forced=True)


@pytest.mark.parametrize(
    ("requests", "dense"),
    [
        ([(0, 64)], [(64, 64, True)]),
        ([(0, 75)], [(96, 96, True)]),
        ([(128, 64)], [(64, 64, True), (64, 128, False)]),
        ([(7, 1), (40, 1), (188, 88), (0, 65)], [(160, 160, True), (160, 128, False), (96, 96, True)]),
    ],
)
def test_long_prompts_are_exact_and_their_shapes_are_rounded_up(requests, dense, calls):
    backend = backend_of()
    case = make_case(backend.spec, requests, block_size=16, padding=3, padding_requests=1)
    found = run(backend, CPURuntime(WorkerContext()), case)
    assert found.isfinite().all(), "rows of padding, too"
    off = (found[: case.num_real_tokens].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert shapes(calls) == dense


HEADS = {"mha": (2, 2), "gqa-4": (4, 1), "gqa-8": (16, 2)}
FURTHER = [("mha", 0), ("mha", 288), ("gqa-4", 288), ("gqa-8", 0)]


@pytest.mark.parametrize(
    ("heads", "context"),
    [
        pytest.param("gqa-8", 288),
        pytest.param("gqa-4", 0),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in FURTHER),
    ],
)
def test_a_chunk_among_decodes_is_exact_for_every_number_of_heads_that_share_keys(heads, context, calls):
    num_heads, num_kv_heads = HEADS[heads]
    backend = backend_of(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype="bfloat16", kv_dtype="bfloat16")
    case = make_case(backend.spec, [(7, 1), (290, 1), (context, 65)], block_size=16)
    assert_near(run(backend, CPURuntime(WorkerContext()), case), case)
    assert len(calls) == (2 if context else 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize("context", [0, 30_000, 30_720])
def test_a_chunk_of_2048_tokens_is_exact_with_the_sizes_of_devices(heads, context, calls, monkeypatch):
    for name, value in (("LEAST_TOKENS", 2048), ("ROW_STEP", 512), ("CONTEXT_STEP", 1024)):
        monkeypatch.setattr(cudnn_attention, name, value)
    backend = backend_of(num_heads=heads[0] // heads[1], num_kv_heads=1, dtype="bfloat16", kv_dtype="bfloat16")
    case = make_case(backend.spec, [(7, 1), (context, 2048)], block_size=16)
    assert_near(run(backend, CPURuntime(WorkerContext()), case), case)
    assert [call.columns for call in calls][1:] == ([context // 1024 * 1024] if context else [])


def test_a_query_that_is_a_view_of_a_fused_projection_is_read_where_it_is(calls):
    backend = backend_of()
    case = make_case(backend.spec, [(0, 64)], block_size=16)
    assert_near(run(backend, CPURuntime(WorkerContext()), case), case)
    [call] = calls
    heads, size = backend.spec.num_heads, backend.spec.head_size
    assert call.query_strides == (size, 2 * heads * size, 1), "not copied: `run` passes half of a fused tensor"


@pytest.mark.parametrize(
    ("first", "spare"),
    [
        pytest.param(2, 1, id="both"),
        pytest.param(1, 7, id="address", marks=pytest.mark.exhaustive),
        pytest.param(8, 3, id="stride", marks=pytest.mark.exhaustive),
    ],
)
def test_a_query_that_is_not_aligned_is_copied(first, spare, calls):
    backend = backend_of()
    case = make_case(backend.spec, [(128, 64)], block_size=16)
    runtime = CPURuntime(WorkerContext())
    harness, metadata, query = store(backend, runtime, case)
    wide = query.new_zeros(len(query), query[0].numel() + first + spare)
    view = wide[:, first : first + query[0].numel()].view(query.shape)
    view.copy_(query)
    assert_near(backend.forward(view, harness.kv, metadata), case)
    assert len(calls) == 2, "with the operation, which checks addresses and strides"


def test_logarithms_of_sums_in_the_order_of_tokens_are_merged_right(calls, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    backend = backend_of()
    case = make_case(backend.spec, [(128, 64)], block_size=16)
    assert_near(run(backend, CPURuntime(WorkerContext()), case), case)


def test_a_call_that_cudnn_refuses_uses_the_kernels_and_is_logged_once(calls, monkeypatch, caplog):
    asked = []

    def refused(query, *args, **options):
        asked.append(len(query))
        raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.\nmore")

    monkeypatch.setattr(cudnn_attention, "dense_attention", refused)
    monkeypatch.setattr(cudnn_attention, "_warned", set())
    backend = backend_of()
    case = make_case(backend.spec, [(40, 1), (9, 65)], block_size=16)
    for _ in range(2):
        assert_near(run(backend, CPURuntime(WorkerContext()), case), case)
    assert asked == [96], "once, and not again for a prompt of these sizes"
    longer = make_case(backend.spec, [(9, 113)], block_size=16)
    assert_near(run(backend, CPURuntime(WorkerContext()), longer), longer)
    assert asked == [96, 128]
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert " 65 tokens" in warning and warning.endswith("No execution plans support the graph")


def test_other_errors_are_raised(calls, monkeypatch):
    def failed(*args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cudnn_attention, "dense_attention", failed)
    backend = backend_of()
    case = make_case(backend.spec, [(0, 65)], block_size=16)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(backend, CPURuntime(WorkerContext()), case)


def test_values_that_are_not_finite_after_the_last_token_change_nothing(calls):
    backend = backend_of()
    case = make_case(backend.spec, [(129, 75)], block_size=64)
    found = run(backend, CPURuntime(WorkerContext()), case, poison=float("nan"))
    off = (found.double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert len(calls) == 2


def test_a_prompt_for_which_the_memory_does_not_suffice_uses_the_kernels(calls, monkeypatch):
    def without_memory(query, key, value, *, scale, causal):
        calls.append(len(query))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cudnn_attention, "dense_attention", without_memory)
    backend = backend_of()
    case = make_case(backend.spec, [(40, 1), (9, 65)], block_size=16, padding=3)
    found = run(backend, CPURuntime(WorkerContext()), case)
    off = (found[: case.num_real_tokens].double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert len(calls) == 1


def test_a_sequence_whose_gathered_keys_and_values_exceed_the_limit_uses_the_kernels(calls):
    spec = make_spec(dtype="float16", num_heads=32, num_kv_heads=32, head_size=128)
    [library] = attention_libraries.libraries_for(spec, ("cudnn",))[0]
    layout = make_layout([(0, 600)], np.zeros((1, 38), np.int32), 16)
    assert library.plan(layout, torch.device("cpu")) is not UNSUPPORTED
    layout.seq_lens = np.array([1 << 17], np.int32)  # 2 GiB: more than an int32 holds
    assert library.plan(layout, torch.device("cpu")) is UNSUPPORTED


@pytest.mark.parametrize("requests", [[(0, 63)], [(9, 1), (0, 75), (30, 2)], [(40, 1), (50, 1)]])
def test_steps_with_shorter_prompts_use_the_kernels(requests, calls):
    backend = backend_of()
    case = make_case(backend.spec, requests, block_size=16)
    found = run(backend, CPURuntime(WorkerContext()), case)
    off = (found.double() - expected(case)).abs().max()
    assert off <= tolerance(backend.spec.dtype, backend.spec.kv_dtype)
    assert not calls


@pytest.mark.parametrize(
    ("fields", "reason"), [({"sliding_window": 9}, "no sliding window"), ({"head_size": 256}, "up to 128")]
)
def test_layers_that_cudnn_does_not_support_are_refused(fields, reason, calls):
    found, reasons = attention_libraries.libraries_for(make_spec(**{"dtype": "float16", **fields}), ("cudnn",))
    assert not found and any(reason in text for text in reasons)


def test_hosts_without_cudnn_do_not_use_it():
    found, [reason] = attention_libraries.libraries_for(make_spec(dtype="float16"), ("cudnn",))
    assert not found and "compute capability 9.0" in reason


def test_the_checks_on_devices_work_on_the_host_and_find_a_wrong_mask(monkeypatch):
    for name, value in (("HEADS", {4: (4, 1)}), ("SMALL_PROMPTS", {"64 after 137": [(137, 64)]})):
        monkeypatch.setattr(on_device, name, value)
    with ExitStack() as stack:
        runtime = on_device.on_host(stack)
        for name, function in KERNELS.items():
            monkeypatch.setattr(mvllm_torch_gpu.attention, name, function)
        [right] = on_device.comparisons(runtime, small=True)
        dense_attention = cudnn_attention.dense_attention
        monkeypatch.setattr(
            cudnn_attention,
            "dense_attention",
            lambda q, k, v, *, scale, causal: dense_attention(q, k, v, scale=scale, causal=True),
        )
        [wrong] = on_device.comparisons(runtime, small=True)
    assert right.is_right and right.computed == 1
    assert not wrong.is_right and wrong.from_exact > 10 * wrong.allowed and wrong.from_triton > 10 * wrong.allowed
