"""The formats of block-quantized weights: bytes of a block, and their conversion to float32.

These are formats of GGUF files. A row consists of blocks of 32 or 256 values; each block has its own scales. float16
numbers are little-endian. `n` is the index of a value in the block, `q` its stored integer, `w` the weight.

    q4_0    ┌ d f16 ┬ 16 bytes: low half value n, high half value n + 16 ┐             w = d · (q - 8)
    q4_1    ┌ d f16 ┬ m f16 ┬ 16 bytes, as q4_0 ┐                                      w = d · q + m
    q5_0    ┌ d f16 ┬ 4 bytes ┬ 16 bytes, as q4_0 ┐                                    w = d · (q - 16)
            bit n of the 4 bytes (little-endian): the fifth bit of value n
    q5_1    ┌ d f16 ┬ m f16 ┬ 4 bytes, as q5_0 ┬ 16 bytes, as q4_0 ┐                   w = d · q + m
    q8_0    ┌ d f16 ┬ 32 signed bytes ┐                                                w = d · q
    mxfp4   ┌ e byte ┬ 16 bytes, as q4_0 ┐      q: sign, 2 bits exponent, 1 mantissa   w = 2^(e - 127) · q
    iq4_nl  ┌ d f16 ┬ 16 bytes, as q4_0 ┐                                              w = d · table[q]

    The other formats have 256 values in groups of 32 (16 for q3_k and q6_k), each with small integers as scales:

    q3_k    ┌ 32 bytes ┬ 64 bytes ┬ 12 bytes: s, 6 bits each ┬ d f16 ┐                 w = d · (s - 32) · (q - 4)
            value 32i + n: the high bit is bit i of byte n of the 32; the 2 low bits are in byte n of the first (i < 4)
            or second 32 of the 64 bytes, from bit 2 (i mod 4) on
    q4_k    ┌ d f16 ┬ d' f16 ┬ 12 bytes: s, m of each group, 6 bits each ┬ 128 bytes ┐  w = d · s · q - d' · m
            groups 2i and 2i + 1: the low and the high halves of bytes 32i to 32i + 31
    q5_k    ┌ d f16 ┬ d' f16 ┬ 12 bytes, as q4_k ┬ 32 bytes ┬ 128 bytes, as q4_k ┐      likewise
            bit i of byte n of the 32: the fifth bit of value n of group i
    q6_k    ┌ 128 bytes ┬ 64 bytes ┬ 16 signed bytes: s ┬ d f16 ┐                       w = d · s · (q - 32)
            per 128 values (i from 0 to 3, n from 0 to 31): value 32i + n has its 4 low bits in byte 32 (i mod 2) + n
            of 64, in the low half if i < 2; and its 2 high bits in byte n of 32, from bit 2i on
    iq4_xs  ┌ d f16 ┬ 6 bytes: s, 6 bits each ┬ 16 bytes for each group, as q4_0 ┐     w = d · (s - 32) · table[q]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockFormat:
    """One format.

    Attributes:
        block_values: Values per block.
        block_bytes: Bytes per block.
        dequantize: Converts blocks [n, block_bytes], uint8, to values [n, block_values], float32.
    """

    block_values: int
    block_bytes: int
    dequantize: Callable[[torch.Tensor], torch.Tensor]

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row of `in_features` values, a multiple of `block_values`."""
        return in_features // self.block_values * self.block_bytes


def dequantize_rows(data: torch.Tensor, format: str) -> torch.Tensor:
    """Dequantizes rows of blocks [rows, row_bytes], uint8, to float32 [rows, in_features].

    Every operation rounds to float32, in the order of the formulas, so results are bit-identical to other
    implementations.
    """
    known = BLOCK_FORMATS[format]
    return known.dequantize(data.reshape(-1, known.block_bytes)).view(data.shape[0], -1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 in the two bytes at `start`, [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves of all bytes, then high halves: [..., bytes] to [..., 2 · bytes]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _five_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Values [n, 32], uint8: their fifth bits are in the 4 bytes at `start`, their low bits after these."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, start : start + 4, None] >> shifts) & 1).flatten(1)
    return _nibbles(blocks[:, start + 4 :]) | (high << 4)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _five_bits(blocks, 4).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # Twice the values, times half the scale, which is subnormal for the two smallest exponents.
    numbers = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
    half_scales = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)], dtype=torch.float32)
    scale = half_scales.to(blocks.device)[blocks[:, :1].long()]
    return scale * numbers.to(blocks.device)[_nibbles(blocks[:, 1:]).long()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _from_table(_nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1)
    scales = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    values = _from_table(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)))
    return (scales[:, :, None] * values).flatten(1)


def _from_table(codes: torch.Tensor) -> torch.Tensor:
    """The quantization levels of iq4_nl and iq4_xs."""
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    twos, ones = (torch.arange(0, 8, step, dtype=torch.uint8, device=blocks.device)[:, None] for step in (2, 1))
    low = ((blocks[:, 32:96].reshape(-1, 2, 1, 32) >> twos) & 3).view(-1, 8, 32)
    high = (blocks[:, None, :32] >> ones) & 1
    upper = ((blocks[:, None, 104:108] >> twos) & 3).flatten(1)
    scales = _half(blocks, 108) * ((_nibbles(blocks[:, 96:104]) | (upper << 4)).float() - 32)
    values = (low | (high << 2)).float() - 4
    return (scales[:, :, None] * values.view(-1, 16, 16)).flatten(1)


def _sub_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight groups from 12 bytes [n, 12], each [n, 8, 1], float32."""
    first, second, last = packed.split(4, dim=1)
    scales = torch.cat((first & 63, (last & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (last >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _scaled_groups(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values [n, 8, 32] of q4_k or q5_k with the block's scales."""
    scales, minima = _sub_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima
    return (scale * values.float() - minimum).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & 1
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_groups(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (scales[:, :, None] * values.view(-1, 16, 16)).flatten(1)


BLOCK_FORMATS = {
    "q4_0": BlockFormat(32, 18, _q4_0),
    "q4_1": BlockFormat(32, 20, _q4_1),
    "q5_0": BlockFormat(32, 22, _q5_0),
    "q5_1": BlockFormat(32, 24, _q5_1),
    "q8_0": BlockFormat(32, 34, _q8_0),
    "q4_k": BlockFormat(256, 144, _q4_k),
    "q5_k": BlockFormat(256, 176, _q5_k),
    "q6_k": BlockFormat(256, 210, _q6_k),
    "mxfp4": BlockFormat(32, 17, _mxfp4),
    "q3_k": BlockFormat(256, 110, _q3_k),
    "iq4_nl": BlockFormat(32, 18, _iq4_nl),
    "iq4_xs": BlockFormat(256, 136, _iq4_xs),
}
"""The formats by name."""
