"""Models that generate images: Janus and Emu3. Their token spaces are in `mvllm.config.image_families`."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={
        "Emu3ForConditionalGeneration": Architecture("mvllm.models.emu3:Emu3ForConditionalGeneration"),
        "JanusForConditionalGeneration": Architecture("mvllm.models.janus:JanusForConditionalGeneration"),
    },
    model_types={
        "emu3": ModelType("Emu3ForConditionalGeneration"),
        "emu3_text_model": ModelType(never_sliding=True),
        "janus": ModelType("JanusForConditionalGeneration"),
    },
)
