"""Checkpoints of families with sequence states, for `model_zoo.ZOO`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Mamba2Config, PreTrainedConfig

_MAMBA2 = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

Config = Callable[[], PreTrainedConfig]


def _mamba2(**settings: Any) -> Config:
    return lambda: Mamba2Config(**{**_MAMBA2, **settings})


def _with_length(config: dict[str, Any]) -> None:
    """Adds the context length, which transformers does not know."""
    config["max_position_embeddings"] = 256


STATE: dict[str, dict[str, Any]] = {
    "mamba2": {"config": _mamba2(), "edit_config": _with_length},
    "mamba2-one-group-biases-tied": {
        "config": _mamba2(n_groups=1, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=True),
        "edit_config": _with_length,
        "exhaustive": True,
    },
    "mamba2-few-heads": {
        "config": _mamba2(
            num_hidden_layers=2,
            num_heads=4,
            head_dim=32,
            state_size=24,
            n_groups=2,
            layer_norm_epsilon=1e-6,
        ),
        "edit_config": _with_length,
        "exhaustive": True,
        "seed": 3,
    },
}
