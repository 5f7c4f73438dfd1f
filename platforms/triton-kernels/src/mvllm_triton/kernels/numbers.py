"""Device functions for 8-bit numbers, and for operations that Triton lacks on some targets.

The exponent bias identifies a float8 format: 7 is e4m3fn, 8 is e4m3fnuz, 15 is e5m2. Encoding uses integer arithmetic,
which gives the same nearest-even codes on every target. Decoding uses the target's conversion if the tensor has a
float8 dtype (bias 0 below); otherwise the fields of a code are shifted to those of float16:

    e4m3   s eeee mmm          float16   s eeeee mmmmmmmmmm         value of the code = float16 * 2 ** (15 - bias)
           | |                           | 0eeee mmm0000000
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Converts elements of a cache or weight to DTYPE: any dtype if FP8 is 0, else uint8 codes of that bias."""
    if FP8 == 0:
        wide = x.to(DTYPE)
    elif FP8 == 15:
        wide = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = (half.to(tl.float32) * (1 << (15 - FP8))).to(DTYPE)
    return wide


@triton.jit
def float8_codes(x, FP8: tl.constexpr):
    """The nearest codes, uint8, of float32 numbers; numbers out of range are clamped."""
    MANTISSA: tl.constexpr = 2 if FP8 == 15 else 3
    LARGEST: tl.constexpr = 57344.0 if FP8 == 15 else (240.0 if FP8 == 8 else 448.0)
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    u = magnitude.to(tl.int32, bitcast=True)
    normal = ((u + ((1 << (DROPPED - 1)) - 1) + ((u >> DROPPED) & 1)) >> DROPPED) - ((127 - FP8) << MANTISSA)
    # Subnormal codes are multiples of one step; adding 1.5 * 2**23 rounds to an integer.
    steps = magnitude * (1 << (FP8 - 1 + MANTISSA)) + 12582912.0
    subnormal = steps.to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(magnitude < 1.0 / (1 << (FP8 - 1)), subnormal, normal)
    sign = (bits >> 24) & 0x80
    if FP8 == 8:
        sign = tl.where(code == 0, 0, sign)  # in e4m3fnuz the code of minus zero is NaN
    code = tl.where(x != x, 0x80 if FP8 == 8 else 0x7F, code | sign)
    return code.to(tl.uint8)


@triton.jit
def int8_codes(x):
    """The nearest integers in [-127, 127], halves to even; 0 for a NaN."""
    x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -127.0), 127.0))
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 numbers, with an error of at most 2e-7; nothing overflows."""
    faded = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - faded) / (1.0 + faded)
    return tl.where(x < 0.0, -magnitude, magnitude)
