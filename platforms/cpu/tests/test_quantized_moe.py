"""Compiled experts with quantized weights against the reference, with the instruction set of the process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm.ops.block_formats import BLOCK_FORMATS
from mvllm.ops.quantized_moe import quantized_moe as reference
from mvllm.ops.quantized_moe import quantized_ungated_moe as ungated_reference
from mvllm.plugin_api import BlockQuantizedWeight, Float8Weight, OpCase, QuantizedWeight
from mvllm.testing.block_quantized_cases import block_quantized_weight, random_blocks
from mvllm_cpu import kernels
from mvllm_cpu.block_quantized_linear import FORMATS
from mvllm_cpu.quantized_moe import QuantizedMoe
from mvllm_cpu.replay import Replay

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CLAMPED = (1.702, 1.5)
SILU = (None, None)
FLOATS = (  # block_rows (None for all), block_columns, inputs
    (128, 128, "floats"),
    (128, 128, "dynamic"),
    (None, None, "static"),
    (1, None, "dynamic"),
    (48, 256, "floats"),
)
INTEGERS = (  # bits, group_size (None for a row), symmetric, int8_activations
    (8, None, True, True),
    (8, 32, False, True),
    (4, 32, False, True),
    (8, None, True, False),
    (4, 32, True, False),
    (4, 64, False, False),
)


@pytest.fixture(scope="module")
def op() -> QuantizedMoe:
    return QuantizedMoe(LOADED.library)


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def scaled_blocks(weight: BlockQuantizedWeight, seed: int) -> BlockQuantizedWeight:
    """A weight of the same format with different blocks."""
    parts = tuple(
        replace(part, data=random_blocks(part.format, len(part.data), weight.in_features, seed=seed + i))
        for i, part in enumerate(weight.parts)
    )
    return replace(weight, parts=parts)


def block_experts(formats, num_experts, hidden, inner, int8_activations=False):
    """Random experts. `formats`: of gate_up (one, or of gate and of up), and of down."""
    gate_up, down = formats
    parts = ((gate_up, 2 * inner),) if isinstance(gate_up, str) else tuple((name, inner) for name in gate_up)
    first = block_quantized_weight(parts, hidden, int8_activations)
    second = block_quantized_weight(((down, hidden),), inner, int8_activations)
    return tuple([scaled_blocks(weight, 10 * e) for e in range(num_experts)] for weight in (first, second))


def integer_experts(kind, num_experts, hidden, inner):
    return tuple(
        [integer_weight(kind, rows, columns, seed=e) for e in range(num_experts)]
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )


def integer_weight(kind, rows, columns, seed):
    bits, group_size, symmetric, int8_activations = kind
    group_size = min(group_size or columns, columns)
    generator, middle = torch.Generator().manual_seed(seed), 2 ** (bits - 1)
    groups = rows, -(-columns // group_size)
    scales = (torch.rand(groups, generator=generator) + 0.5) / (middle * columns**0.5)
    values = torch.randint(1 - middle, middle, (rows, columns), generator=generator).to(torch.int8)
    zeros = None if symmetric else torch.randint(-middle, middle, groups, generator=generator).to(torch.int8)
    if bits == 8 and zeros is not None:
        zeros //= 4
    return QuantizedWeight(values, scales, zeros, group_size, bits, int8_activations)


def float_experts(kind, num_experts, hidden, inner):
    return tuple(
        [float_weight(kind, rows, columns, seed=e) for e in range(num_experts)]
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )


def float_weight(kind, rows, columns, seed):
    block_rows, block_columns, inputs = kind
    block_rows, block_columns = min(block_rows or rows, rows), min(block_columns or columns, columns)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 3  # NaN
    shape = -(-rows // block_rows), -(-columns // block_columns)
    scales = (torch.rand(shape, generator=generator) + 0.5) / (128 * columns**0.5)
    input_scale = torch.tensor([0.01 * (seed + 1)]) if inputs == "static" else None
    return Float8Weight(codes, scales, block_rows, block_columns, inputs, input_scale)


def routing(rows, num_experts, top_k, *, among=None, seed=0):
    """Random distinct experts of each token (from `among` if given), and their weights."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.arange(num_experts) if among is None else torch.tensor(among)
    ids = torch.stack([names[torch.randperm(len(names), generator=generator)[:top_k]] for _ in range(rows)])
    return ids.view(rows, top_k), torch.softmax(torch.randn(rows, top_k, generator=generator), dim=-1)


