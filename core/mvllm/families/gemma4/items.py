"""Gemma 4: videos are frames with their times between them; audio has at most 30 seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent
from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_families.frames import Array, FrameProcessor, FrameRules
from mvllm.multimodal.item_families.interface import Features, ItemFamily

_MOST_SAMPLES = 480_000
"""The default of `max_length` of the feature extractor, which cuts longer audio off."""


class Gemma4Frames(FrameProcessor[FrameRules]):
    """Frames that transformers' image processor of Gemma 4 prepares, with the settings of videos.

    `pixel_values_videos`: float32 [frames of all videos, patches, elements of a patch], padded with zeros;
    `video_position_ids`: int64 [frames of all videos, patches, 2], padded with -1.
    """

    most_embeddings = 70
    """Default of `max_soft_tokens`: of a frame."""

    def features(self, videos: Sequence[Array], settings: Mapping[str, Any]) -> dict[str, Any]:
        from PIL import Image
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        known = Gemma4ImageProcessorPil.valid_kwargs.__annotations__
        given = {"max_soft_tokens": self.most_embeddings, "resample": self._rules.resample, **settings}
        images = Gemma4ImageProcessorPil(**{name: value for name, value in given.items() if name in known})
        parts = [images([Image.fromarray(frame) for frame in frames], return_tensors="np") for frames in videos]
        return {
            "pixel_values_videos": np.concatenate([part["pixel_values"] for part in parts]),
            "video_position_ids": np.concatenate([part["image_position_ids"] for part in parts]),
            "num_frames_per_video": np.array([len(frames) for frames in videos]),
            "num_soft_tokens_per_video": [int(part["num_soft_tokens_per_image"][0]) for part in parts],
        }


class Gemma4Items(ItemFamily):
    """Items of Gemma 4."""

    unused_features = frozenset({"num_frames_per_video", "input_features_mask"})
    default_frames = FrameDefaults(num_frames=32, placement="starts")

    def frame_processor(self) -> Gemma4Frames:
        return Gemma4Frames.from_config(self.hf_config.source, FrameRules())

    def process_audio(self, audio: AudioContent, settings: dict[str, Any]) -> tuple[Features, str]:
        most = settings.get("max_length") or _MOST_SAMPLES
        if len(audio.samples) > most:
            raise RequestError(
                f"The audio has {len(audio.samples) / audio.sampling_rate:.1f} s; this model takes at most "
                f"{most / audio.sampling_rate:g} s of each. Send it in parts.",
                parameter="multi_modal_data",
            )
        features, replacement = super().process_audio(audio, settings)
        if not np.asarray(features["input_features_mask"]).any():
            raise RequestError(
                "The audio is too short for this model. Send a longer one.", parameter="multi_modal_data"
            )
        return features, replacement

    def features_to_keep(self, modality: str, features: Features) -> Features:
        """Spectrograms [frames, bins] without padding."""
        kept = super().features_to_keep(modality, features)
        if modality != "audio":
            return kept
        return {"input_features": kept["input_features"][0][np.asarray(features["input_features_mask"])[0]]}
