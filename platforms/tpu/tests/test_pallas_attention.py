"""The attention backend over the Pallas kernel: the kernel's arguments, against exact attention.

The kernel runs on TPUs only. It is replaced by a function that computes its documented result, and, if torch_xla is
installed, by torch_xla's own definition of the same operation.
"""

from __future__ import annotations

import os

import pytest
import torch

from mvllm.plugin_api import PlatformError
from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance
from mvllm_tpu import pallas_attention, xla_devices
from mvllm_tpu.pallas_attention import VARIABLE, PallasAttention, kernel_chosen
from mvllm_tpu.runtimes.torch_tpu import TorchTpu
from tests.unit.worker.builders import HostRuntime

STEPS = {
    "one prompt": [(0, 37)],
    "decodes": [(63, 1), (64, 1), (0, 1), (130, 1)],
    "everything": [(50, 1), (0, 17), (9, 30), (129, 1), (64, 64)],
}


def documented(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *, sm_scale, sliding_window, soft_cap):
    """The kernel's documented result, [tokens, heads, head_size]; NaN for padding."""
    found = torch.full_like(q, torch.nan)
    assert page_indices.max() < len(kv_pages), "a page that is fetched ahead must be one"
    for row in range(int(num_seqs[0])):
        begin, end, length = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        pages = kv_pages[page_indices[row]].flatten(0, 1)[:length].float()
        group = q.shape[1] // (pages.shape[1] // 2)
        keys, values = (pages[:, first::2].repeat_interleave(group, dim=1) for first in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        back = torch.arange(length - (end - begin), length).unsqueeze(1) - torch.arange(length)
        hidden = (back < 0) | (back >= (sliding_window or length))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return found


def defined(*tensors, **settings):
    """The kernel's result by torch_xla's definition, for real tokens."""
    from torch_xla.experimental.custom_kernel import ragged_paged_attention

    return ragged_paged_attention(*tensors, **settings, use_kernel=False)


with_torch_xla = pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="PJRT_DEVICE is not CPU")
KERNELS = pytest.mark.parametrize("kernel", [documented, pytest.param(defined, marks=with_torch_xla)])


@KERNELS
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [{}, {"sliding_window": 33}, {"soft_cap": 20.0}], ids=str)
def test_attention_is_exact(monkeypatch, kernel, step, dtype, features):
    if kernel is defined:
        pytest.importorskip("torch_xla", reason="torch_xla is not installed: it wants the torch of its own version")
    monkeypatch.setattr(PallasAttention, "kernel", staticmethod(kernel))
    spec = make_spec(8, 2, 128, dtype, **features)
    for block_size in PallasAttention(spec).kv_layout().block_sizes:
        case = make_case(spec, STEPS[step], block_size=block_size)
        found = run(PallasAttention(spec), HostRuntime(), case).double()
        assert (found - expected(case)).abs().max() < tolerance(dtype, dtype)


@pytest.mark.parametrize("features", [{}, {"sliding_window": 33}, {"soft_cap": 20.0}], ids=str)
def test_steps_with_too_large_block_tables_use_xlas_operations(monkeypatch, features):
    monkeypatch.setattr(pallas_attention, "_LARGEST_TABLE", 0)
    for dtype in ("float32", "bfloat16"):
        case = make_case(make_spec(8, 2, 128, dtype, **features), STEPS["everything"], block_size=16)
        found = run(PallasAttention(case.spec), HostRuntime(), case).double()
        assert (found - expected(case)).abs().max() < tolerance(dtype, dtype)


def test_a_backend_reads_a_cache_that_another_backend_has_allocated(monkeypatch):
    """Layers that differ only in the window share a cache, which one of their backends has allocated."""
    seen = []

    def kernel(query, cache, seq_lens, table, *rest, **settings):
        seen.append(table.tolist())
        return torch.zeros_like(query)

    monkeypatch.setattr(PallasAttention, "kernel", staticmethod(kernel))
    case = make_case(make_spec(4, 4, 128), STEPS["everything"], block_size=16)
    kv = PallasAttention(case.spec).allocate(case.num_blocks, 16, torch.device("cpu"))
    case.layout.block_table_device[-1, -1] = 10**6  # entries after a request's last block are undefined
    other = PallasAttention(make_spec(4, 4, 128, sliding_window=33))
    other.allocate(2, 16, torch.device("cpu"))
    query = torch.zeros(case.layout.num_tokens, 4, 128)
    other.forward(query, kv, other.build_metadata(case.layout))
    assert seen == [case.layout.block_table_device.clamp(0, case.num_blocks - 1).tolist()]


def test_memory_per_token_equals_the_layouts():
    spec = make_spec(8, 2, 128, "bfloat16")
    backend = PallasAttention(spec)
    [cache] = backend.allocate(3, 64, torch.device("cpu"))
    assert cache.shape == (3, 64, 4, 128)
    assert cache.numel() * cache.itemsize == 3 * 64 * backend.kv_layout().bytes_per_token


