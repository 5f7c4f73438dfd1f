"""Entries of the multimodal zoo: Qwen2-Audio and Voxtral."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import (
    Gemma4AudioConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioProcessor,
    Qwen2Config,
    VoxtralConfig,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, MultiModalEntry
from tests.helpers.zoo_vision import OF_GEMMA4, gemma4_config, gemma4_processor

MEL_BINS = 8
GEMMA4_BINS = 32
QWEN2_AUDIO_POSITIONS = 50
"""Positions of the encoder for the longest audio, which has one second."""
VOXTRAL_AUDIO_ID = 24
"""The processor of transformers knows no other."""
VOXTRAL_POSITIONS = 1500
VOXTRAL_LENGTH = 30
"""Embeddings of a window of 30 seconds."""
_QWEN2_AUDIO_TOKENS = {
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

_LENGTHS = ((3, 0), (9, 0), (6, 0))
"""Tenths of a second."""
_WINDOWS = ((5, 0), (310, 0), (20, 0))


def _qwen2_audio_processor(tokenizer: Any) -> Any:
    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=1), tokenizer)


def _voxtral_processor(tokenizer: Any) -> Any:
    return VoxtralProcessor(WhisperFeatureExtractor(feature_size=MEL_BINS), _with_audio_token(tokenizer))


def _with_audio_token(tokenizer: Any) -> Any:
    """A copy of a tokenizer in which the token VOXTRAL_AUDIO_ID is `[AUDIO]`."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = values["model"]["vocab"]
    del vocab[tokenizer.convert_ids_to_tokens(VOXTRAL_AUDIO_ID)]
    vocab["[AUDIO]"] = VOXTRAL_AUDIO_ID
    added = {**values["added_tokens"][0], "id": VOXTRAL_AUDIO_ID, "content": "[AUDIO]"}
    values["added_tokens"] = sorted([*values["added_tokens"], added], key=lambda token: token["id"])
    backend = Tokenizer.from_str(json.dumps(values))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def _qwen2_audio(audio: dict[str, Any] | None = None, **settings: Any) -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    return Qwen2AudioConfig(
        text_config=Qwen2Config(**TEXT).to_dict(),
        audio_config={
            "model_type": "qwen2_audio_encoder",
            **sizes,
            "num_mel_bins": MEL_BINS,
            "max_source_positions": QWEN2_AUDIO_POSITIONS,
            **(audio or {}),
        },
        audio_token_index=FIRST_SPECIAL_ID,
        **{"tie_word_embeddings": False, **settings},
    )


def _voxtral(audio: dict[str, Any] | None = None, **settings: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return VoxtralConfig(
        text_config=LlamaConfig(**TEXT, head_dim=16).to_dict(),
        audio_config={
            "model_type": "voxtral_encoder",
            **sizes,
            "intermediate_size": VOXTRAL_POSITIONS * 16 // VOXTRAL_LENGTH,
            "num_mel_bins": MEL_BINS,
            "max_source_positions": VOXTRAL_POSITIONS,
            **(audio or {}),
        },
        audio_token_id=VOXTRAL_AUDIO_ID,
        **{"tie_word_embeddings": False, **settings},
    )


def _gemma4_audio(*, both_ways: bool = True, **audio: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 24}
    config = gemma4_config(clips=not both_ways, both_ways=both_ways)
    config.audio_config = Gemma4AudioConfig(**sizes, subsampling_conv_channels=[GEMMA4_BINS, 4], **audio)
    return config


_GEMMA4_AUDIO: dict[str, Any] = {
    "processor": lambda tokenizer: gemma4_processor(tokenizer, Gemma4AudioFeatureExtractor(feature_size=GEMMA4_BINS)),
    **OF_GEMMA4,
    "placeholder": "<|audio|>",
    "modality": "audio",
    "sizes": _LENGTHS,
}

AUDIO: dict[str, MultiModalEntry] = {
    "gemma4_audio": MultiModalEntry(config=_gemma4_audio, **_GEMMA4_AUDIO),
    "gemma4_audio-narrow": MultiModalEntry(
        config=lambda: _gemma4_audio(
            both_ways=False,
            attention_context_left=4,
            attention_context_right=2,
            attention_chunk_size=3,
            use_clipped_linears=False,
            conv_kernel_size=3,
            residual_weight=0.3,
        ),
        **_GEMMA4_AUDIO,
    ),
    "qwen2_audio": MultiModalEntry(
        config=_qwen2_audio,
        processor=_qwen2_audio_processor,
        specials=_QWEN2_AUDIO_TOKENS,
        placeholder="<|AUDIO|>",
        modality="audio",
        sizes=_LENGTHS,
        gate=True,
    ),
    "qwen2_audio-small": MultiModalEntry(
        config=lambda: _qwen2_audio(audio={"encoder_layers": 1, "activation_function": "gelu_new"}),
        processor=_qwen2_audio_processor,
        specials=_QWEN2_AUDIO_TOKENS,
        placeholder="<|AUDIO|>",
        modality="audio",
        sizes=_LENGTHS,
    ),
    "voxtral": MultiModalEntry(
        config=_voxtral,
        processor=_voxtral_processor,
        placeholder="[AUDIO]",
        modality="audio",
        sizes=_WINDOWS,
        gate=True,
        seed=1,
    ),
    "voxtral-wide": MultiModalEntry(
        config=lambda: _voxtral(
            audio={"num_attention_heads": 4, "activation_function": "silu"}, projector_hidden_act="silu"
        ),
        processor=_voxtral_processor,
        placeholder="[AUDIO]",
        modality="audio",
        sizes=_WINDOWS,
    ),
}
