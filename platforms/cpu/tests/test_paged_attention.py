"""The attention kernels against a dense float64 oracle, on every instruction set that this processor has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from platforms.cpu.tests.dense_attention import attend_densely, make_case, run

from mvllm.testing.attention_cases import make_spec
from mvllm_cpu import kernels
from mvllm_cpu.paged_attention import PagedAttention

pytestmark = pytest.mark.skipif(kernels.load().library is None, reason=f"no kernels: {kernels.load().reason}")

# Results are rounded once to the compute dtype; values here are of order one, a few at most.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2e-3}

MIXED = [(0, 37), (100, 1), (15, 1), (16, 1), (200, 5), (0, 1), (33, 70), (700, 1)]
"""(tokens computed before, new tokens): prompts, decodes and chunks in one batch, around every edge of a block."""


def assert_right(case, *, tolerance=None):
    found = run(PagedAttention(case.spec), case)
    assert found.dtype == case.query.dtype
    error = (found.double() - attend_densely(case)).abs().max().item()
    assert error < (tolerance or TOLERANCE[case.spec.dtype])  # also fails for NaN


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [33, 40, 64, 80, 96, 128, 256])
def test_every_head_size(dtype, head_size):
    assert_right(make_case(make_spec(head_size=head_size, dtype=dtype), MIXED))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (5, 5), (14, 2), (8, 1), (17, 1), (40, 1), (71, 1)])
def test_every_ratio_of_heads(dtype, heads):
    assert_right(make_case(make_spec(*heads, dtype=dtype), MIXED))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size(dtype, block_size):
    assert_right(make_case(make_spec(dtype=dtype), MIXED, block_size=block_size))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "features",
    [
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 128},
        {"soft_cap": 3.0},
        {"sinks": True},
        {"sliding_window": 20, "soft_cap": 3.0, "sinks": True},
        {"scale": 0.7},
    ],
    ids=str,
)
def test_every_feature(dtype, features):
    assert_right(make_case(make_spec(dtype=dtype, **features), MIXED, spread=0.5))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cache_of_another_dtype_than_the_model(dtype, kv_dtype):
    assert_right(make_case(make_spec(dtype=dtype, kv_dtype=kv_dtype, head_size=40), MIXED))


def test_scores_far_apart_neither_overflow_nor_vanish():
    assert_right(make_case(make_spec(scale=1.0), MIXED, spread=6.0), tolerance=1e-3)


@pytest.mark.parametrize("requests", [[(3000, 1)], [(2999, 3), (10, 1)]], ids=str)
@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"sliding_window": 1500}], ids=str)
def test_long_contexts_split_over_threads(requests, features):
    before = torch.get_num_threads()
    case = make_case(make_spec(2, 1, **features), requests)
    try:
        torch.set_num_threads(4)
        assert_right(case)
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_does_not_change_a_request_that_is_not_split():
    case = make_case(make_spec(), [(60, 1)] * 40)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run(PagedAttention(case.spec), case))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_slot_minus_one_stores_nothing():
    case = make_case(make_spec(), [(0, 20)])
    backend = PagedAttention(case.spec)
    kv = backend.allocate(case.num_blocks, 16, torch.device("cpu"))
    case.layout.slot_mapping[7:] = -1
    backend.write_kv(kv, case.keys[0], case.values[0], backend.build_metadata(case.layout))
    stored = sum(int((cache != 0).sum()) for cache in kv)
    assert stored == int((case.keys[0][:7] != 0).sum() + (case.values[0][:7] != 0).sum())


def test_copied_blocks_hold_the_same_tokens():
    case = make_case(make_spec(), [(40, 1)])
    backend = PagedAttention(case.spec)
    direct = run(backend, case, poison=False)

    kv = backend.allocate(case.num_blocks * 2, 16, torch.device("cpu"))
    whole = make_case(case.spec, [(0, 41)])
    whole.layout.block_table[0, :3] = case.layout.block_table[0, :3]
    table = torch.from_numpy(case.layout.block_table[0, :3].astype("int64"))
    slots = torch.arange(41) % 16 + table[torch.arange(41) // 16] * 16
    whole.layout.slot_mapping[:] = slots.int().numpy()
    backend.write_kv(kv, case.keys[0], case.values[0], backend.build_metadata(whole.layout))
    backend.copy_blocks(kv, table, table + case.num_blocks)
    for cache in kv:
        cache[table] = torch.nan
    case.layout.block_table[0, :3] += case.num_blocks
    assert torch.equal(backend.forward(case.query, kv, backend.build_metadata(case.layout)), direct)


def test_rows_of_padding_are_finite():
    case = make_case(make_spec(), [(5, 1), (7, 2)])
    backend = PagedAttention(case.spec)
    kv = backend.allocate(case.num_blocks, 16, torch.device("cpu"))
    padded = torch.full((6, *case.query.shape[1:]), torch.nan)
    assert torch.isfinite(backend.forward(padded, kv, backend.build_metadata(case.layout))[3:]).all()


def test_a_cache_that_does_not_fit_is_refused_before_it_is_claimed():
    with pytest.raises(MemoryError, match="does not fit"):
        PagedAttention(make_spec()).allocate(1 << 34, 16, torch.device("cpu"))


def test_layout_states_what_allocate_takes():
    for head_size in (33, 64):
        backend = PagedAttention(make_spec(head_size=head_size, dtype="bfloat16"))
        kv = backend.allocate(10, 32, torch.device("cpu"))
        assert sum(cache.nbytes for cache in kv) == backend.kv_layout().bytes_per_token * 10 * 32


_OTHER_ISA = """
import json, sys, numpy as np
from mvllm_cpu import kernels
from mvllm_cpu.paged_attention import PagedAttention
from mvllm.testing.attention_cases import make_spec
from platforms.cpu.tests.dense_attention import make_case, run
requests = json.loads(sys.argv[2])
found = [run(PagedAttention(make_spec(6, 2, 72, d)), make_case(make_spec(6, 2, 72, d), requests)) for d in sys.argv[3:]]
np.savez(sys.argv[1], *[x.double().numpy() for x in found])
print(kernels.load().isa)
"""


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_instruction_sets_agree(isa, tmp_path, request):
    dtypes = list(TOLERANCE)
    command = [sys.executable, "-c", _OTHER_ISA, str(tmp_path / "found.npz"), json.dumps(MIXED), *dtypes]
    environment = {
        **os.environ,
        "MVLLM_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(request.config.rootpath), *sys.path]),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() != isa:
        pytest.skip(f"this processor has no {isa}")
    for dtype, found in zip(dtypes, np.load(tmp_path / "found.npz").values()):
        case = make_case(make_spec(6, 2, 72, dtype), MIXED)
        expected = run(PagedAttention(case.spec), case)
        assert np.abs(found - expected.double().numpy()).max() < TOLERANCE[dtype]
