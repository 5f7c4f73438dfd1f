"""Operations of torch that recorded steps contain: replayed with the bits of torch, and enough for whole families."""

from __future__ import annotations

import pytest
import torch

from mvllm import LLM, SamplingParams
from mvllm_cpu import kernels
from mvllm_cpu.linear import FASTEST_WITH
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.replay import Replay, _Compiled
from tests.helpers.model_zoo import make_checkpoint

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conversions_row_factors_and_reordered_heads_are_replayed_with_the_bits_of_torch(dtype):
    """Of strided rows, as of the queries in one product with keys and values."""
    order, ops = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]), KernelOps(LOADED.library)

    def function(x, factors, wide):
        heads = x[:, : 4 * 8].view(len(x), 4, 8).index_select(-1, order)
        scaled = (heads.float() * wide.view(-1, 1, 1)).to(dtype)
        return ops.silu_and_mul(factors.to(dtype) * scaled.view(len(x), -1))

    compiled = Replay(LOADED.library).compile(function, dynamic=True)
    with torch.inference_mode():
        for rows in (1, 3):
            for seed in (0, 3, 6):
                x = random(rows, 48, seed=seed, dtype=dtype)
                factors, wide = random(rows, 1, seed=seed + 1), random(rows, seed=seed + 2)
                assert torch.equal(compiled(x, factors, wide), function(x, factors, wide))
    assert len(compiled._programs) == 2 and None not in compiled._programs.values()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)

REVERSED, ROWS, TABLE_ROWS = torch.arange(20).flip(0), torch.tensor([2, 0, 1, 2]), torch.tensor([[1, 2], [0, 0]])

