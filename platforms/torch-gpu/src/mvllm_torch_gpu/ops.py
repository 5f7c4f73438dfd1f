"""Op providers of the shared Triton kernels: one or a few launches instead of torch's many.

Linear layers with unquantized weights use torch, whose library has the fastest kernels for many rows, or with few rows
a kernel if that is faster (autotuned_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_torch_gpu.autotuned_linear import MEASURED, AutotunedLinear
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_triton import (
    activation,
    argmax,
    float8_weight,
    lora,
    moe,
    norm,
    quantized_linear,
    quantized_moe,
    rotary_embedding,
    routing,
    sampling,
    state,
)

PROVIDER = "mvllm_triton"
DTYPES = ("bfloat16", "float16", "float32")
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz}
"""Float8 formats of weights, by name."""


def supports(case: OpCase) -> list[str]:
    """Reasons why the kernels do not support a case."""
    if case.dtype not in DTYPES:
        return [f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})"]
    return []


def supports_selection(case: OpCase) -> list[str]:
    """Reasons why the kernel that selects experts does not support a case."""
    return supports(case) + routing.refusals(*(case.facts[name] for name in ("num_experts", "top_k", "num_groups")))


def supports_quantized(case: OpCase) -> list[str]:
    """Reasons why the kernel for int8 and int4 weights does not support a case."""
    facts = case.facts
    return supports(case) + quantized_linear.refusals(facts["in_features"], facts["group_size"], facts["bits"])


def supports_float8(case: OpCase) -> list[str]:
    """Reasons why the kernel for 8-bit float weights does not support a case."""
    return supports(case) + float8_weight.refusals(case.facts["in_features"], case.facts["block_columns"])


def supports_quantized_experts(case: OpCase) -> list[str]:
    """Reasons why the kernels for packed experts do not support a case."""
    linear, hidden, inner = (case.facts[name] for name in ("linear", "hidden_size", "intermediate_size"))
    reasons = supports(case)
    for name, in_features in (("gate_up", hidden), ("down", inner)):
        facts = dict(case.facts[name])
        if linear == "quantized_linear":
            reasons += quantized_linear.refusals(in_features, facts["group_size"], facts["bits"])
        elif linear == "float8_linear":
            reasons += float8_weight.refusals(in_features, facts["block_columns"])
        elif linear == "block_quantized_linear":
            reasons += quantized_moe.refusals(in_features, facts["formats"])
        else:
            reasons.append(f"experts of {linear} have no kernel")
    return list(dict.fromkeys(reasons))


def providers(
    float8: str = "float8_e4m3fn",
    *,
    multiplies_float8: bool = False,
    linear: str = MEASURED,
    module: DeviceModule = CUDA,
) -> Sequence[OpProvider]:
    """One provider per operation.

    Args:
        float8: Float8 format of the devices, one of FLOAT8.
        multiplies_float8: Whether the devices multiply in that format; otherwise codes are widened before the product.
        linear: How unquantized products of few rows are computed, one of settings.LINEAR.
        module: Torch's module for the devices.
    """
    products = AutotunedLinear(linear, module)
    functions: dict[str, Callable[..., Any]] = {
        "linear": products.linear,
        "linear_silu_and_mul": products.linear_silu_and_mul,
        "argmax": argmax.argmax,
        "filtered_draw": sampling.filtered_draw,
        "rms_norm": norm.rms_norm,
        "fused_add_rms_norm": norm.fused_add_rms_norm,
        "rotary_embedding": rotary_embedding.rotary_embedding,
        "silu_and_mul": activation.silu_and_mul,
        "gelu_and_mul": activation.gelu_and_mul,
        "gelu_tanh_and_mul": activation.gelu_tanh_and_mul,
        "moe": moe.moe,
        "clamped_moe": moe.clamped_moe,
        "add_lora_by_slot": lora.add_lora_by_slot,
        "causal_conv1d": state.causal_conv1d,
        "ssd": state.ssd,
        "gated_delta_rule": state.gated_delta_rule,
        "kda": state.kda,
        "gated_rms_norm": state.gated_rms_norm,
    }
    quantized = OpProvider(
        "quantized_linear",
        PROVIDER,
        quantized_linear.quantized_linear,
        supports_quantized,
        prepare=quantized_linear.pack,
    )
    narrow = OpProvider(
        "float8_linear",
        PROVIDER,
        float8_weight.float8_product,
        supports_float8,
        prepare=partial(float8_weight.pack, float8=FLOAT8[float8], native=multiplies_float8),
    )
    experts = OpProvider(
        "quantized_moe",
        PROVIDER,
        quantized_moe.quantized_moe,
        supports_quantized_experts,
        prepare=partial(quantized_moe.pack, float8=FLOAT8[float8], native=multiplies_float8),
        rounds_inputs=False,
    )
    plain = [OpProvider(op, PROVIDER, function, supports) for op, function in functions.items()]
    selection = OpProvider("select_experts", PROVIDER, routing.select_experts, supports_selection)
    return [*plain, selection, quantized, narrow, experts]
