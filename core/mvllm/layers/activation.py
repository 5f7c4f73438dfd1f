"""Activation functions by the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}
"""Name in `config.json` to operation."""

_GATED = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}

Activation = Callable[[torch.Tensor], torch.Tensor]


def _operation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"The activation function {name!r} of this model is not supported. "
            f"Supported: {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]


def activation(ctx: BuildContext, name: str, size: int) -> Activation:
    """The activation of that checkpoint name, over `size` elements.

    Raises:
        ModelError: It is not supported.
    """
    return ctx.op(_operation(name), size=size).function


def gated_activation(ctx: BuildContext, name: str, size: int) -> Activation:
    """f(first half) times second half: [..., 2 * size] to [..., size], with the activation f of that checkpoint name.

    Raises:
        ModelError: It is not supported.
    """
    operation = _operation(name)
    if operation in _GATED:
        return ctx.op(_GATED[operation], size=size).function
    f = ctx.op(operation, size=size).function

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return f(gate) * up

    return gated