def biases_of(experts, dtype):
    gate_up, down = experts
    return tuple(
        random(len(weights), weights[0].shape[0], dtype=dtype, seed=i) for i, weights in enumerate((gate_up, down))
    )


def call(function, weights, biases, x, chosen, gates=SILU):
    return function(x, weights[0], biases[0], weights[1], biases[1], *chosen, *gates)


def assert_right(op, ready, experts, x, chosen):
    none = (None, None)
    assert_close(call(op.quantized_moe, ready, none, x, chosen), call(reference, experts, none, x, chosen))


def assert_close(found, expected, rounds=False):
    """With `rounds` (to 8-bit floats), a difference in the last bit may become a large difference of few elements."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error, size = (found.double() - expected.double()).abs(), expected.double().abs().max()
    allowed = 2e-5 if found.dtype == torch.float32 else 4 * torch.finfo(found.dtype).eps
    off = float(error.max() / size)
    if rounds:
        assert float((error > allowed * size).double().mean()) < 0.02 and off < 0.05, off
    else:
        assert off < allowed, off


def sizes_of(*formats):
    return (256, 512) if any(BLOCK_FORMATS[name].block_values == 256 for name in formats) else (96, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_any_format(op, format, int8_activations, dtype):
    hidden, inner = sizes_of(format)
    experts = block_experts((format, format), 8, hidden, inner, int8_activations)
    ready, biases = op.pack(experts), biases_of(experts, dtype)
    for rows, top_k in ((1, 4), (3, 1), (200, 8)):
        x, chosen = random(rows, hidden, dtype=dtype, seed=rows), routing(rows, 8, top_k)
        assert_close(
            call(op.quantized_moe, ready, (None, None), x, chosen), call(reference, experts, (None, None), x, chosen)
        )
    x, chosen = random(3, hidden, dtype=dtype, scale=3.0), routing(3, 8, 4)
    wanted = call(reference, experts, biases, x, chosen, CLAMPED)
    assert_close(call(op.quantized_moe, ready, biases, x, chosen, CLAMPED), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_of_any_kind_and_size(op, kind, dtype):
    for hidden, inner in ((64, 96), (80, 33), (130, 7)):
        experts = integer_experts(kind, 8, hidden, inner)
        ready, biases = op.pack(experts), biases_of(experts, dtype)
        for rows, top_k, gates in ((1, 8, SILU), (3, 4, CLAMPED), (200, 1, SILU)):
            x, chosen = random(rows, hidden, dtype=dtype, seed=rows), routing(rows, 8, top_k)
            some = biases if top_k == 4 else (None, None)
            assert_close(
                call(op.quantized_moe, ready, some, x, chosen, gates), call(reference, experts, some, x, chosen, gates)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_8_bit_floats_with_any_blocks_and_inputs(op, kind, dtype):
    for hidden, inner in ((256, 160), (416, 96)):
        experts = float_experts(kind, 8, hidden, inner)
        ready, biases = op.pack(experts), biases_of(experts, dtype)
        for rows, top_k, gates in ((1, 8, SILU), (3, 4, CLAMPED), (200, 2, SILU)):
            x, chosen = random(rows, hidden, dtype=dtype, seed=rows), routing(rows, 8, top_k)
            some = biases if top_k == 4 else (None, None)
            found = call(op.quantized_moe, ready, some, x, chosen, gates)
            assert_close(found, call(reference, experts, some, x, chosen, gates), rounds=kind[2] != "floats")


def test_8_bit_floats_of_every_code(op):
    """Covers subnormal codes: gates are constant, and each token selects one column of the up matrix."""
    one = 56
    ups = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(16, 1)
    down = Float8Weight((torch.eye(128, 32) * one).to(torch.uint8), torch.ones(128, 1), 1, 32)
    chosen, x = (torch.zeros(128, 1, dtype=torch.int64), torch.ones(128, 1)), torch.eye(128)
    for numbers in (ups.where(ups & 127 != 127, one), ups):
        codes = torch.cat([torch.full_like(ups, one), numbers])
        experts = [Float8Weight(codes, torch.full((64, 1), 0.3), 1, 128)], [down]
        wanted = call(reference, experts, (None, None), x, chosen, (1.0, 1e9))
        found = call(op.quantized_moe, op.pack(experts), (None, None), x, chosen, (1.0, 1e9))
        assert wanted.isnan().all() if numbers is ups else wanted.isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_up_and_down_of_several_formats_and_many_experts(op, dtype):
    experts = block_experts((("q4_k", "q6_k"), "q8_0"), 40, 256, 96, int8_activations=True)
    ready = op.pack(experts)
    for rows, top_k in ((1, 8), (3, 4), (200, 8)):
        x, chosen = random(rows, 256, dtype=dtype, seed=rows), routing(rows, 40, top_k, seed=rows)
        assert_close(
            call(op.quantized_moe, ready, (None, None), x, chosen), call(reference, experts, (None, None), x, chosen)
        )


def test_experts_without_tokens_are_not_read(op):
    experts = block_experts(("q8_0", "q8_0"), 8, 64, 32)
    for e in (0, 3, 7):
        for weights in experts:
            weights[e].parts[0].data[:] = 0x7F  # scales become NaN
    x, chosen = random(50, 64), routing(50, 8, 2, among=[1, 2, 4, 6])
    assert call(op.quantized_moe, op.pack(experts), (None, None), x, chosen).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mxfp4", "q4_k", "weight-only", *INTEGERS[1:5:2], *FLOATS[1:3]], ids=str)
def test_a_token_does_not_depend_on_other_tokens(op, kind, dtype):
    if kind in INTEGERS:
        experts = integer_experts(kind, 5, 256, 130)
    elif kind in FLOATS:
        experts = float_experts(kind, 5, 256, 160)
    else:
        name = "q6_k" if kind == "weight-only" else kind
        experts = block_experts((name, name), 5, 512, 256, int8_activations=kind != "weight-only")
    ready, biases = op.pack(experts), biases_of(experts, dtype)
    x, (ids, weights) = random(120, experts[0][0].shape[1], dtype=dtype), routing(120, 5, 2)
    each = [(x[t : t + 1], (ids[t : t + 1], weights[t : t + 1])) for t in range(120)]
    alone = torch.cat([call(op.quantized_moe, ready, biases, *one, CLAMPED) for one in each])
    for begin, end in ((0, 120), (3, 20), (100, 120)):
        part = x[begin:end], (ids[begin:end].flip(1), weights[begin:end].flip(1))
        assert torch.equal(call(op.quantized_moe, ready, biases, *part, CLAMPED), alone[begin:end])
    x[7] = float("nan")
    found = call(op.quantized_moe, ready, biases, x, (ids, weights), CLAMPED)
    assert found[7].isnan().all()
    assert torch.equal(found[:7], alone[:7]) and torch.equal(found[8:], alone[8:])


def test_results_do_not_depend_on_the_number_of_threads(op):
    before = torch.get_num_threads()
    packs = [
        op.pack(block_experts(("q4_k", "q6_k"), 8, 1024, 512, int8_activations=True)),
        op.pack(integer_experts((4, 32, False, True), 8, 512, 400)),
        op.pack(float_experts((128, 128, "dynamic"), 8, 512, 384)),
        op.pack(float_experts((128, 128, "static"), 8, 512, 384)),
    ]
    try:
        for ready in packs:
            size = int(ready[0].descriptor[1])
            for rows in (1, 2, 40, 300):  # each thread converts all rows, or the threads divide them
                x, chosen = random(rows, size, dtype=torch.bfloat16), routing(rows, 8, 4)
                results = []
                for threads in (1, 2, 3, 7):
                    torch.set_num_threads(threads)
                    results.append(call(op.quantized_moe, ready, (None, None), x, chosen))
                assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


def test_more_tokens_than_one_batch_and_a_strided_input(op):
    ready = op.pack(block_experts(("q4_0", "q4_0"), 3, 1024, 1024, int8_activations=True))
    x = random(2500, 2048, dtype=torch.bfloat16)[:, 5:1029]
    ids, weights = routing(2500, 3, 3)
    whole = call(op.quantized_moe, ready, (None, None), x, (ids, weights))
    part = slice(1700, 2500)
    assert torch.equal(whole[part], call(op.quantized_moe, ready, (None, None), x[part], (ids[part], weights[part])))
    assert call(op.quantized_moe, ready, (None, None), x[:0], (ids[:0], weights[:0])).shape == (0, 1024)


def test_packing_reads_each_item_once_and_keeps_the_size_of_the_file(op):
    class Lazy:
        def __init__(self, weights):
            self.weights, self.accessed = weights, []

        def __len__(self):
            return len(self.weights)

        def __getitem__(self, i):
            self.accessed.append(i)
            return self.weights[i]

    for format in FORMATS:
        lazy = [Lazy(weights) for weights in block_experts((format, format), 3, 1024, 512)]
        packed = op.pack(tuple(lazy))
        for one, weights in zip(packed, lazy, strict=True):
            assert weights.accessed == [0, 1, 2]
            stored = sum(part.data.nbytes for weight in weights.weights for part in weight.parts)
            assert stored <= one.nbytes <= 1.04 * stored


def test_functions_with_quantized_experts_are_not_replayed(op):
    ready = op.pack(block_experts(("q4_k", "q4_k"), 8, 256, 256, int8_activations=True))
    router = random(8, 256, dtype=torch.bfloat16, seed=5)

    def function(x):
        chosen = (x @ router.T).float().topk(2)
        return call(op.quantized_moe, ready, (None, None), x, (chosen.indices, chosen.values.softmax(dim=-1)))

    compiled = Replay(LOADED.library).compile(function, dynamic=True)
    for seed in range(3):
        x = random(2, 256, dtype=torch.bfloat16, seed=seed)
        with torch.inference_mode():
            assert torch.equal(compiled(x), function(x))


def float_facts(block_rows, block_columns):
    return ("block_columns", block_columns), ("block_rows", block_rows), ("inputs", "dynamic")


def test_unsupported_cases_have_reasons(op):
    blocks = (("formats", ("q4_k",)), ("int8_activations", True))
    integers = (("bits", 4), ("group_size", 32), ("int8_activations", False), ("symmetric", True))
    facts = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 512,
        "intermediate_size": 256,
        "bias": True,
        "clamped": True,
        "linear": "block_quantized_linear",
        "gate_up": blocks,
        "down": blocks,
    }

    def reasons(dtype="bfloat16", **changed):
        return " ".join(op.supports(OpCase("quantized_moe", dtype, {**facts, **changed})))

    assert not reasons() and not reasons("float32")
    assert not reasons(linear="quantized_linear", gate_up=integers, down=integers)
    floats = {"linear": "float8_linear", "gate_up": float_facts(128, 128), "down": float_facts(128, 128)}
    assert not reasons(**floats)
    assert "blocks of 64 columns" in reasons(**{**floats, "down": float_facts(64, 64)})
    assert "40 columns of 8-bit floats are no multiple of 32" in reasons(**floats, intermediate_size=40)
    assert "float64" in reasons("float64")
    assert "q2_k has no kernel" in reasons(down=(("formats", ("q2_k",)), ("int8_activations", True)))
    assert "352 columns are no multiple of the 256" in reasons(intermediate_size=352)
    assert "of 3 bits" in reasons(linear="quantized_linear", gate_up=integers, down=(("bits", 3), *integers[1:]))
    assert "other_linear" in reasons(linear="other_linear", gate_up=(), down=())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu_squared", "relu", "silu"])
@pytest.mark.parametrize("kind", ["blocks", "blocks of one format", "integers", "floats"])
def test_experts_without_a_gate(op, kind, activation, dtype):
    """Experts of 320 inner elements: several tiles, the last one with fewer columns."""
    hidden, inner, num_experts = 256, 320, 5
    if kind == "blocks":
        up = [block_quantized_weight((("q4_k", inner),), hidden, True, seed=e) for e in range(num_experts)]
        down = [block_quantized_weight((("q5_0", hidden),), inner, True, seed=9 + e) for e in range(num_experts)]
    elif kind == "blocks of one format":
        up = [block_quantized_weight((("q8_0", inner),), hidden, False, seed=e) for e in range(num_experts)]
        down = [block_quantized_weight((("q8_0", hidden),), inner, False, seed=9 + e) for e in range(num_experts)]
    else:
        one = integer_weight if kind == "integers" else float_weight
        settings = INTEGERS[5] if kind == "integers" else FLOATS[0]
        up = [one(settings, inner, hidden, seed=e) for e in range(num_experts)]
        down = [one(settings, hidden, inner, seed=9 + e) for e in range(num_experts)]
    ready = op.pack_ungated((up, down))
    x, (ids, weights) = random(150, hidden, dtype=dtype), routing(150, num_experts, 2, seed=3)
    found = op.quantized_ungated_moe(x, *ready, ids, weights, activation)
    assert_close(found, ungated_reference(x, up, down, ids, weights, activation))
    for rows in ([3], [7, 149], range(20)):
        some = torch.tensor(list(rows))
        alone = op.quantized_ungated_moe(x[some], *ready, ids[some], weights[some], activation)
        assert torch.equal(alone, found[some]), "a token's bits do not depend on the others"
