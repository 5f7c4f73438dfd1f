"""RoPE parameters of each layer type, in families whose layers with and without a window have different ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, is_per_layer_type, rope_settings


def layer_type_ropes(
    config: ModelConfig, full: Mapping[str, Any], local: Mapping[str, Any]
) -> tuple[RopeParameters, RopeParameters]:
    """RoPE parameters of layers without and with a window. A scaling in the old format applies to those without.

    Args:
        config: The checkpoint.
        full, local: Defaults of the settings, for layers without and with a window.

    Raises:
        ModelError: As RopeParameters.from_config.
    """
    hf, settings = config.hf_config, rope_settings(config.hf_config)
    by_type = settings if is_per_layer_type(settings) else {"full_attention": settings}
    without, within = (
        RopeParameters.from_config(hf, config.head_size, settings={**defaults, **(by_type.get(kind) or {})})
        for kind, defaults in (("full_attention", full), ("sliding_attention", local))
    )
    return without, within
