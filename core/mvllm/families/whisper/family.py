"""Whisper: its record, and how its config.json is read, which describes an encoder and a decoder."""

from __future__ import annotations

from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel

_DECODER_KEYS = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "max_target_positions": "max_position_embeddings",
}
"""Keys of the decoder, and the names that model classes read. Those may be there with values of the encoder."""


def _read_config(values: dict[str, Any]) -> dict[str, Any]:
    decoder = {ours: values[theirs] for theirs, ours in _DECODER_KEYS.items() if theirs in values}
    if decoder:
        decoder["num_key_value_heads"] = decoder.get("num_attention_heads")
    return {**values, **decoder}


def _read_items(hf: HFConfig) -> MultiModalModel:
    """A row of the encoder's result has keys and values of all decoder layers. Audio has no place in the prompt."""
    return MultiModalModel(
        placeholders={"audio": -1},
        embedding_width=2 * hf.positive_int("decoder_layers") * hf.positive_int("d_model"),
        cross_attention=True,
        max_encoded=hf.positive_int("max_source_positions", 1500),
    )


FAMILY = ModelFamily(
    architectures={
        "WhisperForConditionalGeneration": Architecture(
            "mvllm.families.whisper.model:WhisperForConditionalGeneration",
            read_items=_read_items,
            items="mvllm.families.whisper.items:WhisperItems",
            keeps_layers=False,
        )
    },
    model_types={"whisper": ModelType("WhisperForConditionalGeneration", read_config=_read_config)},
)
