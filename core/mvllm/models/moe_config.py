"""What families with experts read from their config.json alike."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext
from mvllm.layers.mlp import GatedMLP


def check_activation(hf: HFConfig) -> None:
    """Refuses experts that are not gated by silu.

    Raises:
        ModelError: Says what was found.
    """
    name = hf.get("hidden_act", "silu")
    if not isinstance(name, str) or ACTIVATIONS.get(name) != "silu":
        raise ModelError(f"{hf.source}: experts gated by {name!r} are not supported, those gated by 'silu' are.")


def num_experts(hf: HFConfig, *keys: str) -> int:
    """Experts of a layer, under the first of `keys` that is there.

    Raises:
        ModelError: None is, or it holds something else.
    """
    return hf.positive_int(next((key for key in keys if key in hf), keys[0]))


def shared_mlp(config: ModelConfig, ctx: BuildContext, name: str, size: int, *, bias: bool = False) -> GatedMLP:
    """An MLP beside the experts, which every token passes, of inner size `size`."""
    return GatedMLP(ctx, name, config.hidden_size, size, config.hf_config.get("hidden_act", "silu"), bias=bias)
