"""Test cases for every operation: facts, arguments and exact results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from mvllm.extension_api.testing import SCHEMAS, UNGATED_ACTIVATIONS, draw_block, filtered_draw, torch_dtype
from mvllm_conformance.block_quantized_cases import block_quantized_linear_cases, exact_block_quantized
from mvllm_conformance.op_call import ROWS, OpCall, random_tensor
from mvllm_conformance.quantized_moe_cases import (
    exact_quantized_moe,
    exact_quantized_ungated_moe,
    inner_steps,
    quantized_moe_cases,
    quantized_ungated_moe_cases,
)
from mvllm_conformance.quantized_weight_cases import (
    exact_float8,
    exact_quantized,
    float8_linear_cases,
    quantized_linear_cases,
)
from mvllm_conformance.state_cases import compared, gated_rms_norm_cases, has_state, state_cases


def op_calls(op: str, dtype: str) -> Iterator[OpCall]:
    """The cases of one operation in one compute dtype."""
    yield from _MAKERS.get(op, _activations)(op, torch_dtype(dtype))


def exact(case: OpCall) -> Any:
    """The result of the reference for float64 arguments.

    For an operation that updates states, what `compared` returns for it.
    """
    if case.op == "quantized_linear":
        return exact_quantized(*case.make())
    if case.op == "quantized_linear_silu_and_mul":
        return SCHEMAS["silu_and_mul"].reference(exact_quantized(*case.make()))
    if case.op == "block_quantized_linear":
        return exact_block_quantized(*case.make())
    if case.op == "block_quantized_linear_silu_and_mul":
        return SCHEMAS["silu_and_mul"].reference(exact_block_quantized(*case.make()))
    if case.op == "float8_linear":
        return exact_float8(*case.make())
    if case.op == "quantized_moe":
        return exact_quantized_moe(*case.make())
    if case.op == "quantized_ungated_moe":
        return exact_quantized_ungated_moe(*case.make())
    arguments = [_as_float64(argument) for argument in case.make()]
    if case.op in ("moe", "gelu_tanh_moe", "clamped_moe", "ungated_moe"):
        index = list(SCHEMAS[case.op].parameters).index("expert_weights")
        arguments[index] = arguments[index].float()  # float32 for every compute dtype
    result = SCHEMAS[case.op].reference(*arguments)
    return tuple(compared(case, [result], arguments)) if has_state(case.op) else result


def result_dtype(op: str, dtype: str) -> str:
    """Dtype of an operation's floating-point results for a compute dtype."""
    return "float32" if op in ("select_experts", "logsumexp", "log_decay") else dtype


def tolerance(dtype: str, case: OpCall | None = None) -> float:
    """Allowed difference relative to the largest value of the result: a few roundings to the dtype.

    It is larger where a case rounds inexact numbers to 8 bits: a step of some of them.
    """
    roundings = {"float32": 2e-5}.get(dtype, 4 * torch.finfo(torch_dtype(dtype)).eps)
    has_steps = case is not None and case.op in ("quantized_moe", "quantized_ungated_moe")
    return max(roundings, inner_steps(case, dtype)) if case is not None and has_steps else roundings


def _as_float64(argument: Any) -> Any:
    return argument.double() if isinstance(argument, torch.Tensor) and argument.is_floating_point() else argument


