"""Items of GLM-4V: grids of patches, with text between the frames of a video."""

from __future__ import annotations

import dataclasses
import math

from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_families.grid_frames import GridRules
from mvllm.multimodal.item_families.grids import GridItems


class GlmItems(GridItems):
    """Items of GLM-4V, whose videos have text between frames."""

    frame_rules = GridRules(smallest=112 * 112, largest=2 * 30_000 * 28 * 28, of_whole_video=True)
    default_frames = FrameDefaults(fps=2.0, most=600, placement="starts")

    def frame_defaults(self) -> FrameDefaults:
        """As the video processors, which do not use their `num_frames`."""
        if type(self.processor).__name__ == "Glm46VProcessor":
            return _FRAMES_OF_GLM_46V
        return dataclasses.replace(super().frame_defaults(), num_frames=None)


_FRAMES_OF_GLM_46V = FrameDefaults(
    most=640, fps_by_duration=((30.0, 6.0), (300.0, 2.0), (math.inf, 1.0)), placement="starts"
)
