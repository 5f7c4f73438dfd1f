"""ItemFamily: the processing of items that is common to most models, in parts that a family can override."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent, ItemContent, VideoContent
from mvllm.multimodal.frame_sampling import FrameDefaults

Features = dict[str, Any]
"""Arrays of numpy or torch by name, as a processor returns them for a batch of one item: with the dimension of the
batch, if the processor gives it one."""

_FRAME_SETTINGS = {"num_frames": "num_frames", "fps": "fps", "min_frames": "fewest", "max_frames": "most"}
"""Settings of video processors, and the fields of FrameDefaults."""


class ItemFamily:
    """Processes the items of one model, one at a time.

    Without torchvision, which transformers' video processors need, `frame_processor` prepares the frames of videos.

    Args:
        processor: The model's processor, of transformers.
        model: What the model takes beside text.
        hf_config: The model's config.json.

    Attributes:
        default_frames: Which frames of videos are used; the settings of the model's video processor take precedence.
    """

    default_frames: ClassVar[FrameDefaults] = FrameDefaults()

    unused_features: frozenset[str] = frozenset()
    """Names that the encoder does not take, beside those that the processor itself lists (`unused_input_names`)."""
    own_arguments: frozenset[str] = frozenset()
    """Arguments of requests (`mm_processor_kwargs`) that the family reads itself, and the processor does not know."""

    def __init__(self, processor: Any, model: MultiModalModel, hf_config: HFConfig) -> None:
        self.processor = processor
        self.model = model
        self.hf_config = hf_config
        if "video" in model.placeholders and getattr(processor, "video_processor", None) is None:
            processor.video_processor = self.frame_processor()

    def frame_processor(self) -> Any:
        """What takes the place of transformers' video processor without torchvision; None: videos are refused."""
        return None

    def frame_defaults(self) -> FrameDefaults:
        """Which frames of a video are used, where a request does not say."""
        found = {
            name: getattr(getattr(self.processor, "video_processor", None), setting, None)
            for setting, name in _FRAME_SETTINGS.items()
        }
        given = {
            name: float(value) if name == "fps" else int(value)
            for name, value in found.items()
            if isinstance(value, int | float) and value > 0
        }
        return dataclasses.replace(self.default_frames, **given)  # type: ignore[arg-type]

    def placeholder(self, modality: str) -> str:
        """What stands for an item in the text of a prompt: what the model's chat template writes."""
        return str(getattr(self.processor, f"{modality}_token"))

    def arguments(self, modality: str, counts: Mapping[str, int]) -> dict[str, Any]:
        """Arguments of `process` that depend on the other items of the prompt. They are part of the content hash.

        Args:
            counts: Number of items of the prompt by modality.
        """
        return {}

    def process(self, modality: str, content: ItemContent, settings: dict[str, Any]) -> tuple[Features, str]:
        """Runs the processor on one item.

        Args:
            settings: The processor's arguments for this modality, merged with the user's and with `arguments`.

        Returns:
            The features, and the text that replaces the placeholder.

        Raises:
            RequestError, ValueError: The item cannot be processed.
        """
        if modality == "image":
            return self.process_image(content, settings)
        if modality == "video":
            return self.process_video(content, settings)
        return self.process_audio(content, settings)

    def process_image(self, image: Any, settings: dict[str, Any]) -> tuple[Features, str]:
        """`process` for an image of Pillow, mode RGB."""
        layout = self.processor.prepare_inputs_layout(images=[image], text=[self.placeholder("image")])
        features, replacements = self.processor._process_images(layout[0], **settings)
        return features, replacements[0]

    def process_video(self, video: VideoContent, settings: dict[str, Any]) -> tuple[Features, str]:
        """`process` for the sampled frames of a video."""
        if getattr(self.processor, "video_processor", None) is None:
            raise RequestError(
                "Videos need the package torchvision for this model, whose video processor uses it. "
                "Install torchvision for the torch in use, or send frames as images.",
                parameter="multi_modal_data",
            )
        settings = {**settings, "do_sample_frames": False, "return_metadata": True}
        metadata = self.video_metadata(video)
        features, replacements = self.processor._process_videos([video.frames], video_metadata=[metadata], **settings)
        return features, replacements[0]

    def process_audio(self, audio: AudioContent, settings: dict[str, Any]) -> tuple[Features, str]:
        """`process` for sound."""
        settings = {"sampling_rate": audio.sampling_rate, **settings}
        features, replacements = self.processor._process_audio([audio.samples], **settings)
        return features, replacements[0]

    def sampling_rate(self) -> int:
        """Samples per second of the audio that the processor takes."""
        return int(getattr(self.processor._audio_processor, "sampling_rate", 16000))

    def video_metadata(self, video: VideoContent) -> Any:
        """What transformers wants to know of a video beside its frames."""
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(
            total_num_frames=video.total_frames,
            fps=video.fps,
            width=video.frames.shape[2],
            height=video.frames.shape[1],
            duration=video.duration,
            frames_indices=list(video.indices),
        )

    def features_to_keep(self, modality: str, features: Features) -> Features:
        """The features that the encoder takes."""
        unused = {*self.processor.unused_input_names, "video_metadata", *self.unused_features}
        return {name: value for name, value in features.items() if name not in unused}

    def encoder_inputs(self, modality: str, features: Features, span_ids: Sequence[int]) -> Features:
        """What the encoder is given.

        Args:
            span_ids: The token ids of the span.
        """
        return self.features_to_keep(modality, features)

    def num_encoded(self, modality: str, features: Features, num_placeholders: int) -> int:
        """Rows of the encoder's result. With cross-attention it has no placeholders."""
        return num_placeholders

    def rope_positions(
        self, modality: str, features: Features, span_ids: Sequence[int], embedded: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray[Any, Any], int] | None:
        """Three-dimensional positions over the span of an item; None for models without them.

        Args:
            span_ids: The token ids of the span, with what stands between its placeholders.
            embedded: The positions of the span that take an embedding.

        Returns:
            int32 [3, length] (temporal, height, width), relative to the position at which the span starts; and by how
            much positions advance over the span: the token behind it has the position of its start plus this.
        """
        return None
