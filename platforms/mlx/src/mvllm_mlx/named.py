"""Lowerings of the named operations: linear maps, norms, rotary embedding, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mvllm_graph import Node
from mvllm_mlx.lowering import Lowering, Run


def linear(run: Run, node: Node) -> Sequence[Any]:
    """x · weightᵀ + bias."""
    x, weight, bias = run.inputs(node)
    return [x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)]


def embedding(run: Run, node: Node) -> Sequence[Any]:
    """Rows of a table; zeros for ids outside of it if the table is a part."""
    ids, weight = run.inputs(node)[:2]
    first = node.attributes.get("first")
    if first is None:
        return [weight[ids]]
    local = ids - first
    here = mx.logical_and(local >= 0, local < weight.shape[0])
    return [mx.where(here[:, None], weight[mx.where(here, local, 0)], mx.array(0, dtype=weight.dtype))]


def rms_norm(run: Run, node: Node) -> Sequence[Any]:
    """x divided by its root mean square, times weight."""
    x, weight = run.inputs(node)[:2]
    return [mx.fast.rms_norm(x, weight, node.attributes["eps"])]


def fused_add_rms_norm(run: Run, node: Node) -> Sequence[Any]:
    """The normalised sum, and the sum."""
    x, residual, weight = run.inputs(node)[:3]
    total = residual + x
    return [mx.fast.rms_norm(total, weight, node.attributes["eps"]), total]


def layer_norm(run: Run, node: Node) -> Sequence[Any]:
    """(x - mean) / standard deviation, times weight, plus bias."""
    x, weight, bias = run.inputs(node)[:3]
    return [mx.fast.layer_norm(x, weight, bias, node.attributes["eps"])]


def gated_rms_norm(run: Run, node: Node) -> Sequence[Any]:
    """An RMS norm over groups of elements, with a gate before or after it."""
    x, gate, weight = run.inputs(node)[:3]
    given = node.attributes
    y = x.astype(mx.float32)
    factor = None if gate is None else ACTIVATIONS[given["activation"]](gate.astype(mx.float32))
    if factor is not None and not given["norm_before_gate"]:
        y = y * factor
    groups = y.reshape(*x.shape[:-1], -1, given["group_size"])
    y = mx.fast.rms_norm(groups, None, given["eps"]).reshape(x.shape) * weight.astype(mx.float32)
    if factor is not None and given["norm_before_gate"]:
        y = y * factor
    return [y.astype(x.dtype)]


def rotary_embedding(run: Run, node: Node) -> Sequence[Any]:
    """Rotates the leading elements of each head by the angles of its token."""
    index, query, key, cos_sin = run.inputs(node)[:4]
    cos, sin = mx.split(cos_sin[index][:, None], 2, axis=-1)
    return [_rotated(query, cos, sin), _rotated(key, cos, sin)]


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    parts = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype), x[..., 2 * half :]]
    return mx.concatenate(parts if parts[2].shape[-1] else parts[:2], axis=-1)


# ------------------------------------------------------------------------------------------------------- activations


def gelu(x: Any) -> Any:
    """x · Φ(x)."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Any) -> Any:
    """The tanh approximation of gelu."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(x: Any) -> Any:
    """x · sigmoid(x)."""
    return x * mx.sigmoid(x)


def relu(x: Any) -> Any:
    """max(x, 0)."""
    return mx.maximum(x, mx.array(0, dtype=x.dtype))


def softplus(x: Any) -> Any:
    """log(1 + exp(x))."""
    return mx.logaddexp(x, mx.array(0, dtype=x.dtype))


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": relu,
    "relu_squared": lambda x: mx.square(relu(x)),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * mx.sigmoid(1.702 * x),
    "silu": silu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
}
"""Elementwise activations by name."""


def _activation(function: Callable[[Any], Any]) -> Lowering:
    return lambda run, node: [function(run.values[str(node.inputs[0])])]


def _gated_activation(function: Callable[[Any], Any]) -> Lowering:
    def lower(run: Run, node: Node) -> Sequence[Any]:
        gate, up = mx.split(run.values[str(node.inputs[0])], 2, axis=-1)
        return [function(gate) * up]

    return lower


def log_decay(run: Run, node: Node) -> Sequence[Any]:
    """factors · softplus(x + bias), with a factor per head."""
    x, factors, bias = run.inputs(node)
    soft = softplus(x.astype(mx.float32) + bias)
    return [(soft.reshape(*x.shape[:-1], len(factors), -1) * factors[:, None]).reshape(x.shape)]


# ------------------------------------------------------------------------------------------------------------ experts


def _product(x: Any, weight: Any, ids: Any, bias: Any = None) -> Any:
    """Rows [T, k or 1, in] times the matrices [experts, out, in] of their experts: [T, k, out]."""
    dtype = x.dtype
    if mx.default_device() == mx.cpu:  # its gather_mm has float32 only
        x, weight = x.astype(mx.float32), weight.astype(mx.float32)
    made = mx.gather_mm(x[:, :, None], weight.swapaxes(-1, -2), rhs_indices=ids).squeeze(-2).astype(dtype)
    return made if bias is None else made + bias[ids]


def _combined(results: Any, weights: Any) -> Any:
    """The sum of each token's results, weighted, accumulated in float32."""
    return (results.astype(mx.float32) * weights[..., None]).sum(axis=1).astype(results.dtype)


def _gated_experts(function: Callable[[Any], Any]) -> Lowering:
    def lower(run: Run, node: Node) -> Sequence[Any]:
        x, gate_up, down, ids, weights = run.inputs(node)
        gate, up = mx.split(_product(x[:, None], gate_up, ids), 2, axis=-1)
        return [_combined(_product(function(gate) * up, down, ids), weights)]

    return lower


def clamped_moe(run: Run, node: Node) -> Sequence[Any]:
    """Experts with biases and clamped gates."""
    x, gate_up, gate_up_bias, down, down_bias, ids, weights = run.inputs(node)
    alpha, limit = node.attributes["alpha"], node.attributes["limit"]
    gate, up = mx.split(_product(x[:, None], gate_up, ids, gate_up_bias), 2, axis=-1)
    gate, up = mx.clip(gate, None, limit), mx.clip(up, -limit, limit)
    inner = (up + 1) * (gate * mx.sigmoid(gate * alpha))
    return [_combined(_product(inner, down, ids, down_bias), weights)]


def ungated_moe(run: Run, node: Node) -> Sequence[Any]:
    """Experts without gates."""
    x, up, down, ids, weights = run.inputs(node)
    inner = ACTIVATIONS[node.attributes["activation"]](_product(x[:, None], up, ids))
    return [_combined(_product(inner, down, ids), weights)]


NAMED: dict[str, Lowering] = {
    "linear": linear,
    "embedding": embedding,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "layer_norm": layer_norm,
    "gated_rms_norm": gated_rms_norm,
    "rotary_embedding": rotary_embedding,
    "log_decay": log_decay,
    "moe": _gated_experts(silu),
    "gelu_tanh_moe": _gated_experts(gelu_tanh),
    "clamped_moe": clamped_moe,
    "ungated_moe": ungated_moe,
    **{name: _activation(function) for name, function in ACTIVATIONS.items()},
    **{f"{name}_and_mul": _gated_activation(ACTIVATIONS[name]) for name in ("silu", "gelu", "gelu_tanh")},
}
"""The lowerings by name."""
