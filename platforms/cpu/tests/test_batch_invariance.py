"""The engine's setting batch_invariant on this platform: the bits of a row depend on nothing else in the step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from platforms.cpu.tests.dense_attention import make_case, run
from platforms.cpu.tests.test_paged_attention import num_sharing_requests, single_request, with_common_prefix

from mvllm.config.engine_args import EngineArgs
from mvllm.ops.draw import draw_block, filtered_draw
from mvllm.plugin_api import OpCase, Refusals
from mvllm.testing.attention_cases import make_spec
from mvllm_cpu import kernels
from mvllm_cpu.linear import Linear
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.paged_attention import PagedAttention
from mvllm_cpu.platform import CPUPlatform

LOADED = kernels.load()
needs_kernels = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

THREADS = (2, 5)
STEP = [(0, 300), (700, 1), (610, 1), (255, 2), (20, 1), (1023, 1), (511, 40)]
"""(tokens computed before, new tokens), around the boundaries of segments of keys."""

FIELDS = (
    {"dtype": "bfloat16"},
    {"dtype": "float32", "num_kv_heads": 1},
    {"dtype": "float16", "sliding_window": 270},
    {"dtype": "bfloat16", "kv_dtype": "int8", "soft_cap": 3.0},
    {"dtype": "bfloat16", "num_heads": 20, "num_kv_heads": 1, "sinks": True},
    {"dtype": "bfloat16", "num_kv_heads": 1, "value_head_size": 32, "values_in_keys": True},
)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_attention_does_not_depend_on_threads_or_other_requests(fields, set_threads):
    spec = make_spec(batch_invariant=True, **fields)
    case = make_case(spec, STEP)
    set_threads(1)
    alone = torch.cat([run(PagedAttention(spec), request_of(case, r)) for r in range(len(STEP))])
    for count in THREADS:
        set_threads(count)
        assert torch.equal(run(PagedAttention(spec), case), alone)
    start = 0
    for r, (_, new) in enumerate(STEP):  # with 5 threads long contexts are split
        assert torch.equal(run(PagedAttention(spec), request_of(case, r)), alone[start : start + new])
        start += new


def request_of(case, r):
    """Request r of a case in a step of its own."""
    start = sum(new for _, new in case.requests[:r])
    alone = make_case(case.spec, [case.requests[r]])
    return dataclasses.replace(
        alone,
        keys=[case.keys[r]],
        values=[case.values[r]],
        query=case.query[start : start + case.requests[r][1]],
        sinks=case.sinks,
    )


@needs_kernels
@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str)
def test_a_prefix_whose_keys_are_read_once_does_not_change_bits(fields, set_threads):
    requests = [(600, 1), (590, 1), (580, 1), (801, 1), (615, 1)]
    case = with_common_prefix(make_case(make_spec(batch_invariant=True, **fields), requests), 576)
    set_threads(1)
    assert num_sharing_requests(case) == len(requests)
    together = run(PagedAttention(case.spec), case)
    set_threads(2)
    for r in range(len(requests)):
        assert torch.equal(together[r : r + 1], run(PagedAttention(case.spec), single_request(case, r)))


@needs_kernels
def test_logsumexp_of_rows_without_finite_logits():
    logits = torch.randn(5, 77)
    logits[1], logits[2, 4], logits[3, 76], logits[4, :76] = -torch.inf, torch.nan, torch.inf, -torch.inf
    found = KernelOps(LOADED.library).logsumexp(logits)
    torch.testing.assert_close(found, torch.logsumexp(logits, dim=1), equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("vocab", [5, 33, 1000, pytest.param(20000, marks=pytest.mark.exhaustive)])
def test_draws_are_the_references_and_independent_of_other_rows(vocab):
    """float64 decides which draws are clear: those that small changes of the random numbers do not change."""
    draw, rng = KernelOps(LOADED.library).filtered_draw, torch.Generator().manual_seed(vocab)
    num_clear, block = 0, draw_block(vocab)
    for trial in range(12):
        logits = torch.randn(8, vocab, generator=rng) * 4
        logits = logits.round() if trial % 3 == 0 else logits  # ties
        off = torch.rand(3, 8, generator=rng) < 0.5
        settings = (
            logits.amax(dim=1),
            1 / torch.tensor([0.2, 0.7, 1.0, 1.5, 3.0, 1.0, 1.0, 1.0]),
            torch.where(off[0], -torch.inf, -torch.rand(8, generator=rng) * 5),
            torch.where(off[1], vocab, torch.randint(1, min(vocab, 50) + 1, (8,), generator=rng)),
            torch.where(off[2], 1.0, torch.rand(8, generator=rng) * 0.99 + 0.005),
        )
        coarse, fine = torch.rand(2, 8, generator=rng) * 0.999
        found = draw(logits, *settings, coarse, fine, block)
        wide = [x.double() if x.is_floating_point() else x for x in (logits, *settings)]
        near = [filtered_draw(*wide, coarse + by, fine + by, block) for by in (0, 1e-5, -1e-5)]
        clear = (near[0] == near[1]) & (near[0] == near[2])
        assert torch.equal(found[clear], near[0][clear])
        num_clear += int(clear.sum())
        for row in range(8):
            alone = draw(*(x[row : row + 1] for x in (logits, *settings, coarse, fine)), block)
            assert alone.item() == found[row].item()
    assert num_clear > 80


@needs_kernels
def test_rows_without_a_finite_logit_draw_some_token():
    logits = torch.full((3, 40), -torch.inf)
    logits[1, 3], logits[2, 5] = torch.nan, torch.inf
    ones, k = torch.ones(3), torch.full((3,), 40)
    peaks = logits.amax(dim=1)
    found = KernelOps(LOADED.library).filtered_draw(
        logits, peaks, ones, -torch.inf * ones, k, ones, ones / 2, ones / 2, 8
    )
    assert ((found >= 0) & (found < 40)).all()


@needs_kernels
def test_the_kernel_multiplies_on_every_instruction_set():
    """Elsewhere another provider may be faster, whose sums depend on the number of rows."""
    facts = {"in_features": 64, "out_features": 64, "bias": False}
    for isa in ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16"):
        linear = Linear(LOADED.library, isa)
        for dtype in ("float32", "bfloat16", "float16"):
            assert linear.supports(OpCase("linear", dtype, facts, batch_invariant=True)) == []
    assert Linear(LOADED.library, "generic").supports(OpCase("linear", "bfloat16", facts))


def test_without_kernels_the_setting_is_refused(monkeypatch):
    monkeypatch.setenv("MVLLM_CPU_KERNELS", "0")
    config = EngineArgs.from_kwargs(model="demo", batch_invariant=True).create_engine_config()
    answer = CPUPlatform().plan(config)
    assert isinstance(answer, Refusals)
    assert [refusal.field for refusal in answer.reasons] == ["batch_invariant"]
    assert "MVLLM_CPU_KERNELS=0" in answer.reasons[0].reason
