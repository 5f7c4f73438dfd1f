"""The config.json of the tests' zoo: every family, and one model with every format of quantized weights."""

from __future__ import annotations

import json
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.helpers.float8_zoo import FLOAT8_SCHEMES
from tests.helpers.model_zoo import ZOO
from tests.helpers.quantized_zoo import SCHEMES

_QUANTIZED = "llama-gqa"
_FORMATS = {**SCHEMES, **FLOAT8_SCHEMES}
_SELECTS = ("dsa", "glm5")
"""Families that the platform refuses: their attention selects keys with `AttentionBackend.select`."""

_READ = ("gptq-symmetric-v2", "gptq-desc-act", "gptq-head-and-rules", "w4a16-actorder")
"""Formats whose loading looks at values, which do not exist here. Their launches are those of other formats."""

NAMES = (
    *(name for name in ZOO if not name.startswith(_SELECTS)),
    *(f"{_QUANTIZED} {scheme}" for scheme in _FORMATS if scheme not in _READ),
)
"""Checkpoints of `model_zoo.ZOO`, and those of one of these with quantized weights: `llama-gqa awq`."""


def values_of(name: str) -> dict[str, Any]:
    """The values of config.json of one of NAMES."""
    checkpoint, _, scheme = name.partition(" ")
    config = ZOO[checkpoint].config()
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    if (edit := ZOO[checkpoint].edit_config) is not None:
        edit(values)
    if scheme:
        values["quantization_config"] = _FORMATS[scheme].config
    return values
