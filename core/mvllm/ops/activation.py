"""Activation operations, elementwise and gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0), elementwise; [..., size], compute dtype."""
    return F.relu(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)², elementwise; [..., size], compute dtype."""
    return F.relu(x).square()


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x · Φ(x) with the exact normal distribution, elementwise; [..., size], compute dtype."""
    return F.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of gelu, elementwise; [..., size], compute dtype."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(1.702 x), elementwise; [..., size], compute dtype."""
    return x * torch.sigmoid(1.702 * x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), elementwise; [..., size], compute dtype."""
    return F.silu(x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Hyperbolic tangent, elementwise; [..., size], compute dtype."""
    return torch.tanh(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), elementwise; [..., size], compute dtype."""
    return torch.sigmoid(x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second half: [..., 2 · size] to [..., size], compute dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu of the first half times the second half: [..., 2 · size] to [..., size], compute dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu_tanh of the first half times the second half: [..., 2 · size] to [..., size], compute dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


_SIZE = {"size": "size of the result's last dimension"}

ACTIVATIONS = (
    *(OpSchema(exact, facts=_SIZE, is_exact=True) for exact in (relu, relu_squared)),
    *(
        OpSchema(function, facts=_SIZE)
        for function in (
            gelu,
            gelu_tanh,
            quick_gelu,
            silu,
            tanh,
            sigmoid,
            silu_and_mul,
            gelu_and_mul,
            gelu_tanh_and_mul,
        )
    ),
)
