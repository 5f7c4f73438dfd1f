"""The sliding window of each layer, in families that mix layers with and without one."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError


def layer_windows(config: ModelConfig, is_full: Callable[[int], bool] | None = None) -> tuple[int | None, ...]:
    """Sliding window of each layer, or None: `layer_types` names the layers that have one.

    Args:
        config: The checkpoint.
        is_full: Whether a layer has no window, where the config has no `layer_types`. None: layers below
            `max_window_layers` have none.

    Raises:
        ModelError: `layer_types` does not fit the model.
    """
    hf, window = config.hf_config, config.sliding_window
    types = hf.get("layer_types")
    if types is None:
        stop = hf.get("max_window_layers", 28)
        is_full = is_full or (lambda layer: bool(layer < stop))
        return tuple(None if is_full(layer) else window for layer in range(config.num_layers))
    names = {"full_attention": None, "sliding_attention": window, "attention": None}
    listed = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not listed or len(types) != config.num_layers or not set(types) <= names.keys():
        raise ModelError(
            f"{hf.source}: layer_types should name full_attention or sliding_attention for each of the "
            f"{config.num_layers} layers, found {types}."
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            f"{hf.source}: layer_types names sliding_attention, but no sliding_window is in effect: it is null, or "
            "use_sliding_window is false. Correct the file, or pass hf_overrides with layer_types of full_attention."
        )
    return tuple(names[kind] for kind in types)
