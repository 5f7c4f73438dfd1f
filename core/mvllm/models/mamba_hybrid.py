"""Settings in config.json of decoders that mix attention with Mamba-2 layers."""

from __future__ import annotations

import math

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.mamba2_mixer import Mamba2Config
from mvllm.models.layer_kinds import ATTENTION

MAMBA = "linear_attention"
OLD_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
"""Names of kinds of layers in the first checkpoints."""


def mamba2_config(config: ModelConfig, *, norm: bool = True, norm_before_gate: bool = False) -> Mamba2Config:
    """Sizes and options of the Mamba-2 layers, from the keys `mamba_*` of config.json.

    Raises:
        ModelError: A key is missing or invalid.
    """
    hf = config.hf_config
    num_heads = hf.positive_int("mamba_n_heads")
    inner = hf.positive_int("mamba_d_ssm", hf.positive_int("mamba_expand", 2) * config.hidden_size)
    head_size = hf.get("mamba_d_head", "auto")
    head_size = inner // num_heads if head_size == "auto" else hf.positive_int("mamba_d_head")
    if num_heads * head_size != inner:
        raise ModelError(
            f"{hf.source}: {num_heads} Mamba heads of {head_size} elements ('mamba_n_heads', 'mamba_d_head') are not "
            f"the inner size of a Mamba layer, {inner}."
        )
    return Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        head_size=head_size,
        num_groups=hf.positive_int("mamba_n_groups", 1),
        state_size=hf.positive_int("mamba_d_state"),
        conv_kernel=hf.positive_int("mamba_d_conv", 4),
        conv_bias=bool(hf.get("mamba_conv_bias", True)),
        in_bias=bool(hf.get("mamba_proj_bias", False)),
        out_bias=bool(hf.get("mamba_proj_bias", False)),
        activation=hf.get("hidden_act", "silu"),
        norm=norm,
        norm_before_gate=norm_before_gate,
        eps=hf.positive_number("rms_norm_eps", 1e-5),
        dt_limit=time_step_limit(hf),
    )


def time_step_limit(hf: HFConfig) -> tuple[float, float]:
    """`time_step_limit`: the smallest and largest time step.

    Raises:
        ModelError: It is not a pair of numbers, the first not above the second.
    """
    found = hf.get("time_step_limit", [0.0, math.inf])
    pair = [_number(value) for value in found] if isinstance(found, list | tuple) else []
    if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
        raise ModelError(f"{hf.source}: 'time_step_limit' should be two ascending numbers >= 0, found {found!r}.")
    return pair[0], pair[1]


def _number(value: object) -> float:
    """A number of config.json, where infinity may be {"__float__": "Infinity"}; NaN for anything else."""
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) else math.nan
