"""Device functions that convert packed integers and 4-bit floats to the compute dtype.

An integer below 2**23 is placed in the mantissa of 2**23, and 2**23 is subtracted: exact, and faster than a
conversion.

On NVIDIA's devices a few instructions convert four bytes at once to bfloat16 (the PTX below): numbers of E2M1 are
looked up, their upper and lower bytes each in a table of eight; integers are placed in the mantissa of 128.

    E2M1   s ee m         float16   s eeeee mmmmmmmmmm        value of the code = float16 * 2**14
           | |                      | 000ee m000000000
"""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_PTX = tl.constexpr("""{
.reg .b32 codes, more, signs, high, low, zero;
mov.b32 zero, 0x80008000;
and.b32 codes, $4, 0x77777777;
shr.u32 more, codes, 16;
and.b32 signs, $4, 0x88888888;
shr.u32 signs, signs, 3;
prmt.b32 high, 0x3F3F3F00, 0x40404040, codes;
prmt.b32 low, 0xC0800000, 0xC0804000, codes;
prmt.b32 codes, 0x00008000, 0, signs;
or.b32 high, high, codes;
prmt.b32 $0, low, high, 0x6240;
prmt.b32 $2, low, high, 0x7351;
shr.u32 signs, signs, 16;
prmt.b32 high, 0x3F3F3F00, 0x40404040, more;
prmt.b32 low, 0xC0800000, 0xC0804000, more;
prmt.b32 codes, 0x00008000, 0, signs;
or.b32 high, high, codes;
prmt.b32 $1, low, high, 0x6240;
prmt.b32 $3, low, high, 0x7351;
fma.rn.bf16x2 $0, $0, $5, zero;
fma.rn.bf16x2 $1, $1, $6, zero;
fma.rn.bf16x2 $2, $2, $7, zero;
fma.rn.bf16x2 $3, $3, $8, zero;
}""")
"""Unpacks the four bytes $4: the lower numbers times $5 and $6 ($0, $1), and the upper times $7 and $8 ($2, $3)."""

INT4_PTX = tl.constexpr("""{
.reg .b32 codes, one;
mov.b32 one, 0x3F803F80;
and.b32 codes, $4, 0x0F0F0F0F;
prmt.b32 $0, codes, 0x43434343, 0x4140;
prmt.b32 $1, codes, 0x43434343, 0x4342;
shr.u32 codes, $4, 4;
and.b32 codes, codes, 0x0F0F0F0F;
prmt.b32 $2, codes, 0x43434343, 0x4140;
prmt.b32 $3, codes, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, $0, one, $5;
fma.rn.bf16x2 $1, $1, one, $6;
fma.rn.bf16x2 $2, $2, one, $5;
fma.rn.bf16x2 $3, $3, one, $6;
}""")
"""Unpacks the four bytes $4: the lower ($0, $1) and the upper halves ($2, $3), plus 128, plus $5 and $6."""


@triton.jit
def unpacked_e2m1(pair, exponents, PLACE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The lower and the upper E2M1 numbers of bytes [k, n], times 2**(exponent - 127).

    The exponents of the lower numbers are byte PLACE of `exponents` [n], int32, those of the upper the next byte.
    """
    if PTX:
        low_scale = (((exponents >> (8 * PLACE)) & 0xFF) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high_scale = (((exponents >> (8 * PLACE + 8)) & 0xFF) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            E2M1_PTX,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [pair, low_scale[None, :], high_scale[None, :]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = scaled_e2m1(pair & 0xF, e8m0_factor(exponents, PLACE), DTYPE)
        high = scaled_e2m1(pair >> 4, e8m0_factor(exponents, PLACE + 1), DTYPE)
    return low, high


@triton.jit
def unpacked_int4(pair, zero, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The lower and the upper integers of bytes [k, n] (plus 8), minus their zero points [n], int32."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            INT4_PTX,
            "=&r,=&r,=&r,=&r,r,r,r",
            [pair, (-136 - zero).to(tl.float32).to(tl.bfloat16)[None, :]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        base = zero.to(tl.float32) + (8388608.0 + 8)
        low, high = offset_integers(pair & 0xF, base, DTYPE), offset_integers(pair >> 4, base, DTYPE)
    return low, high


@triton.jit
def offset_integers(codes, base, DTYPE: tl.constexpr):
    """codes - base in DTYPE, for uint8 codes [k, n] and float32 `base` [n], which includes 2**23."""
    placed = codes.to(tl.int32) | 0x4B000000
    return (placed.to(tl.float32, bitcast=True) - base[None, :]).to(DTYPE)


@triton.jit
def scaled_e2m1(codes, factor, DTYPE: tl.constexpr):
    """The numbers of E2M1 codes [k, n] (uint8, below 16) times their scales; `factor` [n] is the scale * 2**14."""
    bits = codes.to(tl.uint16)
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * factor[None, :]).to(DTYPE)


@triton.jit
def e8m0_factor(exponents, PLACE: tl.constexpr):
    """2**(exponent - 127 + 14) for byte PLACE of each int32; exponents are at most 240."""
    exponent = (exponents >> (8 * PLACE)) & 0xFF
    return ((exponent + 14) << 23).to(tl.float32, bitcast=True)
