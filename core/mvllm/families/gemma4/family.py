"""Gemma 4: its record, and what it takes beside text."""

from __future__ import annotations

from mvllm.config.encoder_parts import image_token_id, part_config, token_id, video_token_id, vision_config
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel


def _read_items(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    has_videos = hf.get("video_token_id", 0) is not None
    videos = {"video": video_token_id(hf, 258_884)} if has_videos else {}
    audio = {"audio": token_id(hf, ("audio_token_id",), 258_881)} if part_config(hf, "audio_config") else {}
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 258_880), **videos, **audio},
        embedding_width=hf.positive_int("hidden_size"),
        spans_attend_both_ways=hf.get("use_bidirectional_attention") == "vision",
    )


FAMILY = ModelFamily(
    architectures={
        "Gemma4ForCausalLM": Architecture("mvllm.families.gemma4.model:Gemma4ForCausalLM", tool_parser="gemma4"),
        "Gemma4ForConditionalGeneration": Architecture(
            "mvllm.families.gemma4.vision:Gemma4",
            language_model="Gemma4ForCausalLM",
            read_items=_read_items,
            items="mvllm.families.gemma4.items:Gemma4Items",
            may_be_text=True,
            tool_parser="gemma4",
        ),
    },
    model_types={"gemma4_text": ModelType("Gemma4ForCausalLM", head_dim=256, sliding_window=512)},
)
