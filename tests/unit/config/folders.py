"""Builders of model folders for the configuration tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "vocab_size": 100,
}


def write_folder(
    folder: Path, base: dict[str, Any] = LLAMA, *, generation: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A folder with the config of `base`; a change to `...` removes the key."""
    values = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
