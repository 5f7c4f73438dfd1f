"""Checkpoints with sparse attention, for `model_zoo.ZOO`: few positions are selected, so prompts of tests exceed them.

Queries have many index heads: with few heads, all products of a key with a query are often negative, its score is 0
like that of others, and transformers selects any of them. A seed other than 0 is one with which the scores of the last
selected and the first other position differ by 30 times the rounding errors of float32 or more in the parity tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import DeepseekV32Config, GlmMoeDsaConfig, PreTrainedConfig

from tests.helpers.zoo_large_moe import with_old_keys

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
}
_GROUPED = {"n_group": 4, "topk_group": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}


def _deepseek(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: DeepseekV32Config(**{**_SIZES, **_GROUPED, **settings})


def _glm(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: GlmMoeDsaConfig(**{**_SIZES, "num_hidden_layers": 4, **settings})


SPARSE_ATTENTION: dict[str, dict[str, Any]] = {
    "dsa": {"config": _deepseek(), "edit_config": with_old_keys, "exhaustive": True},
    "dsa-yarn": {
        "config": _deepseek(index_topk=16, index_head_dim=24, rope_parameters=_YARN),
        "exhaustive": True,
        "seed": 2,
    },
    "glm5": {"config": _glm(indexer_types=["full", "shared", "full", "shared"]), "exhaustive": True, "seed": 2},
    "glm5-full": {
        "config": _glm(index_topk=16, n_shared_experts=2, rms_norm_eps=1e-6, num_hidden_layers=2),
        "exhaustive": True,
        "seed": 5,
    },
}
"""Settings of ZooEntry by name."""
