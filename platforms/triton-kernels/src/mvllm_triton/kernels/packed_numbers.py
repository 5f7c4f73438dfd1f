"""Device functions that convert packed integers and 4-bit floats to the compute dtype.

An integer below 2**23 is placed in the mantissa of 2**23, and 2**23 is subtracted: exact, and faster than a
conversion.

    E2M1   s ee m         float16   s eeeee mmmmmmmmmm        value of the code = float16 * 2**14
           | |                      | 000ee m000000000
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offset_integers(codes, base, DTYPE: tl.constexpr):
    """codes - base in DTYPE, for uint8 codes [k, n] and float32 `base` [n], which includes 2**23."""
    placed = codes.to(tl.int32) | 0x4B000000
    return (placed.to(tl.float32, bitcast=True) - base[None, :]).to(DTYPE)


@triton.jit
def scaled_e2m1(codes, factor, DTYPE: tl.constexpr):
    """The numbers of E2M1 codes [k, n] (uint8, upper half zero) times their scale; `factor` [n] is the scale * 2**14."""
    bits = codes.to(tl.uint16)
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * factor[None, :]).to(DTYPE)


@triton.jit
def e8m0_factor(exponents, PLACE: tl.constexpr):
    """2**(exponent - 127 + 14) for byte PLACE of each int32; exponents are at most 240."""
    exponent = (exponents >> (8 * PLACE)) & 0xFF
    return ((exponent + 14) << 23).to(tl.float32, bitcast=True)