def _linear(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    gated = op == "linear_silu_and_mul"
    sizes = ((64, 96), (128, 160), (96, 33)) if gated else ((64, 96), (128, 320), (96, 33))
    for rows in (*ROWS, 200) if gated else ROWS:
        for in_features, size in sizes:
            for bias in (False, True):
                facts = {"in_features": in_features, "size" if gated else "out_features": size, "bias": bias}
                out_features = 2 * size if gated else size
                make = partial(_linear_arguments, dtype, rows, in_features, out_features, bias)
                yield OpCall(op, facts, make, weight=1)


def _linear_arguments(
    dtype: torch.dtype, rows: int, in_features: int, out_features: int, bias: bool
) -> tuple[Any, ...]:
    return (
        random_tensor(dtype, rows, in_features),
        random_tensor(dtype, out_features, in_features, seed=1, scale=in_features**-0.5),
        random_tensor(dtype, out_features, seed=2) if bias else None,
    )


def _embedding(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for ids in (torch.int32, torch.int64):
            yield OpCall(
                op,
                {"num_embeddings": 50, "embedding_dim": 64},
                lambda rows=rows, ids=ids: (  # type: ignore[misc]
                    ((torch.arange(rows) * 7) % 50).to(ids),
                    random_tensor(dtype, 50, 64, seed=1),
                ),
                weight=1,
            )
            yield OpCall(  # a vocabulary shard, and ids outside of it
                op,
                {"num_embeddings": 20, "embedding_dim": 64},
                lambda rows=rows, ids=ids: (  # type: ignore[misc]
                    ((torch.arange(rows) * 7) % 50).to(ids),
                    random_tensor(dtype, 20, 64, seed=1),
                    20,
                ),
                weight=1,
            )


def _norms(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for size in (64, 100, 768):
            facts = {"hidden_size": size}
            if op == "rms_norm":
                yield OpCall(op, facts, partial(_rms_norm_arguments, dtype, rows, size))
                yield OpCall(op, facts, partial(_rms_norm_arguments, dtype, rows, size, of_heads=True))
            elif op == "fused_add_rms_norm":
                yield OpCall(op, facts, partial(_rms_norm_arguments, dtype, rows, size, residual=True))
            else:
                for affine in (False, True):
                    has_residual = op == "fused_add_layer_norm"
                    make = partial(_layer_norm_arguments, dtype, rows, size, affine, residual=has_residual)
                    yield OpCall(op, {**facts, "affine": affine}, make)


def _rms_norm_arguments(
    dtype: torch.dtype, rows: int, size: int, *, residual: bool = False, of_heads: bool = False
) -> tuple[Any, ...]:
    """Arguments of an RMS norm; with `of_heads` the input is a strided view of a fused projection."""
    if of_heads:
        x = random_tensor(dtype, rows, 3 * size)[:, size:].view(rows, 2, size)
    else:
        x = random_tensor(dtype, rows, size)
    residuals = (random_tensor(dtype, rows, size, seed=3),) if residual else ()
    return (x, *residuals, random_tensor(dtype, size, seed=1), 1e-5)


def _layer_norm_arguments(
    dtype: torch.dtype, rows: int, size: int, affine: bool, *, residual: bool = False
) -> tuple[Any, ...]:
    weights = (random_tensor(dtype, size, seed=1), random_tensor(dtype, size, seed=2)) if affine else (None, None)
    residuals = (random_tensor(dtype, rows, size, seed=3),) if residual else ()
    return (random_tensor(dtype, rows, size), *residuals, *weights, 1e-5)


def _rotary(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for head_size, rotary_dim in ((64, 64), (80, 32), (128, 128)):
        for index in (torch.int32, torch.int64):
            yield OpCall(
                op,
                {"head_size": head_size, "rotary_dim": rotary_dim},
                lambda h=head_size, r=rotary_dim, index=index: _rotary_arguments(dtype, h, r, index),  # type: ignore[misc]
            )


def _rotary_arguments(dtype: torch.dtype, head_size: int, rotary_dim: int, index: torch.dtype) -> tuple[Any, ...]:
    angles = torch.rand(50, rotary_dim // 2, generator=torch.Generator().manual_seed(4)) * 6
    fused = random_tensor(dtype, 9, 8 * head_size)
    query, key, _ = fused.split((4 * head_size, 2 * head_size, 2 * head_size), dim=1)
    return (
        ((torch.arange(9) * 11) % 50).to(index),
        query.view(9, 4, head_size),
        key.view(9, 2, head_size),
        torch.cat((angles.cos(), angles.sin()), dim=1),
    )


def _moe(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    facts = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    clamped = op == "clamped_moe"
    for rows in ROWS:
        yield OpCall(op, facts, partial(_moe_arguments, dtype, rows, clamped), weight=(1, 3) if clamped else (1, 2))


def _moe_arguments(dtype: torch.dtype, rows: int, clamped: bool) -> tuple[Any, ...]:
    gate_up = random_tensor(dtype, 4, 64, 64, seed=1, scale=0.12)
    down = random_tensor(dtype, 4, 64, 32, seed=2, scale=0.17)
    biases = random_tensor(dtype, 4, 64, seed=4), random_tensor(dtype, 4, 64, seed=5)
    weights = (gate_up, biases[0], down, biases[1]) if clamped else (gate_up, down)
    return (
        random_tensor(dtype, rows, 64),
        *weights,
        torch.stack([(torch.arange(rows) + k) % 4 for k in (0, 1)], dim=1),
        torch.softmax(random_tensor(torch.float32, rows, 2, seed=3), dim=-1),
        *((1.702, 1.5) if clamped else ()),  # alpha, and a limit that these inputs reach
    )


def _ungated_moe(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    for activation in UNGATED_ACTIVATIONS:
        for rows in ROWS:
            arguments = partial(_ungated_moe_arguments, dtype, rows, activation)
            yield OpCall(op, {**sizes, "activation": activation}, arguments, weight=(1, 2))


def _ungated_moe_arguments(dtype: torch.dtype, rows: int, activation: str) -> tuple[Any, ...]:
    x, gate_up, down, ids, weights = _moe_arguments(dtype, rows, False)
    return x, gate_up[:, :32].contiguous(), down, ids, weights, activation


_SELECTIONS = (  # whether there is a correction, and the parameters after it
    (False, (2, "softmax", True, 1.0, 1, 1, "best")),
    (False, (3, "softmax", False, 0.5, 4, 2, "best")),
    (True, (4, "sigmoid", True, 2.5, 4, 2, "best_two")),
    (False, (1, "softmax_of_chosen", False, 1.0, 1, 1, "best")),
    (False, (4, "softmax_of_chosen", False, 1.0, 1, 1, "best")),
)


def _select_experts(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for size in (16, 60):
            for corrected, settings in _SELECTIONS:
                facts = {"num_experts": size, "top_k": settings[0], "scores": settings[1], "num_groups": settings[4]}
                yield OpCall(op, facts, partial(_selection_arguments, dtype, rows, size, corrected, settings))


def _selection_arguments(
    dtype: torch.dtype, rows: int, size: int, corrected: bool, settings: tuple[Any, ...]
) -> tuple[Any, ...]:
    # Distinct logits and corrections in steps that rounding does not exceed: the selection is not between equal scores.
    logits = random_tensor(torch.float32, rows, size).argsort(dim=1).argsort(dim=1) * (4 / size) - 2
    correction = random_tensor(torch.float32, size, seed=1).argsort() * (0.01 / size) if corrected else None
    return (logits.to(dtype), correction, *settings)


def _add_lora(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        # Three slots, one of them unused; one output band, and three bands of which two share a block.
        for bands in (((0, 96, 0),), ((0, 48, 0), (48, 80, 1), (80, 96, 1))):
            blocks = 1 + max(block for _, _, block in bands)
            yield OpCall(
                op,
                {"in_features": 64, "out_features": 96, "rank": 8, "blocks": blocks},
                lambda rows=rows, bands=bands, blocks=blocks: _lora_arguments(dtype, rows, blocks, bands),  # type: ignore[misc]
            )


def _add_lora_by_slot(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for case_ in _add_lora(op, dtype):
        yield replace(case_, make=partial(_lora_slot_arguments, case_.make))


def _lora_slot_arguments(make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments of a case of `add_lora`, with the same adapters as slots."""
    y, x, down, up, tokens, segments, bands = make()
    slots = torch.full((len(y),), -1, dtype=torch.int32)
    for slot, start, stop in segments:
        slots[slice(start, stop) if tokens is None else tokens[start:stop]] = slot
    return y, x, down, up, slots, bands


def _lora_arguments(
    dtype: torch.dtype, rows: int, blocks: int, bands: tuple[tuple[int, int, int], ...]
) -> tuple[Any, ...]:
    matrices = (
        random_tensor(dtype, rows, 96, seed=3),
        random_tensor(dtype, rows, 64),
        random_tensor(dtype, 3, blocks, 8, 64, seed=1, scale=0.12),
        random_tensor(dtype, 3, 96, 8, seed=2, scale=0.35),
    )
    if rows < 3:
        return (*matrices, None, ((2, 0, rows),), bands)
    odd, even = torch.arange(1, rows, 2), torch.arange(0, rows - 1, 2)  # the last row has no adapter
    segments = ((2, 0, len(odd)), (0, len(odd), len(odd) + len(even)))
    return (*matrices, torch.cat((odd, even)), segments, bands)


def _argmax(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for size in (5, 64, 200):  # distinct small integers: the index of equal maxima is undefined
            yield OpCall(
                op,
                {"size": size},
                lambda rows=rows, size=size: (  # type: ignore[misc]
                    (random_tensor(torch.float32, rows, 2 * size).argsort(dim=1).argsort(dim=1) - size).to(dtype)[
                        :, :size
                    ],
                ),
            )


def _logsumexp(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for size in (5, 64, 200, 9001):
            yield OpCall(op, {"size": size}, lambda rows=rows, size=size: _sum_arguments(dtype, rows, size))  # type: ignore[misc]


def _sum_arguments(dtype: torch.dtype, rows: int, size: int) -> tuple[Any, ...]:
    """Logits, some of them masked, as a strided view: the padding of a vocabulary is cut off."""
    logits = random_tensor(dtype, rows, size + 3, scale=4.0)
    logits[:, 1] = -torch.inf
    return (logits[:, :size],)


_DRAWS = (  # temperature, min_p, top_k (None where it is off), top_p
    (1.0, 0.0, None, 1.0),
    (0.5, 0.0, 1, 1.0),
    (1.0, 0.0, 7, 1.0),
    (1.0, 0.0, None, 0.8),
    (2.0, 0.01, None, 1.0),
    (0.7, 0.02, 20, 0.6),
    (1.0, 0.0, 40, 0.05),
)


def _filtered_draw(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for size in (64, 300, 1000):
            yield OpCall(op, {"size": size}, lambda rows=rows, size=size: _draw_arguments(rows, size))  # type: ignore[misc]


def _draw_arguments(rows: int, size: int) -> tuple[Any, ...]:
    """Rows with all settings of _DRAWS, and random numbers that are not near the boundary between two tokens."""
    generator = torch.Generator().manual_seed(size)
    temperature, min_p, top_k, top_p = (
        torch.tensor([size if value is None else value for value in column])
        for column in zip(*(_DRAWS[row % len(_DRAWS)] for row in range(rows)), strict=True)
    )
    logits = random_tensor(torch.float32, rows, size, seed=rows, scale=2)
    logits[:, 5] = -torch.inf
    row_max, gap, k = logits.amax(dim=1), temperature * min_p.log(), top_k.long()
    uniforms = torch.rand(2, rows, generator=generator) * 0.999

    def draws(sign: int, other: int) -> torch.Tensor:
        """The tokens in float64 after small changes of all thresholds."""
        coarse, fine = (uniforms.double() + 1e-4 * torch.tensor([[sign], [other]])).clamp(min=0)
        moved_gap, moved_p = gap.double() - 1e-4 * sign, (top_p.double() + 1e-5 * sign).clamp(max=1.0)
        inputs = logits.double(), row_max.double(), (1 / temperature).double()
        return filtered_draw(*inputs, moved_gap, k, moved_p, coarse, fine, draw_block(size))

    for _ in range(100):
        tokens = torch.stack([draws(sign, other) for sign in (-1, 1) for other in (-1, 1)])
        unclear = (tokens != tokens[0]).any(dim=0)
        if not unclear.any():
            break
        uniforms[:, unclear] = torch.rand(2, int(unclear.sum()), generator=generator) * 0.999
    return logits, row_max, 1 / temperature, gap, k, top_p, *uniforms, draw_block(size)


def _activations(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    halves = 2 if op.endswith("_and_mul") else 1
    for rows in ROWS:
        for size in (64, 100):
            yield OpCall(
                op,
                {"size": size},
                lambda rows=rows, size=size: (random_tensor(dtype, rows, halves * size, scale=4.0),),  # type: ignore[misc]
            )


def _log_decay(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for num_heads, size in ((4, 1), (33, 1), (3, 24)):
            facts = {"num_heads": num_heads, "width": num_heads * size}
            yield OpCall(op, facts, partial(_log_decay_arguments, dtype, rows, num_heads, size))


def _log_decay_arguments(dtype: torch.dtype, rows: int, num_heads: int, size: int) -> tuple[Any, ...]:
    width = num_heads * size
    x = random_tensor(dtype, rows, width + 16, scale=8.0)[:, 8 : 8 + width]  # a part of a fused projection
    return x, -random_tensor(torch.float32, num_heads, seed=1).exp(), random_tensor(torch.float32, width, seed=2)


def _head_product(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for rows in ROWS:
        for in_size, out_size in ((16, 64), (20, 72), (130, 12)):
            for is_transposed in (False, True):
                facts = {"num_heads": 3, "in_size": in_size, "out_size": out_size}
                make = partial(_head_product_arguments, dtype, rows, in_size, out_size, is_transposed)
                yield OpCall(op, facts, make)


def _head_product_arguments(
    dtype: torch.dtype, rows: int, in_size: int, out_size: int, is_transposed: bool
) -> tuple[Any, ...]:
    x = random_tensor(dtype, rows, 3, in_size + 8)[..., :in_size]
    weight = random_tensor(dtype, 3, in_size + out_size, max(in_size, out_size), seed=1, scale=in_size**-0.5)
    rows_of_head = weight[:, :out_size, :in_size].transpose(1, 2) if is_transposed else weight[:, :in_size, :out_size]
    return x, rows_of_head


_SEQUENCES = (  # lengths, those of keys with cross-attention, and tokens of no sequence before and behind them
    ((1, 7, 7, 7, 0, 3), (4, 1, 6, 6, 0, 20), 2, 3),
    ((130, 20), (33, 140), 0, 0),
)
_ENCODER_HEADS = (((2, 2, 16), False), ((4, 2, 64), False), ((2, 2, 72), True), ((3, 1, 80), False))
"""Query heads, key/value heads and their size; whether with cross-attention, too."""


def _encoder_attention(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    for lens, key_lens, before, behind in _SEQUENCES:
        for sizes, with_cross in _ENCODER_HEADS:
            for cross in (False, True)[: 1 + with_cross]:
                facts = dict(zip(("num_heads", "num_kv_heads", "head_size", "cross"), (*sizes, cross), strict=True))
                keys_of = key_lens if cross else None
                yield OpCall(op, facts, partial(_encoder_arguments, dtype, lens, before, behind, sizes, keys_of))


def _encoder_arguments(
    dtype: torch.dtype,
    lens: tuple[int, ...],
    before: int,
    behind: int,
    sizes: tuple[int, int, int],
    key_lens: tuple[int, ...] | None,
) -> tuple[Any, ...]:
    """Arguments as parts of one fused projection, or of two with `key_lens`."""
    num_heads, num_kv_heads, size = sizes
    starts = tuple(accumulate(lens, initial=before))
    keys_of = None if key_lens is None else tuple(accumulate(key_lens, initial=0))
    num_tokens = starts[-1] + behind
    fused = random_tensor(dtype, num_tokens, num_heads + 2 * num_kv_heads, size, scale=2.0)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if keys_of is not None:
        key, value = random_tensor(dtype, keys_of[-1], 2 * num_kv_heads, size, seed=1, scale=2.0).chunk(2, dim=1)
    return query, key, value, starts, size**-0.5, keys_of


_MAKERS: dict[str, Callable[[str, torch.dtype], Iterator[OpCall]]] = {
    "linear": _linear,
    "quantized_linear": quantized_linear_cases,
    "quantized_linear_silu_and_mul": quantized_linear_cases,
    "float8_linear": float8_linear_cases,
    "block_quantized_linear": block_quantized_linear_cases,
    "block_quantized_linear_silu_and_mul": block_quantized_linear_cases,
    "linear_silu_and_mul": _linear,
    "embedding": _embedding,
    "rms_norm": _norms,
    "fused_add_rms_norm": _norms,
    "layer_norm": _norms,
    "fused_add_layer_norm": _norms,
    "rotary_embedding": _rotary,
    "moe": _moe,
    "quantized_moe": quantized_moe_cases,
    "quantized_ungated_moe": quantized_ungated_moe_cases,
    "select_experts": _select_experts,
    "gelu_tanh_moe": _moe,
    "clamped_moe": _moe,
    "ungated_moe": _ungated_moe,
    "argmax": _argmax,
    "logsumexp": _logsumexp,
    "filtered_draw": _filtered_draw,
    "add_lora": _add_lora,
    "add_lora_by_slot": _add_lora_by_slot,
    "causal_conv1d": state_cases,
    "ssd": state_cases,
    "gated_delta_rule": state_cases,
    "kda": state_cases,
    "gated_rms_norm": gated_rms_norm_cases,
    "log_decay": _log_decay,
    "head_product": _head_product,
    "encoder_attention": _encoder_attention,
}
