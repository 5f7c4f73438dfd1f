"""The kind of each layer, in families that mix attention with layers of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError

ATTENTION = "full_attention"


def layer_kinds(
    config: ModelConfig,
    *others: str,
    key: str = "layer_types",
    is_attention: Callable[[int], bool] | None = None,
    old_names: Mapping[str, str] = {},
) -> tuple[str, ...]:
    """ATTENTION or one of `others` for each layer, from `key` of config.json.

    Args:
        config: The checkpoint.
        others: Names of the other kinds.
        key: The key.
        is_attention: Whether a layer has attention, where the config has no such key. The other layers are of the first
            of `others`. None if the config must have it.
        old_names: Other names of these kinds.

    Raises:
        ModelError: The key does not name one of these kinds for each layer, or is missing.
    """
    hf, allowed = config.hf_config, (ATTENTION, *others)
    found = hf.get(key)
    if found is None and is_attention is not None:
        return tuple(ATTENTION if is_attention(layer) else others[0] for layer in range(config.num_layers))
    kinds = [old_names.get(kind, kind) if isinstance(kind, str) else kind for kind in hf.require(key, list)]
    if len(kinds) != config.num_layers or any(kind not in allowed for kind in kinds):
        raise ModelError(
            f"{hf.source}: {key} should name {', '.join(allowed[:-1])} or {allowed[-1]} for each of the "
            f"{config.num_layers} layers, found {found!r}."
        )
    return tuple(kinds)
