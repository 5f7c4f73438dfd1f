"""GridFrames: prepares the frames of videos as grids of patches, see `frames.FrameProcessor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvllm.multimodal.item_families.frames import Array, FrameProcessor, FrameRules

_MOST_ELONGATED = 200
"""Largest ratio of the sides of a frame."""


@dataclass(frozen=True)
class GridRules(FrameRules):
    """Defaults of GridFrames.

    Attributes:
        smallest, largest: Pixels of a frame after it is resized.
        patch_size: Pixels along each side of a patch.
        of_whole_video: `smallest` and `largest` are pixels of all frames together.
    """

    smallest: int = 128 * 28 * 28
    largest: int = 768 * 28 * 28
    patch_size: int = 14
    of_whole_video: bool = False


class GridFrames(FrameProcessor[GridRules]):
    """Frames to patches: `pixel_values_videos`, float32 [patches of all videos, elements of a patch];
    `video_grid_thw`, int64 [videos, 3].

    Attributes:
        patch_size, merge_size, temporal_patch_size: As transformers' video processors have them.
    """

    def __init__(self, settings: Mapping[str, Any], rules: GridRules, source: str) -> None:
        super().__init__(settings, rules, source)
        self.patch_size = self._values.positive_int("patch_size", rules.patch_size)
        self.merge_size = self._values.positive_int("merge_size", 2)
        self.temporal_patch_size = self._values.positive_int("temporal_patch_size", 2)

    @property
    def size(self) -> dict[str, int]:
        """The fewest and most pixels, under the names that transformers' processors have for them."""
        smallest, largest = self._limits(self._settings)
        return {"shortest_edge": smallest, "longest_edge": largest}

    def features(self, videos: Sequence[Array], settings: Mapping[str, Any]) -> dict[str, Any]:
        patches, grids = zip(*(self._patches(frames, settings) for frames in videos), strict=True)
        return {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids, dtype=np.int64)}

    def _patches(self, frames: Array, settings: Mapping[str, Any]) -> tuple[Array, tuple[int, int, int]]:
        """The patches of a video in the order of `grids.py` of the model, and its grid."""
        if settings.get("do_resize") is not False:
            height, width = self.frame_size(len(frames), frames.shape[1], frames.shape[2], settings)
            frames = self.resized(frames, height, width, settings)
        pixels = self.normalized(frames, settings)
        pad = -len(pixels) % self.temporal_patch_size
        if pad:
            pixels = np.concatenate((pixels, np.repeat(pixels[-1:], pad, axis=0)))
        side, merge, depth = self.patch_size, self.merge_size, self.temporal_patch_size
        count, height, width, channels = pixels.shape
        frames_, rows, columns = count // depth, height // side, width // side
        tiles = pixels.reshape(
            frames_, depth, rows // merge, merge, side, columns // merge, merge, side, channels
        ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return tiles.reshape(frames_ * rows * columns, -1), (frames_, rows, columns)

    def frame_size(
        self, count: int, height: int, width: int, settings: Mapping[str, Any] | None = None
    ) -> tuple[int, int]:
        """Height and width of resized frames: multiples of a square of patches, near the proportions of the video.

        Args:
            count: Number of frames.
            height, width: Of a frame.
            settings: As those of the folder, which are used if it is None.

        Raises:
            ValueError: A frame is too elongated.
        """
        smallest, largest = self._limits(self._settings if settings is None else settings)
        factor, times, exact = self.patch_size * self.merge_size, 1, 1
        if self._rules.of_whole_video:
            depth = self.temporal_patch_size
            count = max(count, depth)
            times, exact = round(count / depth) * depth, count
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MOST_ELONGATED * min(height, width):
            raise ValueError(f"a frame of {width} x {height} pixels is too elongated")
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if times * tall * wide > largest:
            shrink = math.sqrt(exact * height * width / largest)
            tall = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif times * tall * wide < smallest:
            grow = math.sqrt(smallest / (exact * height * width))
            tall, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return tall, wide

    def _limits(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        size = settings.get("size") or {}
        found = (
            settings.get("min_pixels", size.get("shortest_edge", self._rules.smallest)),
            settings.get("max_pixels", size.get("longest_edge", self._rules.largest)),
        )
        if not all(isinstance(each, int) and each > 0 for each in found):
            raise self.wrong_size("two numbers of pixels", found)
        return found
