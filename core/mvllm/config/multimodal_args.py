"""The settings of images, audio, videos and embeddings as input: a part of EngineArgs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mvllm.config.option import option

_LARGEST_BUDGET = 2**24
_LONGEST_SECONDS = 86400.0


@dataclass(kw_only=True)
class MultiModalArgs:
    """Base class of EngineArgs."""

    limit_mm_per_prompt: dict[str, Any] | None = option(  # noqa: RUF009  (gives a field, as dataclasses.field does)
        None,
        help="Most items of a prompt by modality, as a JSON object or image=2,audio=1; 0 refuses them. Others: 16.",
        group="multimodal",
    )
    allowed_local_media_path: str | None = option(
        None, help="Folder of which requests may name files; by default none.", group="multimodal"
    )
    allowed_media_domains: str | None = option(
        None,
        help="Hosts from which media are fetched, comma-separated, whatever their address; by default every host with "
        "a public address. In Python also a list.",
        group="multimodal",
    )
    media_fetch_timeout: float = option(
        10.0,
        help="Seconds to fetch one image, audio or video from its URL.",
        group="multimodal",
        minimum=0,
        above=True,
        maximum=_LONGEST_SECONDS,
    )
    max_media_bytes: int = option(
        64 << 20, help="Largest file of an item, in bytes.", group="multimodal", minimum=1, maximum=4 << 30
    )
    max_media_pixels: int = option(
        50_000_000,
        help="Most pixels of an image, and of all frames of a video that are used.",
        group="multimodal",
        minimum=1,
        maximum=1 << 32,
    )
    max_audio_seconds: float = option(
        3600.0,
        help="Longest audio in seconds.",
        group="multimodal",
        minimum=0,
        above=True,
        maximum=_LONGEST_SECONDS,
    )
    mm_processor_kwargs: dict[str, Any] | None = option(  # noqa: RUF009  (as above)
        None, help="Arguments of the model's processor of images and audio, as a JSON object.", group="multimodal"
    )
    mm_processor_cache_gb: float = option(
        0.25, help="GiB of processed items that are kept in host memory; 0 for none.", group="multimodal", minimum=0
    )
    mm_processor_processes: int = option(
        2,
        help="Most processes that decode and process items. The first one starts with the first item, others when an "
        "item waits for more than a second, and they end when they have nothing to do.",
        group="multimodal",
        minimum=1,
        maximum=64,
    )
    mm_inflight_gb: float = option(
        4.0,
        help="In AsyncLLM and servers: GiB of processed items of unfinished prompts, in each front end. Further "
        "prompts with items wait before they are decoded.",
        group="multimodal",
        minimum=0,
        above=True,
    )
    max_num_encoder_input_tokens: int | None = option(
        None,
        help="Most embeddings that encoders compute in one step, except for a single item of more; by default "
        "max_num_batched_tokens.",
        group="multimodal",
        minimum=1,
        maximum=_LARGEST_BUDGET,
    )
    encoder_cache_size: int | None = option(
        None,
        help="Embeddings that each worker keeps for chunks of prompts and for other requests with the same items; "
        "items of more are refused. By default as many as one step computes, at least the largest item.",
        group="multimodal",
        minimum=1,
        maximum=_LARGEST_BUDGET,
    )
    enable_prompt_embeds: bool = option(
        False,
        help="Requests may bring embeddings in place of a prompt.",
        group="multimodal",
        aliases=("enable_mm_embeds",),
    )
    language_model_only: bool = option(
        False, help="Load only the language part of the model, and take only text.", group="multimodal"
    )
