"""Executes the few PTX instructions of `mvllm_triton.kernels.packed_numbers` on the host.

Semantics are those of NVIDIA's PTX ISA. `prmt` without mode: each nibble of the selector picks one of eight bytes of
the two sources; its upper bit would replicate a sign, and must be zero here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch


def execute(ptx: str, operands: Mapping[str, int]) -> dict[str, int]:
    """The registers after the instructions, which start with those of `operands` ($4, ...)."""
    registers = dict(operands)

    def value(name: str) -> int:
        return int(name, 0) if re.match(r"0x|\d", name) else registers[name]

    for line in ptx.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in rest.split(","))
        registers[target] = _INSTRUCTIONS[name](*map(value, sources)) & 0xFFFFFFFF
    return registers


def bfloat16s(register: int) -> list[float]:
    """The lower and the upper number of a register."""
    halves = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16)
    return halves.view(torch.bfloat16).tolist()


def two_bfloat16s(low: float, high: float) -> int:
    """A register with two numbers."""
    bits = torch.tensor([low, high], dtype=torch.bfloat16).view(torch.int16).tolist()
    return (bits[0] & 0xFFFF) | (bits[1] & 0xFFFF) << 16


def _prmt(low: int, high: int, selector: int) -> int:
    table = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    places = [selector >> 4 * i & 0xF for i in range(4)]
    assert max(places) < 8, "a selector with the sign mode"
    return int.from_bytes(bytes(table[place] for place in places), "little")


def _fma(a: int, b: int, c: int) -> int:
    products = (x * y + z for x, y, z in zip(bfloat16s(a), bfloat16s(b), bfloat16s(c), strict=True))
    return two_bfloat16s(*products)


_INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fma,
}
