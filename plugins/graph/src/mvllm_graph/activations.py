"""Activations as array operations, for compilers that do not name them.

Each function writes nodes whose result is the activation of an array of floats, and returns the name of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_ERF_SCALE = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""erf(x) = 1 - t · p(t) · exp(-x²) for x >= 0, with t = 1 / (1 + scale · x) and these coefficients of p, the highest
first. The error is at most 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""


class Elementwise:
    """Writes elementwise operations on arrays of one shape and dtype.

    Args:
        add: As ArrayOperationWriter.add.
        like: An array of the trace like each result.
    """

    def __init__(self, add: Callable[..., Any], like: torch.Tensor) -> None:
        self._add, self._like = add, like

    def one(self, op: str, x: str) -> str:
        """op(x)."""
        name: str = self._add(op, [x], self._like)
        return name

    def two(self, op: str, x: str | float, y: str | float) -> str:
        """op(x, y); one of them may be a number."""
        operands = [operand if isinstance(operand, str) else None for operand in (x, y)]
        numbers = [operand for operand in (x, y) if not isinstance(operand, str)]
        name: str = self._add(op, operands, self._like, {"other": numbers[0]} if numbers else {})
        return name


def _relu(write: Elementwise, x: str) -> str:
    return write.two("maximum", x, 0.0)


def _sigmoid(write: Elementwise, x: str) -> str:
    return write.two("div", 1.0, write.two("add", write.one("exp", write.one("neg", x)), 1.0))


def _silu(write: Elementwise, x: str) -> str:
    return write.two("mul", x, _sigmoid(write, x))


def _tanh(write: Elementwise, x: str) -> str:
    return write.two("sub", write.two("mul", _sigmoid(write, write.two("mul", x, 2.0)), 2.0), 1.0)


def _gelu_tanh(write: Elementwise, x: str) -> str:
    """x · sigmoid(2u), since (1 + tanh(u)) / 2 = sigmoid(2u); u = sqrt(2 / pi) · (x + 0.044715 x³)."""
    factor = write.two("add", write.two("mul", write.two("mul", x, x), 0.044715), 1.0)
    inner = write.two("mul", write.two("mul", x, factor), 2 * math.sqrt(2 / math.pi))
    return write.two("mul", x, _sigmoid(write, inner))


def _gelu(write: Elementwise, x: str) -> str:
    """x · Φ(x), with Φ(x) = tail for x < 0 and 1 - tail for others; tail = Φ(-|x|)."""
    size = write.two("mul", write.two("maximum", x, write.one("neg", x)), math.sqrt(0.5))
    t = write.two("div", 1.0, write.two("add", write.two("mul", size, _ERF_SCALE), 1.0))
    polynomial = write.two("mul", t, _ERF[0])
    for coefficient in _ERF[1:]:
        polynomial = write.two("mul", write.two("add", polynomial, coefficient), t)
    density = write.one("exp", write.one("neg", write.two("mul", size, size)))
    tail = write.two("mul", write.two("mul", polynomial, density), 0.5)
    positive, rest = write.two("maximum", x, 0.0), write.two("mul", write.two("maximum", x, write.one("neg", x)), tail)
    return write.two("sub", positive, rest)


ACTIVATIONS: dict[str, Callable[[Elementwise, str], str]] = {
    "relu": _relu,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "tanh": _tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
"""The activations by the names of their operations."""
