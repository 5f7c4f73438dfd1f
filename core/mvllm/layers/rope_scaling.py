"""Rotary frequencies under each RoPE scaling, in float32 and in the reference implementation's order of operations, so
that angles agree to the last bit even at large positions.

Sources: rotary embedding, arXiv:2104.09864; linear interpolation, arXiv:2306.15595; YaRN, arXiv:2309.00071; LongRoPE,
arXiv:2402.13753; dynamic NTK and the Llama 3 scaling, the transformers library.
"""

from __future__ import annotations

import math

import torch

from mvllm.config.rope_parameters import RopeParameters


def frequencies(p: RopeParameters) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of elements, and the factor on cosines and sines.

    For `longrope` these are the frequencies of short sequences; see `long_frequencies`. For `dynamic` those of
    sequences within the original context; see `dynamic_frequencies`.

    Returns:
        [rotary_dim / 2] float32 on the host, and the factor.
    """
    match p.rope_type:
        case "linear":
            return _plain(p) / p.values["factor"], 1.0
        case "yarn":
            return _yarn(p)
        case "longrope":
            return _longrope(p, "short_factor")
        case "llama3":
            return _llama3(p), 1.0
        case "proportional":
            return _proportional(p), 1.0
        case "ntk_alpha":
            base = p.theta * p.values["alpha"] ** (p.rotary_dim / (p.rotary_dim - 2))
            return 1.0 / base ** _exponents(p.rotary_dim, p.rotary_dim), 1.0
        case _:
            return _plain(p), 1.0


def long_frequencies(p: RopeParameters) -> tuple[torch.Tensor, float]:
    """`longrope`: as `frequencies`, for sequences longer than the original context."""
    return _longrope(p, "long_factor")


def dynamic_frequencies(p: RopeParameters, lengths: torch.Tensor) -> torch.Tensor:
    """`dynamic`: frequencies for sequences of `lengths` tokens.

    Args:
        p: The settings.
        lengths: [n], integers, on the host; smaller ones count as the original context length.

    Returns:
        [n, rotary_dim / 2] float32.
    """
    factor, dim = p.values["factor"], p.rotary_dim
    growth = (factor * lengths.clamp(min=p.max_position) / p.max_position) - (factor - 1)
    # The power in float64, as torch computes it for a single number.
    power = (growth.double() ** (dim / (dim - 2))).float() if dim > 2 else torch.ones_like(growth)
    return 1.0 / (p.theta * power).unsqueeze(-1) ** _exponents(dim, dim)


def _exponents(count: int, denominator: int) -> torch.Tensor:
    return torch.arange(0, count, 2, dtype=torch.int64).float() / denominator


def _plain(p: RopeParameters) -> torch.Tensor:
    return 1.0 / p.theta ** _exponents(p.rotary_dim, p.rotary_dim)


def _proportional(p: RopeParameters) -> torch.Tensor:
    rotated = int(p.values["partial_rotary_factor"] * p.head_size // 2)
    moving = 1.0 / p.theta ** _exponents(2 * rotated, p.head_size)
    return torch.cat((moving, torch.zeros(p.head_size // 2 - rotated))) / p.values.get("factor", 1.0)


def _longrope(p: RopeParameters, key: str) -> tuple[torch.Tensor, float]:
    stretch = torch.tensor(p.values[key], dtype=torch.float32)
    inv_freq = 1.0 / (stretch * p.theta ** _exponents(p.rotary_dim, p.rotary_dim))
    scale = p.values.get("attention_factor")
    if scale is None:
        factor = p.values.get("factor") or p.max_position / p.original_max_position
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(p.original_max_position))
    return inv_freq, float(scale)


def _yarn(p: RopeParameters) -> tuple[torch.Tensor, float]:
    factor = p.values.get("factor") or p.max_position / p.original_max_position
    half = p.rotary_dim // 2
    low, high = (_rotations_to_dim(p, p.values.get(key) or default) for key, default in _YARN_BETAS)
    if p.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.rotary_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - torch.clamp((torch.arange(half, dtype=torch.float32) - low) / width, 0, 1)

    wavelengths = p.theta ** _exponents(p.rotary_dim, p.rotary_dim)
    inv_freq = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    return inv_freq, _yarn_attention_factor(p, factor)


_YARN_BETAS = (("beta_fast", 32), ("beta_slow", 1))


def _rotations_to_dim(p: RopeParameters, rotations: float) -> float:
    """The dimension whose wave makes `rotations` full turns within the original context."""
    turns = math.log(p.original_max_position / (rotations * 2 * math.pi))
    return p.rotary_dim * turns / (2 * math.log(p.theta))


def _yarn_attention_factor(p: RopeParameters, factor: float) -> float:
    attention_factor = p.values.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = p.values.get("mscale"), p.values.get("mscale_all_dim")
    return mscale(above) / mscale(below) if above and below else mscale(1)


def _llama3(p: RopeParameters) -> torch.Tensor:
    inv_freq = _plain(p)
    factor, low, high = (p.values[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * math.pi / inv_freq
    context = p.original_max_position
    scaled = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)
