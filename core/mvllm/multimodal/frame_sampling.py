"""Which frames of a video are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mvllm.errors import RequestError

DEFAULT_FRAMES = 32
"""Most frames that are used if neither a request nor the model gives their number or their rate."""

MAX_FRAMES = 4096


@dataclass(frozen=True)
class FrameDefaults:
    """Which frames a model's video processor uses.

    Attributes:
        num_frames: Their number. With `fps` it is the largest number.
        fps: Frames per second.
        fewest, most: Bounds of the number that follows from `fps`.
        fps_by_duration: Rates of longer videos: (longest duration in seconds, frames per second), by rising duration.
            They take precedence over `fps`.
        placement: Where frames are, of `n` equal parts of the video:

            ends       the first frame, the last one, and between them at equal distances
            starts     the first frame of each part
            middles    the middle frame of each part
    """

    num_frames: int | None = None
    fps: float | None = None
    fewest: int = 1
    most: int = MAX_FRAMES
    fps_by_duration: tuple[tuple[float, float], ...] = ()
    placement: Literal["ends", "starts", "middles"] = "ends"

    def count(self, total: int, fps: float) -> int:
        """The number of frames of a video of `total` frames and `fps` frames per second."""
        duration = total / fps
        rate = next((rate for longest, rate in self.fps_by_duration if duration <= longest), self.fps)
        if rate is None:
            return self.num_frames or DEFAULT_FRAMES
        count = min(max(int(duration * rate), self.fewest), self.most)
        return count if self.num_frames is None else min(count, self.num_frames)

    def places(self, count: int, total: int) -> list[int]:
        """The numbers of `count` of `total` frames, rising."""
        if self.placement == "starts":
            return [i * total // count for i in range(count)]
        if self.placement == "middles":
            return [(2 * i + 1) * total // (2 * count) for i in range(count)]
        return [0] if count == 1 else [round(i * (total - 1) / (count - 1)) for i in range(count)]


class FrameSampling:
    """Frames at equal distances: a number of them, or so many per second.

    Args:
        num_frames: Their number; a shorter video gives all of its frames.
        fps: Frames per second, in place of `num_frames`.
        defaults: The model's, where neither is given.
    """

    def __init__(
        self, num_frames: int | None = None, fps: float | None = None, defaults: FrameDefaults | None = None
    ) -> None:
        self._num_frames = num_frames
        self._fps = fps
        self._defaults = defaults or FrameDefaults()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], defaults: FrameDefaults | None = None) -> FrameSampling:
        """From `mm_processor_kwargs`: `num_frames`, or `fps`.

        Raises:
            RequestError: A value is not valid, or both are given.
        """
        num_frames, fps = settings.get("num_frames"), settings.get("fps")
        if num_frames is not None and (type(num_frames) is not int or not 1 <= num_frames <= MAX_FRAMES):
            raise _error(f"num_frames must be an integer from 1 to {MAX_FRAMES}; found {num_frames!r:.40}")
        if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000):
            raise _error(f"fps must be a positive number; found {fps!r:.40}")
        if num_frames is not None and fps is not None:
            raise _error("num_frames and fps exclude each other")
        return cls(num_frames, fps, defaults)

    def indices(self, total: int, fps: float, most: int = MAX_FRAMES) -> list[int]:
        """The numbers of the frames, rising.

        Args:
            total: Frames of the video.
            fps: Its frames per second.
            most: Most frames, if neither their number nor their rate is given.
        """
        if self._fps is not None:
            count = round(total / fps * self._fps)
        elif self._num_frames is not None:
            count = self._num_frames
        else:
            count = min(self._defaults.count(total, fps), most)
        return self._defaults.places(max(1, min(count, total, MAX_FRAMES)), total)


def _error(reason: str) -> RequestError:
    return RequestError(f"mm_processor_kwargs: {reason}.", parameter="mm_processor_kwargs")
