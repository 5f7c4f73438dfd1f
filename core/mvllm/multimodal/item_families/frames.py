"""FrameProcessor: prepares the frames of videos where torchvision, which transformers' video processors need, is not
installed.

It takes the place of a video processor, with the settings of the model's folder. Frames are resized with Pillow, as
transformers' image processors without torchvision do. The subclass of a family decides the size of frames, and the
features:

    SquareFrames            frames of one size                                    LLaVA-OneVision, InternVL
    TwiceResizedFrames      resized to the longer side, then to a square          SmolVLM
    GridFrames              grids of patches, see `grid_frames`                   Qwen-VL, GLM-4V
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np

from mvllm.config.hf_config import HFConfig, read_json_object
from mvllm.errors import ModelError

Array = np.ndarray[Any, Any]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
BICUBIC, LANCZOS = 3, 1
"""Numbers of Pillow's filters."""


@dataclass(frozen=True)
class FrameRules:
    """The defaults of a family's video processor.

    Attributes:
        mean, std: Of the values of each channel.
        resample: Filter of Pillow.
    """

    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resample: int = BICUBIC


Rules = TypeVar("Rules", bound=FrameRules)


class FrameProcessor(ABC, Generic[Rules]):
    """Frames to features.

    Args:
        settings: The values of the video processor's config.
        rules: Defaults.
        source: The file of the settings, for messages.

    Attributes:
        num_frames, fps, min_frames, max_frames: Which frames are used, as in the settings. None: not given.
    """

    def __init__(self, settings: Mapping[str, Any], rules: Rules, source: str) -> None:
        settings = {name: value for name, value in settings.items() if value is not None}
        self._rules, self._settings, self._source = rules, settings, source
        self._values = HFConfig(settings, source)
        names = ("num_frames", "fps", "min_frames", "max_frames")
        self.num_frames, self.fps, self.min_frames, self.max_frames = (settings.get(name) for name in names)

    @classmethod
    def from_config(cls, config_path: str, rules: Rules) -> Self:
        """With the settings of the folder of a config.json; those of images where it has none for videos."""
        values, source = video_settings(config_path)
        return cls(values, rules, source)

    def __call__(self, videos: Sequence[Array], video_metadata: Any = None, **settings: Any) -> dict[str, Any]:
        """Prepares videos.

        Args:
            videos: uint8 [frames, height, width, 3] each.
            video_metadata: Returned with the features.
            settings: Over those of the folder.

        Returns:
            The features, as transformers' video processor names them, and `video_metadata`.

        Raises:
            ValueError: A frame cannot be prepared.
        """
        given = {**self._settings, **{key: value for key, value in settings.items() if value is not None}}
        features = self.features([np.asarray(frames) for frames in videos], given)
        return {**features, "video_metadata": video_metadata}

    @property
    def size(self) -> Any:
        """The setting `size`; None if there is none."""
        return self._settings.get("size")

    @abstractmethod
    def features(self, videos: Sequence[Array], settings: Mapping[str, Any]) -> dict[str, Any]:
        """The features of videos.

        Args:
            videos: uint8 [frames, height, width, 3] each.
            settings: Those of the folder and of the request.
        """

    def resized(self, frames: Array, height: int, width: int, settings: Mapping[str, Any]) -> Array:
        """uint8 [frames, height, width, 3], resized with the filter of the settings."""
        if frames.shape[1:3] == (height, width):
            return frames
        from PIL import Image

        resample = Image.Resampling(int(settings.get("resample", self._rules.resample)))
        return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), resample)) for frame in frames])

    def normalized(self, frames: Array, settings: Mapping[str, Any]) -> Array:
        """float32 [frames, height, width, 3]: rescaled, and normalized for each channel, unless settings say no."""
        pixels = frames.astype(np.float32)
        if settings.get("do_rescale") is not False:
            pixels *= np.float32(settings.get("rescale_factor", 1 / 255))
        if settings.get("do_normalize") is not False:
            mean = np.array(settings.get("image_mean", self._rules.mean), dtype=np.float32)
            std = np.array(settings.get("image_std", self._rules.std), dtype=np.float32)
            pixels = (pixels - mean) / std
        return pixels

    def channels_first(self, videos: Sequence[Array]) -> Array:
        """Videos of one shape [frames, height, width, 3] as [videos, frames, 3, height, width]."""
        return np.stack(videos).transpose(0, 1, 4, 2, 3)

    def wrong_size(self, wanted: str, found: object) -> ModelError:
        """The error of a size in the settings."""
        return ModelError(f"{self._source}: the size of videos should be {wanted}, found {found!r:.80}.")


