"""What a model takes beside text, and the limits of it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvllm.contract import ANY, phase
from mvllm.errors import ConfigError

MODALITIES = ("image", "video", "audio")
"""What `limit_mm_per_prompt` may name. Ready embeddings (`embeds`) are not counted."""


@phase(ANY)
@dataclass(frozen=True)
class MultiModalModel:
    """What a model takes beside text, read from its config.json.

    Attributes:
        placeholders: By modality, the token id of the positions that take an embedding; -1 where no position does,
            because the model has cross-attention.
        embedding_width: Elements of a row of embeddings: `hidden_size`, or a multiple of it in models that also add
            rows behind some layers (Qwen3-VL's DeepStack).
        spans_attend_both_ways: The positions of a span see each other in both directions (Gemma 3). Steps then begin
            and end outside of spans, or hold the rest of a span.
        rope_sections: Of models with three-dimensional positions: how many frequencies belong to the temporal
            position, the height and the width (`mrope_section`). None for one-dimensional positions.
        rope_interleaved: The frequencies of the three alternate (Qwen3-VL), instead of following each other.
        cross_attention: Layers attend to the encoder's result instead of taking it as embeddings (Whisper).
        max_encoded: Most rows of one item's result, as far as config.json says; None where the processor decides.
        by_transformers: The encoders are those of a ModelImplementation (see `config.model_implementations`), such as
            transformers' modules, which take the token ids of an item's span, too.
        written_as: By modality, what stands for an item in the text of a prompt, where it is not the token of
            `placeholders`.
    """

    placeholders: dict[str, int] = field(default_factory=dict)
    embedding_width: int = 0
    spans_attend_both_ways: bool = False
    rope_sections: tuple[int, int, int] | None = None
    rope_interleaved: bool = False
    cross_attention: bool = False
    max_encoded: int | None = None
    by_transformers: bool = False
    written_as: dict[str, str] = field(default_factory=dict)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities, in the order of MODALITIES."""
        return tuple(name for name in MODALITIES if name in self.placeholders)

    @property
    def takes_rows_only(self) -> bool:
        """Items change the embeddings and rotary positions of tokens, and nothing else in the language model."""
        return not self.spans_attend_both_ways and not self.cross_attention


@phase(ANY)
@dataclass(frozen=True)
class MultiModalConfig:
    """Settings of inputs beside text.

    Attributes:
        limit_per_prompt: By modality, the most items of a prompt; 0 refuses the modality. Others: DEFAULT_LIMIT.
        allowed_local_media_path: Folder of which `file://` URLs may be read; None for none.
        allowed_media_domains: Hosts of which http(s) URLs may be fetched; None for every public one.
        fetch_timeout: Seconds to fetch one URL.
        max_media_bytes: Largest encoded item.
        max_pixels: Most pixels of an image, and of all frames of a video that are used.
        max_audio_seconds: Longest audio.
        processor_kwargs: Arguments of the model's processor (`mm_processor_kwargs`).
        enable_embeds: Requests may bring ready embeddings (`prompt_embeds`).
        processor_cache_bytes: Memory of processed items that each front end keeps.
        encoder_cache_tokens: Rows of encoder results that a worker keeps; None for as many as one step computes.
        max_encoder_tokens: Most rows that encoders compute in one step; None for `max_num_batched_tokens`. One item of
            more rows is computed alone.
        num_processes: Most processes that decode and process items. All but the first start when items wait.
        inflight_bytes: Bytes of processed items of unfinished prompts, in each front end; further prompts wait.
        refusal: Why requests with items are refused; None if they are accepted. Set when the engine starts, see
            `refusal_of_items`.
    """

    limit_per_prompt: dict[str, int] = field(default_factory=dict)
    allowed_local_media_path: str | None = None
    allowed_media_domains: tuple[str, ...] | None = None
    fetch_timeout: float = 10.0
    max_media_bytes: int = 64 << 20
    max_pixels: int = 50_000_000
    max_audio_seconds: float = 3600.0
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    enable_embeds: bool = False
    processor_cache_bytes: int = 256 << 20
    encoder_cache_tokens: int | None = None
    max_encoder_tokens: int | None = None
    num_processes: int = 2
    inflight_bytes: int = 4 << 30
    refusal: str | None = None


DEFAULT_LIMIT = 16
"""Most items of one modality in a prompt, unless `limit_mm_per_prompt` says otherwise."""

LONGEST_ITEM = 16384
"""Most rows of an item for which room is kept, where neither config.json nor the settings give a number."""

_CROSS_ATTENTION_ITEMS = 64
"""Most running requests of a model with cross-attention whose items fit into the encoder cache by default."""


@dataclass(frozen=True)
class EncoderLimits:
    """Rows of encoder results, resolved.

    Attributes:
        step_tokens: Most rows that encoders compute in one step; an item of more rows is computed alone.
        cache_tokens: Rows that a worker keeps. No item may have more.
        item_tokens: Rows of the largest item for which memory is kept.
    """

    step_tokens: int
    cache_tokens: int
    item_tokens: int


def encoder_limits(
    model: MultiModalModel,
    settings: MultiModalConfig,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> EncoderLimits:
    """The limits of a model's encoder.

    Args:
        max_num_batched_tokens, max_num_seqs: Of the scheduler.
        max_model_len: Longest sequence in tokens.
    """
    step = settings.max_encoder_tokens or max_num_batched_tokens
    item = model.max_encoded or min(LONGEST_ITEM, max_model_len)
    if settings.enable_embeds and not model.cross_attention:
        item = max(item, max_model_len)
    cache = settings.encoder_cache_tokens
    if cache is None:
        cache = max(step, item)
        if model.cross_attention:  # they are kept as long as their requests run
            cache = max(cache, item * min(max_num_seqs, _CROSS_ATTENTION_ITEMS))
    return EncoderLimits(step, cache, min(item, cache))


def read_limits(settings: Mapping[str, Any]) -> dict[str, int]:
    """`limit_mm_per_prompt`: numbers by modality, or objects with a `count`.

    Raises:
        ConfigError: A modality does not exist, or a number is not valid.
    """
    limits: dict[str, int] = {}
    for modality, value in settings.items():
        if modality not in MODALITIES:
            raise ConfigError(f"limit_mm_per_prompt permits {', '.join(MODALITIES)}, found {modality!r:.40}.")
        count = value.get("count") if isinstance(value, Mapping) else value
        if type(count) is not int or count < 0:
            raise ConfigError(f"limit_mm_per_prompt: {modality} must be an integer >= 0, found {count!r:.40}.")
        limits[modality] = count
    return limits


def read_media_folder(path: str | None) -> str | None:
    """`allowed_local_media_path`, absolute and without links.

    Raises:
        ConfigError: It is not a folder.
    """
    if not path:
        return None
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise ConfigError(f"allowed_local_media_path is {path!r}, which is not a folder. Name one that exists.")
    return str(folder)


def read_processor_kwargs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`mm_processor_kwargs`.

    Raises:
        ConfigError: A value is not one of JSON's.
    """
    try:
        json.dumps(dict(settings), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"mm_processor_kwargs must hold JSON values only: {e}.") from e
    return dict(settings)
