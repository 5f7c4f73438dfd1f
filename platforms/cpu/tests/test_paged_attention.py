"""The attention kernels against a dense float64 oracle, on every instruction set that this processor has."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from platforms.cpu.tests.dense_attention import attend_densely, make_case, run
from platforms.cpu.tests.instruction_sets import skip_unless_supported

from mvllm.attention import kv_quantization
from mvllm.testing.attention_cases import make_layout, make_spec, stored
from mvllm_cpu import kernels
from mvllm_cpu.memory import HUGE_PAGE
from mvllm_cpu.paged_attention import PagedAttention

pytestmark = pytest.mark.skipif(kernels.load().library is None, reason=f"no kernels: {kernels.load().reason}")

# Results are rounded once to the compute dtype; values here are of order one, a few at most.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 2e-3}

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")

MIXED = [(0, 37), (100, 1), (15, 1), (16, 1), (200, 5), (0, 1), (33, 70), (700, 1)]
"""(tokens computed before, new tokens): prompts, decodes and chunks in one batch, around the boundaries of blocks."""


def assert_right(case, *, tolerance=None):
    found = run(PagedAttention(case.spec), case)
    assert found.dtype == case.query.dtype
    error = (found.double() - attend_densely(case)).abs().max().item()
    assert error < (tolerance or TOLERANCE[case.spec.dtype])  # also fails for NaN


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [33, 40, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_size(dtype, head_size):
    assert_right(make_case(make_spec(head_size=head_size, dtype=dtype), MIXED))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (5, 5), (14, 2), (8, 1), (17, 1), (40, 1), (71, 1)])
def test_every_ratio_of_heads(dtype, heads):
    assert_right(make_case(make_spec(*heads, dtype=dtype), MIXED))


@pytest.mark.parametrize("heads", [(2, 1), (8, 1)])
def test_probabilities_of_decodes_are_not_rounded_to_bfloat16(heads):
    """Adjacent tokens with opposite values nearly cancel, so errors of probabilities would be most of the result."""
    case = make_case(make_spec(*heads, 64, "bfloat16"), [(127, 1), (300, 1), (16, 1)], spread=0.5)
    for keys, values in zip(case.keys, case.values, strict=True):
        pairs = len(keys) // 2
        values[1 : 2 * pairs : 2] = -values[0 : 2 * pairs : 2]
        keys[1 : 2 * pairs : 2] = keys[0 : 2 * pairs : 2] + torch.randn_like(keys[0 : 2 * pairs : 2]) / 64
        values[2 * pairs :] = 0
    found, exact = run(PagedAttention(case.spec), case).double(), attend_densely(case)
    assert ((found - exact).abs() <= exact.abs() / 200 + 3e-5).all()


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


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [33, 40, 128])
def test_cache_of_another_dtype_than_the_model(dtype, kv_dtype, head_size):
    for features in ({}, {"sliding_window": 20, "soft_cap": 3.0, "sinks": True}):
        spec = make_spec(dtype=dtype, kv_dtype=kv_dtype, head_size=head_size, **features)
        for block_size in (16, 64):
            assert_right(make_case(spec, MIXED, block_size=block_size, spread=0.5))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e4])
def test_8_bit_caches_keep_their_precision_at_every_magnitude(kv_dtype, spread):
    """A query with one visible key gets its value, within half a step of the dtype, for any scale."""
    spec = make_spec(2, 2, 64, "float32", kv_dtype=kv_dtype)
    case = make_case(spec, [(0, 1)] * 30, spread=spread)
    case.values[3][:] = 0
    case.values[4][..., 1:] *= 1e-4  # an outlier affects its own vector only
    values = torch.cat(case.values)
    error = (run(PagedAttention(spec), case).view(values.shape) - values).abs()
    largest = values.abs().amax(dim=-1, keepdim=True)
    allowed = largest / 254 if kv_dtype == "int8" else values.abs() / 16 + largest / 2**18
    assert (error <= allowed * 1.001).all()


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_8_bit_caches_keep_nan(kv_dtype):
    spec = make_spec(2, 2, 64, "float32", kv_dtype=kv_dtype)
    case = make_case(spec, [(0, 1), (0, 1)])
    case.values[0][0, 1, 7] = torch.nan
    found = run(PagedAttention(spec), case).view(2, 2, 64)
    assert found[0, 1].isnan().all() and not found[0, 0].isnan().any() and not found[1].isnan().any()


LATENT = {"value_head_size": 512, "values_in_keys": True}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_that_are_the_first_elements_of_the_keys(dtype, kv_dtype):
    requests = [(0, 37), (100, 1), (15, 1), (200, 5), (300, 1)]
    for heads, sizes in (((16, 1), (576, 512)), ((3, 1), (40, 24)), ((4, 2), (33, 33)), ((128, 1), (48, 16))):
        spec = make_spec(
            *heads, sizes[0], dtype, kv_dtype=kv_dtype, value_head_size=sizes[1], values_in_keys=True, sinks=True
        )
        assert_right(make_case(spec, requests, block_size=32, spread=0.5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(192, 128), (64, 96), (40, 33)], ids=str)
def test_value_heads_of_another_size(dtype, sizes):
    assert_right(make_case(make_spec(4, 2, sizes[0], dtype, value_head_size=sizes[1]), MIXED))


def test_a_long_latent_context_is_split_over_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert_right(make_case(make_spec(16, 1, 576, "bfloat16", **LATENT), [(3000, 1)]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("head_size", [64, 128])
def test_prompts_of_many_tiles(head_size):
    assert_right(make_case(make_spec(4, 2, head_size, "bfloat16"), [(0, 700), (130, 300), (90, 1)], spread=0.7))


RAGGED = [(0, 47), (15, 17), (16, 33), (129, 2), (127, 1), (250, 31)]
"""Numbers of new tokens and of keys that leave partial tiles of 16 rows, of 16 and of 32 keys."""


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 1},
        {"sliding_window": 17, "sinks": True},
        {"sliding_window": 130, "soft_cap": 3.0},
        {"num_heads": 7, "num_kv_heads": 1, "value_head_size": 33},
        {"num_heads": 20, "num_kv_heads": 1, "head_size": 126},
        {"num_heads": 16, "num_kv_heads": 1, "head_size": 96, "value_head_size": 80, "values_in_keys": True},
    ],
    ids=str,
)
def test_chunks_that_leave_partial_tiles(kv_dtype, fields):
    """The cache contains NaN in all slots without a token."""
    spec = make_spec(**{"dtype": "bfloat16", "kv_dtype": kv_dtype, "head_size": 64, **fields})
    for block_size in (16, 64):
        assert_right(make_case(spec, RAGGED, block_size=block_size, spread=0.5))


def test_scores_with_a_large_range_neither_overflow_nor_vanish():
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


def test_slots_of_minus_one_store_nothing():
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


def test_a_cache_that_does_not_fit_is_refused_before_allocation():
    with pytest.raises(MemoryError, match="does not fit"):
        PagedAttention(make_spec()).allocate(1 << 34, 16, torch.device("cpu"))


def test_kv_layout_gives_the_allocated_bytes():
    for head_size in (33, 64):
        for kv_dtype in KV_DTYPES:
            for shape in ({}, {"value_head_size": 24}, {"value_head_size": 24, "values_in_keys": True}):
                backend = PagedAttention(make_spec(head_size=head_size, dtype="bfloat16", kv_dtype=kv_dtype, **shape))
                kv = backend.allocate(10, 32, torch.device("cpu"))
                assert sum(cache.nbytes for cache in kv) == backend.kv_layout().bytes_per_token * 10 * 32


def test_8_bit_caches_take_half_of_16_bits_and_the_scales():
    sixteen = PagedAttention(make_spec(4, 2, 64, "bfloat16")).kv_layout().bytes_per_token
    for kv_dtype in ("int8", "float8_e4m3fn"):
        eight = PagedAttention(make_spec(4, 2, 64, "bfloat16", kv_dtype=kv_dtype)).kv_layout().bytes_per_token
        assert eight == sixteen // 2 + 2 * 2 * 4


_OTHER_ISA = """
import json, sys, numpy as np
from mvllm_cpu import kernels
from mvllm_cpu.paged_attention import PagedAttention
from mvllm.testing.attention_cases import make_spec
from platforms.cpu.tests.dense_attention import make_case, run
requests = json.loads(sys.argv[2])
specs = [make_spec(**fields) for fields in json.loads(sys.argv[3])]
found = [run(PagedAttention(spec), make_case(spec, requests)) for spec in specs]
np.savez(sys.argv[1], *[x.double().numpy() for x in found])
print(kernels.load().isa)
"""


OTHER_ISA_SPECS = [
    *({"num_heads": 6, "head_size": 72, "dtype": dtype} for dtype in TOLERANCE),
    *({"num_heads": 6, "head_size": 72, "dtype": "bfloat16", "kv_dtype": kv_dtype} for kv_dtype in KV_DTYPES),
    {"head_size": 40, "dtype": "float32", "kv_dtype": "int8", "soft_cap": 3.0, "sliding_window": 20, "sinks": True},
    {"head_size": 33, "dtype": "float32", "kv_dtype": "float8_e4m3fn"},
    {"num_kv_heads": 1, "head_size": 144, "dtype": "float32", "value_head_size": 112, "values_in_keys": True},
    {"num_kv_heads": 1, "head_size": 144, "dtype": "bfloat16", "value_head_size": 112, "values_in_keys": True},
    {"num_heads": 2, "head_size": 128, "dtype": "float16", "sliding_window": 50, "sinks": True},
]


@pytest.mark.parametrize("isa", ["generic", "avx2", pytest.param("avx512", marks=pytest.mark.exhaustive)])
def test_instruction_sets_agree(isa, tmp_path, request):
    """Compares each instruction set with float64, in a new process."""
    skip_unless_supported(isa)
    specs = json.dumps(OTHER_ISA_SPECS)
    command = [sys.executable, "-c", _OTHER_ISA, str(tmp_path / "found.npz"), json.dumps(MIXED), specs]
    environment = {
        **os.environ,
        "MVLLM_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(request.config.rootpath), *sys.path]),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == isa
    for fields, found in zip(OTHER_ISA_SPECS, np.load(tmp_path / "found.npz").values()):
        case = make_case(make_spec(**fields), MIXED)
        assert np.abs(found - attend_densely(case).numpy()).max() < TOLERANCE[case.spec.dtype], fields


def test_a_new_cache_is_prefaulted():
    """A background thread touches all pages, does not change values, and stops when a cache is freed."""
    backend = PagedAttention(make_spec(8, 8, 64, "bfloat16"))
    library = kernels.load().library
    touched = library.mvllm_cpu_prefaulted_bytes
    touched.argtypes, touched.restype = (ctypes.c_void_p,), ctypes.c_int64
    cache = backend.allocate(512, 16, torch.device("cpu"))
    cache[1][300] = 3
    assert min(part.nbytes for part in cache) >= 4 * HUGE_PAGE
    addresses, deadline = [part.data_ptr() for part in cache], time.monotonic() + 120
    while any(touched(part.data_ptr()) < part.nbytes for part in cache):
        assert time.monotonic() < deadline, "the cache is not prefaulted"
        time.sleep(0.02)
    assert not cache[0].any() and (cache[1] == 3).sum() == cache[1][300].numel()
    dropped = backend.allocate(512, 16, torch.device("cpu"))
    addresses += [part.data_ptr() for part in dropped]
    del cache, dropped
    assert [touched(address) for address in addresses] == [-1] * 4
    backend.allocate(1, 16, torch.device("cpu"))


def test_a_cache_is_allocated_even_if_no_thread_can_be_started():
    code = """
