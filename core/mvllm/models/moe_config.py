"""Helpers for families with experts: checks of config.json, and the shared-expert MLP."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext
from mvllm.layers.mlp import GatedMLP


def check_activation(hf: HFConfig, layers: str = "experts") -> None:
    """Checks that layers of a kind use silu.

    Args:
        hf: The `config.json`.
        layers: The kind, for the message.

    Raises:
        ModelError: They use another activation.
    """
    name = hf.get("hidden_act", "silu")
    if not isinstance(name, str) or ACTIVATIONS.get(name) != "silu":
        raise ModelError(f"{hf.source}: hidden_act is {name!r}, but {layers} are supported with 'silu' only.")


def num_experts(hf: HFConfig, *keys: str) -> int:
    """Number of experts of a layer, from the first of `keys` that the config has.

    Raises:
        ModelError: The config has none of them, or the value is not a positive integer.
    """
    return hf.positive_int(next((key for key in keys if key in hf), keys[0]))


def shared_mlp(config: ModelConfig, ctx: BuildContext, name: str, size: int, *, bias: bool = False) -> GatedMLP:
    """The MLP of the shared experts, with inner size `size`."""
    return GatedMLP(ctx, name, config.hidden_size, size, config.hf_config.get("hidden_act", "silu"), bias=bias)
