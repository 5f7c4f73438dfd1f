"""Attention in both directions: non-causal spans of prompts, and the operation `encoder_attention`."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest
import torch
from platforms.cpu.tests.dense_attention import runtime
from platforms.cpu.tests.test_paged_attention import KV_DTYPES, TOLERANCE

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.dtypes import torch_dtype
from mvllm.plugin_api import OpCase
from mvllm.testing.attention_cases import expected, make_case, make_spec, run, tolerance
from mvllm_cpu import kernels
from mvllm_cpu.encoder_attention import LAYOUTS, EncoderAttention
from mvllm_cpu.paged_attention import PagedAttention

pytestmark = pytest.mark.skipif(kernels.load().library is None, reason=f"no kernels: {kernels.load().reason}")

REQUESTS = [(100, 1), (0, 37), (40, 170), (25, 31), (8, 1), (0, 20)]
SPANS = [[(3, 60)], [(0, 12), (12, 37)], [(20, 180), (190, 210)], [(10, 50)], [(2, 9)], [(1, 19)]]
"""Spans before a step, at both ends of prompts, over several tiles and chunks of keys, and with a rest in the step."""


exhaustive = pytest.mark.exhaustive


def more(*values):
    """Cases of exhaustive runs only."""
    return [pytest.param(value, marks=exhaustive) for value in values]


@pytest.fixture(params=[pytest.param(1, marks=exhaustive), 3], ids=["1 thread", "3 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


IN_EVERY_RUN = {("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float16", "float8_e4m3fn")}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [pytest.param(*pair, marks=() if pair in IN_EVERY_RUN else exhaustive) for pair in product(TOLERANCE, KV_DTYPES)],
)
@pytest.mark.parametrize("features", [{}, {"sliding_window": 20, "soft_cap": 3.0, "sinks": True}], ids=["plain", "all"])
def test_spans_in_every_dtype(dtype, kv_dtype, features):
    for heads, size, block_size in (((4, 2), 64, 16), ((14, 2), 40, 64)):
        spec = make_spec(*heads, size, dtype, kv_dtype=kv_dtype, non_causal_spans=True, **features)
        case = make_case(spec, REQUESTS, block_size=block_size, spread=0.5, padding=3, spans=SPANS)
        found = run(PagedAttention(spec), runtime(), case, poison=torch.nan)[: case.num_real_tokens]
        torch.testing.assert_close(found.double(), expected(case), atol=tolerance(dtype, kv_dtype), rtol=0)


@pytest.mark.parametrize("window", [20, None, *more(1, 128, 270)])
def test_spans_and_windows_over_many_tiles(window, threads):
    spec = make_spec(2, 1, 64, non_causal_spans=True, sliding_window=window)
    requests, spans = [(0, 400), (300, 150)], [[(100, 390)], [(250, 400), (401, 440)]]
    case = make_case(spec, requests, block_size=16, spans=spans)
    found = run(PagedAttention(spec), runtime(), case, poison=torch.nan)
    torch.testing.assert_close(found.double(), expected(case), atol=5e-6, rtol=0)


def test_values_in_keys_have_spans():
    spec = make_spec(8, 1, 96, value_head_size=64, values_in_keys=True, non_causal_spans=True)
    case = make_case(spec, REQUESTS, block_size=16, spans=SPANS)
    found = run(PagedAttention(spec), runtime(), case, poison=torch.nan)
    torch.testing.assert_close(found.double(), expected(case), atol=5e-6, rtol=0)


def make_arguments(dtype, lens, heads, size, key_lens=None):
    """Views of fused projections, and the starts of the sequences."""
    generator = torch.Generator().manual_seed(len(lens))
    num_heads, num_kv_heads = heads
    starts = tuple(accumulate(lens, initial=0))
    keys_of = starts if key_lens is None else tuple(accumulate(key_lens, initial=0))
    query = torch.randn(starts[-1], num_heads + 1, size, generator=generator)[:, 1:]
    key, value = torch.randn(keys_of[-1], 2 * num_kv_heads, size, generator=generator).chunk(2, dim=1)
    tensors = [tensor.to(torch_dtype(dtype)) for tensor in (query, key, value)]
    return (*tensors, starts, size**-0.5, None if key_lens is None else keys_of)


def exact(arguments):
    return SCHEMAS["encoder_attention"].reference(*(arg.double() if torch.is_tensor(arg) else arg for arg in arguments))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [72, *more(20, 64, 80, 128, 256)])
def test_encoders_in_every_dtype_and_size(dtype, size, threads):
    op = EncoderAttention(kernels.load().library)
    for lens, key_lens in (((1, 16, 33, 0, 17, 300), None), ((64,) * 9, None), ((5, 1, 40), (128, 3, 260))):
        for heads in ((3, 3), (4, 2)):
            arguments = make_arguments(dtype, lens, heads, size, key_lens)
            found = op.encoder_attention(*arguments)
            assert found.dtype == torch_dtype(dtype)
            torch.testing.assert_close(found.double(), exact(arguments), atol=TOLERANCE[dtype], rtol=0)


def test_a_sequence_has_the_same_bits_among_others_with_batch_invariance(threads):
    op = EncoderAttention(kernels.load().library)
    [provider] = [provider for provider in op.providers() if provider.batch_invariant]
    facts = {"num_heads": 4, "num_kv_heads": 4, "head_size": 72, "cross": False}
    assert provider.supports(OpCase("encoder_attention", "float32", facts))
    assert not provider.supports(OpCase("encoder_attention", "float32", facts, True))
    for dtype in TOLERANCE:
        query, key, value, starts, scale, _ = make_arguments(dtype, (3, 700, 50), (4, 4), 72)
        whole = provider.function(query, key, value, starts, scale)
        for start, stop in pairwise(starts):
            mine = slice(start, stop)
            alone = provider.function(query[mine], key[mine], value[mine], (0, stop - start), scale)
            assert torch.equal(alone, whole[mine])


def test_steps_are_kept_by_layout_and_settings():
    """Layers with the same sequences share one; others of the same call do not."""
    op = EncoderAttention(kernels.load().library)
    for dtype, lens, scale in (("float32", (9, 40), 0.5), ("float32", (9, 40), 0.1), ("bfloat16", (9, 40), 0.5)) * 2:
        arguments = [*make_arguments(dtype, lens, (4, 2), 64)]
        arguments[4] = scale
        found = op.encoder_attention(*arguments)
        torch.testing.assert_close(found.double(), exact(arguments), atol=TOLERANCE[dtype], rtol=0)
    assert len(op._steps) == 3
    for length in range(1, 20):
        op.encoder_attention(*make_arguments("float32", (length,), (2, 2), 64))
    assert len(op._steps) == LAYOUTS


def test_tokens_of_no_sequence_get_zeros():
    op = EncoderAttention(kernels.load().library)
    query, key, value, _, scale, _ = make_arguments("float32", (9,), (2, 2), 64)
    key[[0, 8]] = torch.nan
    found = op.encoder_attention(query, key, value, (1, 4, 8), scale)
    assert not found[[0, 8]].any()
    torch.testing.assert_close(found[1:8], exact((query[1:8], key[1:8], value[1:8], (0, 3, 7), scale)).float())
    assert not op.encoder_attention(query, key, value, (4, 4), scale).any()


def test_heads_that_the_kernels_do_not_take_are_left_to_the_reference():
    [provider, _] = EncoderAttention(kernels.load().library).providers()
    facts = {"num_heads": 2, "num_kv_heads": 2, "head_size": 30, "cross": False}
    assert "multiple of 4" in provider.supports(OpCase("encoder_attention", "float32", facts))[0]
