"""Language models with audio whose encoders are in `mvllm.models.audio`: Qwen2-Audio and Voxtral."""

from __future__ import annotations

from mvllm.config.encoder_parts import part_config, token_id
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel


def _qwen2_audio(hf: HFConfig) -> MultiModalModel | None:
    audio = part_config(hf, "audio_config")
    if audio is None:
        return None
    return MultiModalModel(
        placeholders={"audio": token_id(hf, ("audio_token_id", "audio_token_index"), 151_646)},
        embedding_width=hf.positive_int("hidden_size"),
        max_encoded=audio.positive_int("max_source_positions", 1500) // 2,
    )


def _voxtral(hf: HFConfig) -> MultiModalModel | None:
    if part_config(hf, "audio_config") is None:
        return None
    return MultiModalModel(
        placeholders={"audio": token_id(hf, ("audio_token_id",), 24)}, embedding_width=hf.positive_int("hidden_size")
    )


FAMILY = ModelFamily(
    architectures={
        "Qwen2AudioForConditionalGeneration": Architecture(
            "mvllm.models.audio.qwen2_audio:Qwen2Audio", language_model="Qwen2ForCausalLM", read_items=_qwen2_audio
        ),
        "VoxtralForConditionalGeneration": Architecture(
            "mvllm.models.audio.voxtral:Voxtral",
            language_model="LlamaForCausalLM",
            read_items=_voxtral,
            items="mvllm.multimodal.item_families.voxtral:VoxtralItems",
        ),
    },
    model_types={
        "qwen2_audio": ModelType(text_type="qwen2"),
        "voxtral": ModelType(
            text_type="llama",
            text_defaults={
                "vocab_size": 131_072,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "num_hidden_layers": 30,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 100_000_000.0,
            },
        ),
    },
)