def test_copied_blocks_keep_keys_and_values(monkeypatch):
    monkeypatch.setattr(PallasAttention, "kernel", staticmethod(documented))
    case = make_case(make_spec(4, 4, 128), STEPS["everything"], block_size=16)
    found = run(PallasAttention(case.spec), HostRuntime(), case, move_blocks=True).double()
    assert (found - expected(case)).abs().max() < tolerance("float32", "float32")


def test_padding_requests_are_not_counted():
    case = make_case(make_spec(4, 4, 128), [(5, 1), (0, 3)], block_size=16, padding=4, padding_requests=6)
    backend = PallasAttention(case.spec)
    backend.allocate(case.num_blocks, 16, torch.device("cpu"))
    metadata = backend.build_metadata(case.layout)
    assert metadata.num_requests.tolist() == [2] and metadata.num_requests.dtype == torch.int32
    assert metadata.seq_lens.tolist() == [6, 3] + [0] * 6


@pytest.fixture
def chips(monkeypatch):
    """A machine with TPU chips and jax."""
    monkeypatch.setattr(xla_devices, "find", lambda: xla_devices.Devices("TPU", ("TPU v5e",)))
    monkeypatch.setattr(pallas_attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(VARIABLE, raising=False)
    return monkeypatch


def test_the_kernel_is_chosen_on_chips_for_supported_layers(chips):
    for num_heads in (1, 2, 4, 8, 16, 32):
        assert kernel_chosen(make_spec(num_heads, num_heads, 128, "bfloat16")), num_heads
    assert kernel_chosen(make_spec(8, 2, 128)) and kernel_chosen(make_spec(40, 8, 128, "bfloat16"))
    others = (
        make_spec(40, 10, 128, "bfloat16"),
        make_spec(24, 6, 128, "bfloat16"),
        make_spec(6, 3, 128),
        make_spec(8, 2, 64),
        make_spec(8, 2, 256, value_head_size=128),
        make_spec(8, 2, 128, sinks=True),
        make_spec(8, 1, 640, values_in_keys=True, value_head_size=512),
        make_spec(8, 2, 128, "bfloat16", kv_dtype="float32"),
    )
    assert not any(kernel_chosen(spec) for spec in others)
    chips.setenv(VARIABLE, "xla")
    assert not kernel_chosen(make_spec(8, 2, 128))


@pytest.mark.parametrize("names", [("TPU v2 or v3",), ("TPU v7x",), ("TPU",)])
def test_unsupported_chips_do_not_use_the_kernel(chips, names):
    chips.setattr(xla_devices, "find", lambda: xla_devices.Devices("TPU", names))
    assert not kernel_chosen(make_spec(8, 2, 128))


def test_reasons_of_the_worker_exclude_the_kernel(chips):
    assert not kernel_chosen(make_spec(8, 2, 128), ["it drives several devices"])
    chips.setenv(VARIABLE, "pallas")
    with pytest.raises(PlatformError, match="it drives several devices"):
        kernel_chosen(make_spec(8, 2, 128), ["it drives several devices"])


@pytest.mark.parametrize("asked", ["pallas", "typo"])
def test_torch_tpu_raises_for_unsupported_values_of_the_variable(chips, asked):
    pytest.importorskip("mvllm_tpu.runtimes.eager_attention")
    chips.setenv(VARIABLE, asked)
    with pytest.raises(PlatformError, match=VARIABLE):
        TorchTpu().attention(make_spec(8, 2, 128))


@pytest.mark.parametrize(
    ("asked", "head_size", "said"),
    [("pallas", 64, "heads of 64 and 64 elements"), ("flash", 128, "'flash' names no attention.* pallas or xla")],
)
def test_a_required_kernel_that_cannot_run_raises(chips, asked, head_size, said):
    chips.setenv(VARIABLE, asked)
    with pytest.raises(PlatformError, match=said):
        kernel_chosen(make_spec(8, 2, head_size))


def test_the_host_and_machines_without_jax_do_not_use_the_kernel(chips):
    chips.setattr(pallas_attention.importlib.util, "find_spec", lambda name: None)
    assert not kernel_chosen(make_spec(8, 2, 128))
    chips.setenv(VARIABLE, "pallas")
    with pytest.raises(PlatformError, match=r"jax is not installed.*install .*torch_xla\[pallas"):
        kernel_chosen(make_spec(8, 2, 128))
    chips.setattr(xla_devices, "find", lambda: xla_devices.Devices("CPU"))
    with pytest.raises(PlatformError, match="runs no kernels of chips"):
        kernel_chosen(make_spec(8, 2, 128))
