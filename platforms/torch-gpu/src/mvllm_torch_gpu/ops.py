"""Operations that the Triton kernels replace: each is one launch, or a few, where torch needs many.

Products with plain weights are torch's: its library has the fastest ones there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_triton import activation, argmax, moe, norm, quantized_linear, rotary

PROVIDER = "mvllm_triton"
DTYPES = ("bfloat16", "float16", "float32")


def supports(case: OpCase) -> list[str]:
    """Reasons why the kernels do not take a case."""
    if case.dtype not in DTYPES:
        return [f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})"]
    return []


def supports_quantized(case: OpCase) -> list[str]:
    """Reasons why the kernel of small integers does not take a case."""
    facts = case.facts
    return supports(case) + quantized_linear.refusals(facts["in_features"], facts["group_size"], facts["bits"])


def providers() -> Sequence[OpProvider]:
    """One per operation."""
    functions: dict[str, Callable[..., Any]] = {
        "argmax": argmax.argmax,
        "rms_norm": norm.rms_norm,
        "fused_add_rms_norm": norm.add_rms_norm,
        "rotary_embedding": rotary.rotary,
        "silu_and_mul": activation.silu_and_mul,
        "gelu_and_mul": activation.gelu_and_mul,
        "gelu_tanh_and_mul": activation.gelu_tanh_and_mul,
        "moe": moe.moe,
        "clamped_moe": moe.clamped_moe,
    }
    quantized = OpProvider(
        "quantized_linear",
        PROVIDER,
        quantized_linear.quantized_linear,
        supports_quantized,
        prepare=quantized_linear.pack,
    )
    return [*(OpProvider(op, PROVIDER, function, supports) for op, function in functions.items()), quantized]
