"""The families that are one file in `mvllm.models`: the class of each architecture, and how config.json is read."""

from __future__ import annotations

from typing import Any

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads, pooling_architectures
from mvllm.config.rope_parameters import YARN_DEFAULTS

_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN2 = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_LFM2 = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
}
_MINISTRAL3_ROPE = {
    **YARN_DEFAULTS,
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
}


def _read_falcon(values: dict[str, Any]) -> dict[str, Any]:
    """With multi-query attention, the number of key-value heads in config.json has no effect."""
    if values.get("new_decoder_architecture") or not values.get("multi_query", True):
        return values
    return {**values, "num_key_value_heads": 1}


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mimo": "MiMoForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_moe": "HunYuanMoEV1ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan": "HunYuanDenseV1ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "falcon": "FalconForCausalLM",
    "bamba": "BambaForCausalLM",
    "granite_moe": "GraniteMoeForCausalLM",
    "granite_moe_hybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM Lfm2MoeForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
}
"""By module of `mvllm.models`: its classes, which have the names of architectures."""
_SAME_CLASS = {
    "Ernie4_5_ForCausalLM": "ernie4_5:Ernie4_5ForCausalLM",
    "GraniteMoeSharedForCausalLM": "granite_moe:GraniteMoeForCausalLM",
}
"""Further architectures, and the class that runs them."""
_MTP = {
    "Ernie4_5_MoeForCausalLM": MTPHeads("mvllm.models.ernie4_5_moe:Ernie4_5_MoeMTP", "model.mtp_"),
    "MiMoForCausalLM": MTPHeads("mvllm.models.mimo:MiMoMTP", "model.mtp_layers."),
}
"""The multi-token-prediction modules of architectures."""
_POOLING_DECODERS = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
_ENCODERS = {"Bert": "Bert", "Roberta": "Roberta", "XLMRoberta": "Roberta", "DistilBert": "DistilBert"}
"""The class of `mvllm.models.bert` for each family of encoders. `ModelKind` says which head one has."""

FAMILY = ModelFamily(
    architectures={
        **{
            name: Architecture(f"mvllm.models.{module}:{name}", mtp=_MTP.get(name))
            for module, names in _CLASSES.items()
            for name in names.split()
        },
        **{name: Architecture(f"mvllm.models.{path}") for name, path in _SAME_CLASS.items()},
        **{
            f"{name}{head}": Architecture(f"mvllm.models.bert:{encoder}", is_encoder=True, is_headless=True)
            for name, encoder in _ENCODERS.items()
            for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
        },
        **{
            name: architecture
            for decoder, module in _POOLING_DECODERS.items()
            for name, architecture in pooling_architectures(
                decoder, f"mvllm.models.{module}:{decoder}ForCausalLM"
            ).items()
        },
    },
    model_types={
        "llama": ModelType("LlamaForCausalLM", never_sliding=True, text_defaults=_LLAMA),
        "qwen2": ModelType("Qwen2ForCausalLM", sliding_window=4096, use_sliding_window=False, text_defaults=_QWEN2),
        "mimo": ModelType("MiMoForCausalLM", sliding_window=4096, use_sliding_window=False),
        "qwen3": ModelType("Qwen3ForCausalLM", head_dim=128, sliding_window=4096, use_sliding_window=False),
        "mistral": ModelType("MistralForCausalLM", sliding_window=4096, text_defaults=_MISTRAL),
        "mixtral": ModelType("MixtralForCausalLM"),
        "qwen2_moe": ModelType("Qwen2MoeForCausalLM", sliding_window=4096, use_sliding_window=False),
        "qwen3_moe": ModelType("Qwen3MoeForCausalLM", sliding_window=4096, use_sliding_window=False),
        "minimax_m2": ModelType(
            "MiniMaxM2ForCausalLM", head_dim=128, never_sliding=True, key_aliases={"num_experts": "num_local_experts"}
        ),
        "ernie4_5_moe": ModelType("Ernie4_5_MoeForCausalLM", never_sliding=True),
        "hunyuan_v1_moe": ModelType(
            "HunYuanMoEV1ForCausalLM",
            never_sliding=True,
            key_aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        ),
        "cohere2_moe": ModelType("Cohere2MoeForCausalLM", head_dim=128, sliding_window=4096),
        "opt": ModelType("OPTForCausalLM", never_sliding=True),
        "gpt2": ModelType("GPT2LMHeadModel", never_sliding=True),
        "bert": ModelType("BertModel", never_sliding=True),
        "roberta": ModelType("RobertaModel", never_sliding=True),
        "xlm-roberta": ModelType("XLMRobertaModel", never_sliding=True),
        "distilbert": ModelType("DistilBertModel", never_sliding=True),
        "gemma2": ModelType("Gemma2ForCausalLM", head_dim=256, sliding_window=4096),
        "gemma3_text": ModelType("Gemma3ForCausalLM", head_dim=256, sliding_window=4096, text_defaults=_GEMMA3_TEXT),
        "phi3": ModelType("Phi3ForCausalLM"),
        "granite": ModelType("GraniteForCausalLM", never_sliding=True),
        "olmo2": ModelType("Olmo2ForCausalLM", never_sliding=True),
        "olmo3": ModelType("Olmo3ForCausalLM", sliding_window=4096),
        "smollm3": ModelType("SmolLM3ForCausalLM", use_sliding_window=False),
        "seed_oss": ModelType("SeedOssForCausalLM", head_dim=128, never_sliding=True),
        "exaone4": ModelType("Exaone4ForCausalLM", sliding_window=4096),
        "cohere2": ModelType("Cohere2ForCausalLM", sliding_window=4096),
        "ministral3": ModelType("Ministral3ForCausalLM", head_dim=128, rope_defaults=_MINISTRAL3_ROPE),
        "ernie4_5": ModelType("Ernie4_5ForCausalLM", head_dim=128, never_sliding=True),
        "hunyuan_v1_dense": ModelType("HunYuanDenseV1ForCausalLM", never_sliding=True),
        "starcoder2": ModelType("Starcoder2ForCausalLM"),
        "falcon": ModelType("FalconForCausalLM", never_sliding=True, context_length=2048, read_config=_read_falcon),
        "bamba": ModelType("BambaForCausalLM", never_sliding=True),
        "granitemoe": ModelType("GraniteMoeForCausalLM", never_sliding=True),
        "granitemoeshared": ModelType("GraniteMoeSharedForCausalLM", never_sliding=True),
        "granitemoehybrid": ModelType(
            "GraniteMoeHybridForCausalLM", never_sliding=True, key_aliases={"layers_block_type": "layer_types"}
        ),
        "falcon_h1": ModelType("FalconH1ForCausalLM", never_sliding=True),
        "mamba2": ModelType("Mamba2ForCausalLM"),
        "lfm2": ModelType("Lfm2ForCausalLM", never_sliding=True, text_defaults=_LFM2),
        "lfm2_moe": ModelType("Lfm2MoeForCausalLM", never_sliding=True),
        "olmo_hybrid": ModelType("OlmoHybridForCausalLM", never_sliding=True),
    },
)
"""One record for all of them."""
