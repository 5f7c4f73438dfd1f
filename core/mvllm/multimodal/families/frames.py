"""FrameProcessor: prepares the frames of videos for grids of patches where torchvision is not installed.

It takes the place of transformers' video processor, with the settings of the model's folder. Frames are resized with
Pillow, as transformers' image processors without torchvision do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mvllm.config.hf_config import HFConfig, read_json_object
from mvllm.errors import ModelError

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MOST_ELONGATED = 200
"""Largest ratio of the sides of a frame."""


@dataclass(frozen=True)
class FrameRules:
    """The defaults of a family's video processor.

    Attributes:
        smallest, largest: Pixels of a frame after it is resized.
        patch_size: Pixels along each side of a patch.
        mean, std: Of the values of each channel.
        of_whole_video: `smallest` and `largest` are pixels of all frames together.
    """

    smallest: int
    largest: int
    patch_size: int = 14
    mean: tuple[float, float, float] = _CLIP[0]
    std: tuple[float, float, float] = _CLIP[1]
    of_whole_video: bool = False


class FrameProcessor:
    """Frames to patches.

    Args:
        settings: The values of the video processor's config.
        rules: Defaults.
        source: The file of the settings, for messages.

    Attributes:
        patch_size, merge_size, temporal_patch_size: As transformers' video processors have them.
    """

    def __init__(self, settings: Mapping[str, Any], rules: FrameRules, source: str) -> None:
        values = HFConfig(settings, source)
        self.patch_size = values.positive_int("patch_size", rules.patch_size)
        self.merge_size = values.positive_int("merge_size", 2)
        self.temporal_patch_size = values.positive_int("temporal_patch_size", 2)
        self._rules, self._settings, self._source = rules, dict(settings), source

    @classmethod
    def from_config(cls, config_path: str, rules: FrameRules) -> FrameProcessor:
        """With the settings of the folder of a config.json; those of images where it has none for videos."""
        folder = Path(config_path).parent
        for name in ("video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json"):
            if not (folder / name).is_file():
                continue
            values = read_json_object(folder / name)
            if name == "processor_config.json":
                values = values.get("video_processor") or values.get("image_processor") or {}
            if values:
                return cls(values, rules, str(folder / name))
        return cls({}, rules, config_path)

    def __call__(self, videos: Sequence[np.ndarray[Any, Any]], video_metadata: Any = None, **settings: Any) -> Any:
        """Prepares videos.

        Args:
            videos: uint8 [frames, height, width, 3] each.
            video_metadata: Returned with the features.
            settings: Over those of the folder.

        Returns:
            `pixel_values_videos`: float32 [patches of all videos, elements of a patch]; `video_grid_thw`: int64
            [videos, 3]; `video_metadata`.

        Raises:
            ValueError: A frame is too elongated.
        """
        given = {**self._settings, **{key: value for key, value in settings.items() if value is not None}}
        patches, grids = zip(*(self._patches(np.asarray(frames), given) for frames in videos), strict=True)
        return {
            "pixel_values_videos": np.concatenate(patches),
            "video_grid_thw": np.array(grids, dtype=np.int64),
            "video_metadata": video_metadata,
        }

    def _patches(
        self, frames: np.ndarray[Any, Any], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray[Any, Any], tuple[int, int, int]]:
        """The patches of a video in the order of `grids.py` of the model, and its grid."""
        pixels = self._normalized(self._resized(frames, settings), settings)
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

    def _resized(self, frames: np.ndarray[Any, Any], settings: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        if settings.get("do_resize") is False:
            return frames
        from PIL import Image

        height, width = self.frame_size(len(frames), frames.shape[1], frames.shape[2], settings)
        resample = int(settings.get("resample", Image.Resampling.BICUBIC))
        resized = [np.asarray(Image.fromarray(frame).resize((width, height), resample)) for frame in frames]
        return np.stack(resized)

    def _normalized(self, frames: np.ndarray[Any, Any], settings: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        pixels = frames.astype(np.float32)
        if settings.get("do_rescale") is not False:
            pixels = pixels * np.float32(settings.get("rescale_factor", 1 / 255))
        if settings.get("do_normalize") is not False:
            mean = np.array(settings.get("image_mean", self._rules.mean), dtype=np.float32)
            std = np.array(settings.get("image_std", self._rules.std), dtype=np.float32)
            pixels = (pixels - mean) / std
        return pixels

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
            raise ModelError(f"{self._source}: the size of videos should be two numbers of pixels, found {found}.")
        return found