import os, resource
import torch
from mvllm.testing.attention_cases import make_spec
from mvllm_cpu.paged_attention import PagedAttention
backend = PagedAttention(make_spec(8, 8, head_size=128, dtype="bfloat16"))
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    os.setuid(65534)  # the limit does not bind the superuser
cache = backend.allocate(1024, 16, torch.device("cpu"))
assert cache[0].nbytes == 1024 * 16 * 8 * 128 * 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def with_common_prefix(case, count):
    """Makes the first `count` tokens of all requests equal to those of the first request, in the same blocks."""
    blocks = count // case.layout.block_size
    for r in range(1, len(case.requests)):
        for whole in (case.keys, case.values):
            whole[r][:count] = whole[0][:count]
        case.layout.block_table[r, :blocks] = case.layout.block_table[0, :blocks]
    return case


def single_request(case, r):
    """A step with request `r` of a case only."""
    first = int(case.layout.query_start_loc[r])
    return dataclasses.replace(
        case,
        requests=[case.requests[r]],
        layout=make_layout([case.requests[r]], case.layout.block_table[r : r + 1], case.layout.block_size),
        keys=[case.keys[r]],
        values=[case.values[r]],
        query=case.query[first : first + case.requests[r][1]],
    )


def num_sharing_requests(case):
    backend = PagedAttention(case.spec)
    metadata = backend.build_metadata(case.layout)
    return backend._library.mvllm_cpu_step_sharing(ctypes.c_void_p(metadata.handle))


