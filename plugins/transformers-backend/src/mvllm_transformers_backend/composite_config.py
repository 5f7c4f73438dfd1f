"""Reads what checkpoints take beside text whose model runs through transformers, with transformers' config classes.

Published configs leave out values that are transformers' defaults, and this module has no table of them: the config
class of the checkpoint's `model_type` fills them in. It is imported only for such checkpoints. Needs no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from mvllm.extension_api import HFConfig, get_logger
from mvllm.extension_api.model_families import MODALITIES
from mvllm.extension_api.model_implementations import CompositeConfig

logger = get_logger("mvllm.transformers_backend.composite_config")

_PARTS = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}
"""By modality: the part of a config without which there is no encoder, if the config class knows such a part."""


def read_composite_config(whole: HFConfig) -> CompositeConfig | None:
    """Reads a config with a `text_config`, as it is in the file.

    Returns:
        None if transformers has no such `model_type`, cannot read the values, or if the model takes text alone.
    """
    if not isinstance(whole.get("text_config"), dict):
        return None
    config = _transformers_config(whole.as_dict())
    text = getattr(config, "text_config", None)
    if text is None:
        return None
    placeholders = _placeholders(config)
    return CompositeConfig({**_own_values(text), "model_type": text.model_type}, placeholders) if placeholders else None


def _transformers_config(values: Mapping[str, Any]) -> Any:
    """transformers' config of these values; None if it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(values)))
    except Exception as e:  # noqa: BLE001  (building the model reports it)
        logger.debug("transformers' config of %s: %s: %s", model_type, type(e).__name__, e)
        return None


def _own_values(text: Any) -> dict[str, Any]:
    """The values that the config class of a language model defines itself."""
    from transformers import PreTrainedConfig

    common = PreTrainedConfig().to_dict()
    return {key: value for key, value in text.to_dict().items() if key not in common and value is not None}


def _placeholders(config: Any) -> dict[str, int]:
    """By modality, the token id of the positions that take an embedding."""
    found: dict[str, int] = {}
    for modality in MODALITIES:
        part = _PARTS[modality]
        if part in config.sub_configs and getattr(config, part, None) is None:
            continue
        ids = (getattr(config, f"{modality}_token_{key}", None) for key in ("id", "index"))
        token_id = next((value for value in ids if type(value) is int and value >= 0), None)
        if token_id is not None:
            found[modality] = token_id
    return found
