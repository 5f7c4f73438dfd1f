"""Calls every kernel with ragged edge shapes and ignores the results; run under the sanitizers.

What is read or written past the end of a buffer, or left undefined by the language, is the sanitizers' to find; whether
results are right is checked by the test files of this folder. Kernels that are added get a function here.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import torch
from platforms.cpu.tests.dense_attention import make_case, run, runtime

from mvllm.plugin_api import BlockQuantizedWeight, Float8Weight, QuantizedWeight
from mvllm.testing.attention_cases import make_case as make_attention_case
from mvllm.testing.attention_cases import make_spec, store
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm.testing.op_cases import op_calls
from mvllm_cpu import kernels
from mvllm_cpu.activation_ops import ActivationOps
from mvllm_cpu.block_quantized_linear import FORMATS, BlockQuantizedLinear
from mvllm_cpu.encoder_attention import EncoderAttention
from mvllm_cpu.linear import Linear
from mvllm_cpu.moe import Moe
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.paged_attention import DTYPES, SCALED_DTYPES, PagedAttention
from mvllm_cpu.quantized_linear import QuantizedLinear
from mvllm_cpu.quantized_moe import QuantizedMoe
from mvllm_cpu.shared_memory_communicator import SharedGroup
from mvllm_cpu.sparse_attention import IndexerAttention, SelectedAttention
from mvllm_cpu.state_ops import StateOps

REQUESTS = [(0, 19), (100, 1), (15, 1), (16, 1), (140, 5), (0, 1), (300, 1)]
FEATURES = {"sliding_window": 20, "soft_cap": 3.0, "sinks": True}


def attention() -> None:
    for dtype, kv_dtype in itertools.product(DTYPES, (*DTYPES, *SCALED_DTYPES)):
        for i, (heads, size) in enumerate((((4, 2), 33), ((3, 1), 40), ((8, 1), 64), ((2, 2), 80))):
            fields = {"value_head_size": 24, "values_in_keys": heads[1] == 1} if i % 2 else {}
            for features in ({}, FEATURES):
                spec = make_spec(*heads, size, dtype, kv_dtype=kv_dtype, **fields, **features)
                run(PagedAttention(spec), make_case(spec, REQUESTS, block_size=16 << i % 2))
    for requests in ([(0, 150)], [(1200, 1)]):  # several tiles; one that is split
        spec = make_spec(2, 1, 64, "bfloat16")
        run(PagedAttention(spec), make_case(spec, requests))
    for heads, dtype, invariant in itertools.product(((2, 1), (7, 7)), DTYPES, (False, True)):  # a common prefix
        spec = make_spec(*heads, 40, dtype, batch_invariant=invariant)
        case = make_case(spec, [(290, 1), (257, 1), (300, 1), (256, 1), (10, 1)])
        case.layout.block_table[1:4, :16] = case.layout.block_table[0, :16]
        run(PagedAttention(case.spec), case)
    for dtype, features in itertools.product(DTYPES, ({}, {"sliding_window": 270})):
        spec = make_spec(3, 1, 40, dtype, batch_invariant=True, **features)
        run(PagedAttention(spec), make_case(spec, [(0, 300), (511, 2), (1200, 1)]))


def both_directions() -> None:
    spans = [[(0, 19)], [], [(3, 9)], [], [(130, 145)], [], []]
    pairs = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float16", "float8_e4m3fn"))
    for (dtype, kv_dtype), size in zip(pairs, (33, 64, 32, 40), strict=True):
        spec = make_spec(4, 2, size, dtype, kv_dtype=kv_dtype, non_causal_spans=True, **FEATURES)
        case = make_attention_case(spec, REQUESTS, block_size=16, spans=spans)
        harness, metadata, query = store(PagedAttention(spec), runtime(), case, poison=torch.nan)
        harness.backend.forward(query, harness.kv, metadata, case.sinks)
    for provider, dtype in itertools.product(EncoderAttention(kernels.load().library).providers(), DTYPES):
        for call in list(op_calls("encoder_attention", dtype))[::3]:
            provider.function(*call.make())


def sparse_attention() -> None:
    for dtype, kv_dtype in itertools.product(DTYPES, (*DTYPES, *SCALED_DTYPES)):
        for heads, size, block_size, top_k in ((3, 33, 16, 5), (17, 80, 32, 150)):
            fields = {"kv_dtype": kv_dtype, "values_in_keys": True, "index_topk": top_k}
            indexer = IndexerAttention(make_spec(heads, 1, size, dtype, value_head_size=size, indexer=True, **fields))
            attention = SelectedAttention(make_spec(heads, 1, size, dtype, value_head_size=24, **fields))
            for requests in (REQUESTS, [(1200, 1)]):
                case = make_case(indexer.spec, requests, block_size=block_size)
                harness, metadata, query = store(indexer, runtime(), case, poison=torch.nan)
                weights = torch.randn(len(query), heads)
                positions = indexer.select(query, weights, harness.kv, metadata)
                harness, metadata, query = store(attention, runtime(), case, poison=torch.nan)
                attention.forward_selected(query, harness.kv, metadata, positions)


def states() -> None:
    library = kernels.load().library
    made = (*StateOps(library).providers(), *ActivationOps(library).providers())
    providers = {provider.op: provider.function for provider in made}
    for op, dtype in itertools.product(providers, DTYPES):
        for case in op_calls(op, dtype):
            providers[op](*case.make())


def logits() -> None:
    ops = KernelOps(kernels.load().library)
    for rows, size in itertools.product((1, 5), (1, 5, 16, 33, 100, 5000)):
        x, ones, k = torch.randn(rows, size), torch.ones(rows), torch.full((rows,), max(1, size // 2))
        for dtype in DTYPES.values():
            ops.logsumexp(x.to(dtype))
        for top_k, top_p in itertools.product((k, torch.full_like(k, size)), (ones, ones * 0.5)):
            ops.filtered_draw(x, x.amax(dim=1), ones, -ones, top_k, top_p, ones * 0.3, ones * 0.7, 16)


def linear() -> None:
    op = Linear(kernels.load().library, kernels.load().isa)
    shapes = ((1, 1), (15, 31), (17, 33), (64, 64), (65, 193), (130, 7), (7, 300))
    for dtype, (out_features, in_features) in itertools.product(DTYPES.values(), shapes):
        packed = op.pack(torch.randn(out_features, in_features).to(dtype))
        bias = torch.randn(out_features).to(dtype)
        for rows in (1, 2, 3, 5, 7, 8, 13, 33, 97):
            op.linear(torch.randn(rows, in_features).to(dtype), packed, bias if rows % 2 else None)


def quantized() -> None:
    op = QuantizedLinear(kernels.load().library)
    shapes = ((1, 8), (15, 40), (33, 64), (65, 200), (7, 33), (32, 296))
    kinds = ((8, None, True), (8, None, False), (8, 32, False), (8, 32, True), (4, 32, False), (4, None, False))
    kinds += ((4, 32, True),)
    for dtype, (out_features, in_features), (bits, group, int8) in itertools.product(DTYPES.values(), shapes, kinds):
        middle, group_size = 2 ** (bits - 1), group or in_features
        groups = -(-in_features // group_size)
        for zeros in (False, True) if group or not int8 else (False,):
            weight = QuantizedWeight(
                torch.randint(1 - middle, middle, (out_features, in_features), dtype=torch.int8),
                torch.randint(1, 9, (out_features, groups)).float() if zeros else torch.rand(out_features, groups),
                torch.randint(-middle, middle, (out_features, groups), dtype=torch.int8) if zeros else None,
                group_size,
                bits,
                int8_activations=int8,
            )
            packed, bias = op.pack(weight), torch.randn(out_features).to(dtype)
            for rows in (1, 2, 3, 7, 13, 33):
                x, offset = torch.randn(rows, in_features).to(dtype), bias if rows % 2 else None
                op.quantized_linear(x, packed, offset)
                if out_features % 32 == 0:
                    op.quantized_linear_silu_and_mul(x, packed, offset)


def block_quantized() -> None:
    op = BlockQuantizedLinear(kernels.load().library)
    kinds = [((name, 33),) for name in FORMATS] + [(("q4_k", 16), ("q6_k", 16)), (("q8_0", 15), ("q4_0", 49))]
    for parts, int8, dtype in itertools.product(kinds, (False, True), DTYPES.values()):
        weight = block_quantized_weight(parts, 512, int8)
        out_features = weight.shape[0]
        packed, bias = op.pack(weight), torch.randn(out_features).to(dtype)
        op.lookup(torch.tensor([0, out_features - 1, out_features, -1]), packed)
        halves = op.pack_halves(weight) if out_features % 32 == 0 else None
        for rows in (1, 2, 3, 7, 13, 49):
            x, offset = torch.randn(rows, 512).to(dtype), bias if rows % 2 else None
            op.block_quantized_linear(x, packed, offset)
            if halves is not None:
                op.block_quantized_linear_silu_and_mul(x, halves, offset)


def experts() -> None:
    op = Moe(kernels.load().library)
    for dtype, (hidden, inner) in itertools.product(DTYPES.values(), ((64, 32), (67, 33), (33, 7))):
        weights = torch.randn(5, 2 * inner, hidden).to(dtype), torch.randn(5, hidden, inner).to(dtype)
        packed = op.pack(weights)
        ungated = op.pack_ungated((torch.randn(5, inner, hidden).to(dtype), torch.randn(5, hidden, inner).to(dtype)))
        for rows in (0, 1, 3, 40):
            ids = torch.stack([torch.randperm(5)[:2] for _ in range(rows)]) if rows else torch.empty(0, 2).long()
            x, chosen = torch.randn(rows, hidden).to(dtype), (ids, torch.rand(rows, 2))
            op.moe(x, *packed, *chosen)
            biases = torch.randn(5, 2 * inner).to(dtype), torch.randn(5, hidden).to(dtype)
            op.clamped_moe(x, packed[0], biases[0], packed[1], biases[1], *chosen, 1.7, 1.0)
            op.gelu_tanh_moe(x, *packed, *chosen)
            op.ungated_moe(x, *ungated, *chosen, "relu_squared")


def quantized_experts() -> None:
    op = QuantizedMoe(kernels.load().library)
    integers = [(8, 40, True), (4, 8, False), (4, 8, True)]  # bits, group_size, int8_activations
    for dtype, kind in itertools.product(DTYPES.values(), ("q4_k", "mxfp4", "dynamic", *integers)):
        hidden, inner = (40, 33) if isinstance(kind, tuple) else (256, 256) if kind != "dynamic" else (160, 96)

        def weight(rows: int, columns: int, kind: Any = kind) -> QuantizedWeight | BlockQuantizedWeight | Float8Weight:
            if kind == "dynamic":
                codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
                scales = torch.rand(-(-rows // 128), -(-columns // 128))
                return Float8Weight(codes, scales, 128, 128, kind)
            if isinstance(kind, str):
                return block_quantized_weight(((kind, rows),), columns, int8_activations=True)
            bits, group_size, int8_activations = kind
            group_size = min(group_size, columns) if bits == 4 else columns
            scales = torch.rand(rows, -(-columns // group_size))
            values = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
            return QuantizedWeight(values, scales, None, group_size, bits, int8_activations)

        packed = op.pack(([weight(2 * inner, hidden)] * 5, [weight(hidden, inner)] * 5))
        biases = torch.randn(5, 2 * inner).to(dtype), torch.randn(5, hidden).to(dtype)
        for rows in (0, 1, 3, 40):
            ids = torch.stack([torch.randperm(5)[:2] for _ in range(rows)]) if rows else torch.empty(0, 2).long()
            chosen, x = (ids, torch.rand(rows, 2)), torch.randn(rows, hidden).to(dtype)
            op.quantized_moe(x, packed[0], None, packed[1], None, *chosen, None, None)
            op.quantized_moe(x, packed[0], biases[0], packed[1], biases[1], *chosen, 1.7, 1.0)


def elementwise() -> None:
    ops = KernelOps(kernels.load().library)
    for dtype, size, rows in itertools.product(DTYPES.values(), (1, 7, 16, 33, 100), (1, 3, 17)):
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.fused_add_rms_norm(x, torch.randn(rows, size).to(dtype), weight, 1e-6)
        ops.silu_and_mul(torch.randn(rows, 2 * size).to(dtype))
        ops.gelu_tanh_and_mul(torch.randn(rows, 2 * size).to(dtype))
        ops.argmax(x)
        ops.embedding(torch.randint(-1, rows + 1, (9,)), x, 0)
        cos_sin = torch.randn(rows, 2 * size)
        query, key = (torch.randn(rows, heads, 2 * size + extra).to(dtype) for heads, extra in ((3, 0), (1, 0)))
        ops.rotary_embedding(torch.arange(rows), query, key, cos_sin)
        ops.rotary_embedding(torch.arange(rows, dtype=torch.int32), query, key, cos_sin)


def shared_sum() -> None:
    """All-reduces of two ranks in one process, each called until it is complete, also with several rounds."""
    library, ranks, slot, word = kernels.load().library, 2, 256, 64
    add = library.mvllm_cpu_shared_all_reduce
    add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
    add.restype = ctypes.c_int
    for code, dtype in enumerate((torch.float32, torch.bfloat16)):
        memory = torch.zeros(ranks * (word + 2 * slot), dtype=torch.uint8)
        groups = [SharedGroup(memory.data_ptr(), ranks, slot, rank, 1000, 0) for rank in range(ranks)]
        most = slot // dtype.itemsize
        for count in (1, 7, 31, most, 2 * most + 3):
            parts = [torch.randn(count).to(dtype) for _ in range(ranks)]
            waiting = list(range(ranks))
            while waiting:
                waiting = [
                    r for r in waiting if not add(ctypes.byref(groups[r]), parts[r].data_ptr(), count, code, None)
                ]
            assert torch.equal(*parts)


if __name__ == "__main__":
    torch.set_num_threads(2)
    for name in sys.argv[1:] or (
        "attention",
        "sparse_attention",
        "both_directions",
        "logits",
        "states",
        "linear",
        "quantized",
        "block_quantized",
        "experts",
        "quantized_experts",
        "elementwise",
        "shared_sum",
    ):
        globals()[name]()
    print(kernels.load().isa)
