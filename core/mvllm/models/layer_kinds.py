"""The kind of each layer, in families that mix attention with layers of another kind."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError


def layer_kinds(config: ModelConfig, other: str, is_attention: Callable[[int], bool]) -> tuple[str, ...]:
    """`full_attention` or `other` for each layer: `layer_types` of the config.

    Args:
        config: The checkpoint.
        other: Name of the other kind.
        is_attention: Whether a layer has attention, where the config has no `layer_types`.

    Raises:
        ModelError: `layer_types` does not fit the model.
    """
    hf, kinds = config.hf_config, ("full_attention", other)
    types = hf.get("layer_types")
    if types is None:
        return tuple(kinds[0] if is_attention(layer) else other for layer in range(config.num_layers))
    if not isinstance(types, list) or len(types) != config.num_layers or not all(kind in kinds for kind in types):
        raise ModelError(
            f"{hf.source}: layer_types should name full_attention or {other} for each of the {config.num_layers} "
            f"layers, found {types}."
        )
    return tuple(types)
