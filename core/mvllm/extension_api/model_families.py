"""For packages whose models have a config.json that core cannot read alone. Importing it loads no torch."""

from __future__ import annotations

from mvllm.config.hf_config import read_json_object as read_json_object
from mvllm.config.model_families import ModelFamily as ModelFamily
from mvllm.config.token_spaces import TokenSpace as TokenSpace

__all__ = ["ModelFamily", "TokenSpace", "read_json_object"]
