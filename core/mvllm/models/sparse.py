"""What families with experts read from their config.json alike."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS


def check_activation(hf: HFConfig) -> None:
    """Refuses experts that are not gated by silu.

    Raises:
        ModelError: Says what was found.
    """
    name = hf.get("hidden_act", "silu")
    if ACTIVATIONS.get(name) != "silu":
        raise ModelError(f"{hf.source}: experts gated by {name!r} are not supported, those gated by 'silu' are.")


def num_experts(hf: HFConfig, *keys: str) -> int:
    """Experts of a layer, under the first of `keys` that is there.

    Raises:
        ModelError: None is, or it holds something else.
    """
    return hf.positive_int(next((key for key in keys if key in hf), keys[0]))
