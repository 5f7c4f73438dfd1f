"""Helpers for families with experts: settings in config.json, and the shared-expert MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.routing import Routing


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


def has_dense_mlp(config: ModelConfig, layer: int, is_dense: Callable[[int], bool]) -> bool:
    """Whether a layer has an MLP without experts: as `mlp_layer_types` says, or `is_dense` where there is no such key.

    Raises:
        ModelError: `mlp_layer_types` does not fit the model.
    """
    types = config.hf_config.get("mlp_layer_types")
    if types is None:
        return is_dense(layer)
    if not isinstance(types, list) or len(types) != config.num_layers or not {*types} <= {"dense", "sparse"}:
        raise ModelError(
            f"{config.hf_config.source}: mlp_layer_types should name dense or sparse for each of the "
            f"{config.num_layers} layers, found {types!r}."
        )
    return bool(types[layer] == "dense")


def grouped_routing(
    hf: HFConfig,
    scores: Literal["softmax", "sigmoid"],
    *,
    top_k: int | None = None,
    defaults: tuple[float, int, int] = (1.0, 1, 1),
) -> Routing:
    """Routing limited to the groups with the best two-score sums.

    Args:
        hf: The `config.json`.
        scores: As in Routing.
        top_k: Default of `num_experts_per_tok`; None if the config must have it.
        defaults: Of `routed_scaling_factor`, `n_group` and `topk_group`.

    Raises:
        ModelError: A key is missing or invalid.
    """
    scale, num_groups, top_groups = defaults
    return Routing(
        hf.positive_int("num_experts_per_tok", top_k),
        scores,
        normalize=bool(hf.get("norm_topk_prob", True)),
        scale=hf.positive_number("routed_scaling_factor", scale),
        num_groups=hf.positive_int("n_group", num_groups),
        top_groups=hf.positive_int("topk_group", top_groups),
        group_by="best_two",
    )


def shared_mlp(config: ModelConfig, ctx: BuildContext, name: str, size: int, *, bias: bool = False) -> GatedMLP:
    """The MLP of the shared experts, with inner size `size`."""
    return GatedMLP(ctx, name, config.hidden_size, size, config.hf_config.get("hidden_act", "silu"), bias=bias)