PREFIX_REQUESTS = [(400, 1), (390, 1), (384, 1), (601, 1), (415, 1), (384, 1), (500, 1), (399, 1), (450, 1)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_heads": 12, "num_kv_heads": 12, "dtype": "bfloat16"},
        {"num_heads": 8, "num_kv_heads": 1, "head_size": 33, "dtype": "bfloat16", "sinks": True},
        {"num_heads": 20, "num_kv_heads": 1, "head_size": 80, "dtype": "float16", "soft_cap": 3.0},
        {"dtype": "bfloat16", "kv_dtype": "int8"},
        {"num_kv_heads": 1, "dtype": "bfloat16", "value_head_size": 32, "values_in_keys": True},
        {"sliding_window": 200},
    ],
    ids=str,
)
def test_decodes_with_a_common_prefix_read_its_keys_once(fields):
    """All requests are decodes; results are bit-identical to those of each request alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # with more threads, a single request is split along its keys, which changes the order of sums
    try:
        case = with_common_prefix(make_case(make_spec(**fields), PREFIX_REQUESTS), 384)
        assert num_sharing_requests(case) == (0 if "sliding_window" in fields else len(PREFIX_REQUESTS))
        assert_right(case, tolerance=5e-2 if "kv_dtype" in fields else None)
        together = run(PagedAttention(case.spec), case)
        for r in range(len(PREFIX_REQUESTS)):
            assert torch.equal(together[r : r + 1], run(PagedAttention(case.spec), single_request(case, r)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("requests", "count", "sharing"),
    [
        (
            [(300, 1), (300, 3), (300, 1), (310, 1)],
            288,
            2,
        ),  # a prompt chunk does not share, and separates others
        ([(300, 1), (300, 1)], 240, 0),  # too few
        ([(256, 1), (256, 1)], 256, 2),  # the blocks of new tokens are not shared
        ([(256, 1), (900, 1), (900, 1)], 256, 0),  # most keys of some requests are not shared
        ([(300, 1), (0, 1), (300, 1)], 0, 0),
    ],
)
def test_which_requests_share_the_read_of_a_prefix(requests, count, sharing):
    case = with_common_prefix(make_case(make_spec(12, 12), requests), count)
    assert num_sharing_requests(case) == sharing
    assert_right(case)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("features", [{}, {"value_head_size": 16, "values_in_keys": True, "num_kv_heads": 1}])
def test_read_slots_returns_written_values_and_fill_skips_padding(kv_dtype, features):
    backend = PagedAttention(make_spec(head_size=33, kv_dtype=kv_dtype, **features))
    spec, size = backend.spec, 32
    kv = backend.allocate(4, size, torch.device("cpu"))
    slots = torch.tensor([2 * size + 30, 2 * size + 31, size, size + 1, size + 2])
    keys = torch.randn(5, spec.num_kv_heads, spec.head_size)
    values = keys[..., : spec.value_size] if spec.values_in_keys else torch.randn_like(keys)
    layout = make_layout([(30, 5)], np.array([[2, 1]], dtype=np.int32), size)
    backend.write_kv(kv, keys, values, backend.build_metadata(layout))
    read = backend.read_slots(kv, slots)
    assert backend.kv_bytes(kv) == 4 * size * backend.kv_layout().bytes_per_token
    for index, given in enumerate([keys] if spec.values_in_keys else [keys, values]):
        half = len(read) // 2
        if kv_dtype in kv_quantization.LARGEST:
            found = kv_quantization.decode(read[index], read[half + index if len(read) > 2 else 1], kv_dtype).double()
            assert float((found - stored(given, kv_dtype)).abs().max()) <= float(given.abs().max()) / 16
        else:
            assert torch.equal(read[index].double(), stored(given, kv_dtype))
    others = torch.tensor([slot for slot in range(4 * size) if slot not in slots.tolist()])
    assert not any(part.any() for part in backend.read_slots(kv, others))
    backend.fill(kv, float("nan"))
    padding = sum(part.numel() - torch.isnan(part).sum() for part in kv if part.is_floating_point())
    filled = [part for part in backend.read_slots(kv, torch.arange(4 * size)) if part.is_floating_point()]
    assert filled and all(torch.isnan(part).all() for part in filled)
    if kv_dtype not in kv_quantization.LARGEST:
        assert padding == sum(part.numel() for part in kv) - sum(part.numel() for part in filled)