ELEMENTWISE = {
    "of two vectors": lambda x, y: x[:, 0] * y[:, 0],
    "of strided rows": lambda x, y: x[:, 1:3] - y[:, :2],
    "with a vector": lambda x, y: x / y[0, 0],
    "with a row": lambda x, y: y[:, :1] + x,
    "with a factor for each row": lambda x, y: x * y[:, :1, :1],
    "of a transposed tensor": lambda x, y: x.transpose(0, 2) * y.transpose(0, 2),
    "of two dtypes": lambda x, y: x * y.float(),
    "with a number": lambda x, y: ((x[:, 1:] + 0.3) * 1.7 - 0.7)[:, 1:] * 0.3,
    "conversion": lambda x, y: x.transpose(1, 2).to(torch.float16).to(torch.bfloat16),
    "joined": lambda x, y: torch.cat((x[:, :2], y.transpose(0, 1).reshape(3, 4, 20)[:, 1:]), dim=1),
    "reshaped": lambda x, y: x.transpose(0, 1).reshape(-1, 20),
    "flattened": lambda x, y: x[:, 1:3].flatten(1),
    "contiguous": lambda x, y: y.permute(2, 0, 1).contiguous(),
    "columns": lambda x, y: x[:, 2].index_select(-1, REVERSED),
    "rows": lambda x, y: x.index_select(0, ROWS),
    "looked up": lambda x, y: x[TABLE_ROWS],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_operations_and_copies_are_replayed_with_the_bits_of_torch(function, dtype):
    compiled = Replay(LOADED.library).compile(lambda x, y: torch.cat((function(x, y),), dim=0), dynamic=True)
    with torch.inference_mode():
        for seed in range(0, 6, 2):
            x, y = (random(3, 4, 20, seed=seed + i, dtype=dtype) for i in range(2))
            assert torch.equal(compiled(x, y), function(x, y))
    assert not compiled.refusals


def test_integers_are_replayed_as_torch_computes_them():
    """The rows of two RoPE tables by the length of the prompt, and the choice between two embeddings."""
    table, other = random(40, 8, seed=1), random(40, 8, seed=2)

    def step(ids, lens):
        rows = table.index_select(0, ids + 20 * (lens > 3))
        codes = ids - 4
        is_code = codes >= 0
        code_rows = other.index_select(0, torch.maximum(codes, lens).clamp(min=2))
        return torch.where(is_code.unsqueeze(1), code_rows, table[torch.where(is_code, 1, ids)]) + rows

    compiled = Replay(LOADED.library).compile(step, dynamic=True)
    with torch.inference_mode():
        for dtype in (torch.int32, torch.int64):
            for ids, lens in (([1, 2, 9], [1, 4, 5]), ([7, 0, 3], [4, 3, 2])):
                arguments = torch.tensor(ids, dtype=dtype), torch.tensor(lens, dtype=dtype)
                assert torch.equal(compiled(*arguments), step(*arguments))
    assert not compiled.refusals


def test_conversions_have_the_bits_of_torch():
    """Rounding to even, overflow, infinities; NaN remains NaN, of which torch has several."""
    torch_ops = Replay(LOADED.library).torch_ops
    bits = [0x3F808000, 0x3F818000, 0x7F7FFFFF, -0x00800000, 0x7F800000, 0x00000001, 0x7FC00000, 0x3F808001]
    x = torch.stack((torch.tensor(bits).int().view(torch.float32), random(8, seed=1)))
    narrow = torch_ops.compute("aten::to.dtype", (x, torch.bfloat16), None)
    numbers = ~x.isnan()
    assert torch.equal(narrow.view(torch.int16)[numbers], x.bfloat16().view(torch.int16)[numbers])
    assert torch.equal(narrow.isnan(), x.isnan())
    wide = torch_ops.compute("aten::_to_copy", (narrow,), {"dtype": torch.float32})
    assert torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten::to.dtype", (torch.ones(2, 2), torch.float64)),
        ("aten::to.dtype", (torch.ones(2, 2), torch.float32)),
        ("aten::to.dtype", (torch.ones(2, 2, dtype=torch.int32), torch.float32)),
        ("aten::to.dtype", (torch.ones(2, 2), torch.bfloat16, True)),
        ("aten::mul.Tensor", (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64))),
        ("aten::mul.Tensor", (torch.ones(2, 4), torch.tensor(2.0, dtype=torch.bfloat16))),
        ("aten::mul.Tensor", (torch.ones(2, 4), torch.ones(2, 1, dtype=torch.int64))),
        ("aten::mul.Tensor", (torch.ones(2, 4), torch.ones(3, 1))),
        ("aten::mul.Tensor", (torch.ones(2, 3, 2, 3, 2).permute(4, 2, 0, 3, 1), torch.ones(2, 1, 1, 1, 1))),
        ("aten::add.Tensor", (torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64))),
        ("aten::cat", ([torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)], 0)),
        ("aten::where.self", (torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4), torch.zeros(2, 4))),
        ("aten::index_select", (torch.ones(2, 3, 4), 1, torch.tensor([0]))),
        ("aten::index.Tensor", (torch.ones(2, 4), [None, torch.tensor([0])])),
    ],
)
def test_other_forms_are_left_to_torch(name, args):
    assert Replay(LOADED.library).torch_ops.compute(name, args, {}) is None


@pytest.mark.parametrize(
    "name",
    [
        "llama4",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("glm4moe", "minimaxm2", "ernie45moe", "hunyuanmoe", "llama4-interleaved", "exaonemoe")
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_decode_steps_of_large_mixtures_are_recorded(name, dtype, tmp_path, monkeypatch):
    """For one and for several requests."""
    if LOADED.isa not in FASTEST_WITH[dtype]:
        pytest.skip(f"torch's products of {dtype} are the faster ones with {LOADED.isa}, and they are not recorded")
    made = []

    def compile_and_keep(backend, function, *, dynamic):
        made.append(_Compiled(backend, function))
        return made[-1]

    monkeypatch.setattr(Replay, "compile", compile_and_keep)
    with LLM(str(make_checkpoint(name, tmp_path)), dtype=dtype, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        for count in (1, 3):
            llm.generate([{"prompt_token_ids": [5, 6 + i]} for i in range(count)], params, use_tqdm=False)
    (compiled,) = made
    assert len(compiled._programs) == 4 and None not in compiled._programs.values()