def video_settings(config_path: str) -> tuple[dict[str, Any], str]:
    """The settings of videos in the folder of a config.json, and the file that has them: the first that exists of

    - `video_processor` in processor_config.json,
    - video_preprocessor_config.json,
    - the settings of images: preprocessor_config.json, or `image_processor` in processor_config.json.
    """
    folder = Path(config_path).parent

    def read(name: str) -> dict[str, Any]:
        return read_json_object(folder / name) if (folder / name).is_file() else {}

    processor = read("processor_config.json")
    for name, values in (
        ("processor_config.json", processor.get("video_processor")),
        ("video_preprocessor_config.json", read("video_preprocessor_config.json")),
        ("preprocessor_config.json", read("preprocessor_config.json")),
        ("processor_config.json", processor.get("image_processor")),
    ):
        if values and isinstance(values, dict):
            return values, str(folder / name)
    return {}, config_path


@dataclass(frozen=True)
class SquareRules(FrameRules):
    """Defaults of SquareFrames.

    Attributes:
        side: Pixels along each side of a frame.
    """

    side: int = 384


class SquareFrames(FrameProcessor[SquareRules]):
    """Frames of one size: `pixel_values_videos`, float32 [videos, frames, 3, height, width]."""

    def features(self, videos: Sequence[Array], settings: Mapping[str, Any]) -> dict[str, Any]:
        parts = [self.normalized(self._sized(frames, settings), settings) for frames in videos]
        return {"pixel_values_videos": self.channels_first(parts)}

    def _sized(self, frames: Array, settings: Mapping[str, Any]) -> Array:
        if settings.get("do_resize") is False:
            return frames
        size = settings.get("size", {"height": self._rules.side, "width": self._rules.side})
        sides = [size.get("height"), size.get("width")] if isinstance(size, Mapping) else [size, size]
        height, width = (each if type(each) is int and each > 0 else None for each in sides)
        if height is None or width is None:
            raise self.wrong_size("a height and a width in pixels", size)
        return self.resized(frames, height, width, settings)


@dataclass(frozen=True)
class TwiceResizedRules(FrameRules):
    """Defaults of TwiceResizedFrames.

    Attributes:
        longest: Pixels of the longer side after the first time.
        side: Pixels along each side of a frame after the second time.
    """

    longest: int = 4 * 364
    side: int = 364


_MOST_PIXELS_OF_SIDE = 4096


class TwiceResizedFrames(FrameProcessor[TwiceResizedRules]):
    """Frames that are resized in proportion, and then to a square: `pixel_values`, float32 [videos, frames, 3, side,
    side]. `video_sampling` of the settings names the number, the rate and the size of frames."""

    def __init__(self, settings: Mapping[str, Any], rules: TwiceResizedRules, source: str) -> None:
        super().__init__(settings, rules, source)
        sampling = settings.get("video_sampling")
        if isinstance(sampling, dict):
            self.num_frames, self.fps = sampling.get("max_frames"), sampling.get("fps")
            self._settings.setdefault("size", sampling.get("video_size"))

    def features(self, videos: Sequence[Array], settings: Mapping[str, Any]) -> dict[str, Any]:
        parts = [self.normalized(self._sized(frames, settings), settings) for frames in videos]
        return {"pixel_values": self.channels_first(parts)}

    def _sized(self, frames: Array, settings: Mapping[str, Any]) -> Array:
        if settings.get("do_resize") is False:
            return frames
        longest = self._longest("size", settings, self._rules.longest)
        side = self._longest("max_image_size", self._settings, self._rules.side)
        height, width = proportional_size(frames.shape[1], frames.shape[2], min(longest, _MOST_PIXELS_OF_SIDE))
        return self.resized(self.resized(frames, height, width, settings), side, side, settings)

    def _longest(self, name: str, settings: Mapping[str, Any], default: int) -> int:
        size = settings.get(name)
        value = size.get("longest_edge") if isinstance(size, Mapping) else size
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong_size(f"{name!r} with a 'longest_edge' in pixels", size)
        return value


def proportional_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width of a frame whose longer side is `longest`; the shorter side is even."""
    if width >= height:
        short = int(longest / (width / height))
        return max(short + short % 2, 1), longest
    short = int(longest * (width / height))
    return longest, max(short + short % 2, 1)
