"""Gemma 4: videos are frames with their times between them."""

from __future__ import annotations

from mvllm.multimodal.families.frames import FrameRules, Gemma4Frames
from mvllm.multimodal.families.interface import ItemFamily
from mvllm.multimodal.frame_sampling import FrameDefaults


class Gemma4Items(ItemFamily):
    """Items of Gemma 4."""

    unused_features = frozenset({"num_frames_per_video"})
    default_frames = FrameDefaults(num_frames=32, placement="starts")

    def frame_processor(self) -> Gemma4Frames:
        return Gemma4Frames.from_config(self.hf_config.source, FrameRules())
