"""Messages to and from the processor's process."""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal.media_source import MediaSource
from mvllm.multimodal.processed_item import ProcessedItem

PLACEHOLDERS = "placeholders"
"""The modality of a job that asks for `ItemResult.placeholders`."""


class ProcessorStart(msgspec.Struct):
    """What a process is started with.

    Attributes:
        path: The model folder; empty for a process that decodes embeddings only.
        architecture, trust_remote_code, model_impl: As in ModelConfig.
        model: The fields of MultiModalModel.
        hf_config: The model's config.json.
        processor_kwargs: JSON of the user's arguments of the processor.
        max_pixels, max_audio_seconds: As in MultiModalConfig.
        hidden_size: Elements of a row of embeddings.
        max_embeddings: Most rows of ready embeddings, and most tokens of an item.
        float_dtype: As of ItemProcessor.
        num_processes: Most processes with this message.
    """

    path: str
    architecture: str
    trust_remote_code: bool
    model: dict[str, Any]
    hf_config: bytes
    processor_kwargs: bytes
    max_pixels: int
    max_audio_seconds: float
    hidden_size: int
    max_embeddings: int
    float_dtype: str = "float32"
    num_processes: int = 1
    model_impl: str = "auto"


class ItemJob(msgspec.Struct):
    """One item to decode and process.

    Attributes:
        source: The content. Of modality `embeds`: a file with ready embeddings.
        counts: Number of items of the prompt by modality.
        kwargs: JSON of arguments of the processor for this request.
        uuid: The user's name of the content.
        seconds: Limit of processor time.
    """

    source: MediaSource
    counts: dict[str, int]
    kwargs: bytes = b"{}"
    uuid: str | None = None
    seconds: float = 60.0


class ItemResult(msgspec.Struct):
    """The result of a job.

    Attributes:
        item: The processed item.
        embeds: Ready embeddings.
        placeholders: By modality, what stands for an item in the text of a prompt.
        depends_on_counts: The features of `item` depend on the other items of the prompt.
        error: Why there is none.
        parameter: The field of the request that caused the error.
        is_last: The process ends after this job, because it may keep too much memory.
        is_load_failure: The model's processor cannot be loaded.
    """

    item: ProcessedItem | None = None
    embeds: ArrayData | None = None
    placeholders: dict[str, str] = {}
    depends_on_counts: bool = False
    error: str | None = None
    parameter: str | None = None
    is_last: bool = False
    is_load_failure: bool = False
