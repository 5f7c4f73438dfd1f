"""Which frames of a video are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.errors import RequestError

DEFAULT_FRAMES = 32
"""Most frames that are used if neither their number nor their rate is given."""

MAX_FRAMES = 4096


class FrameSampling:
    """Frames at equal distances: a number of them, or so many per second.

    Args:
        num_frames: Their number; a shorter video gives all of its frames.
        fps: Frames per second, in place of `num_frames`.
    """

    def __init__(self, num_frames: int | None = None, fps: float | None = None) -> None:
        self._num_frames = num_frames
        self._fps = fps

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FrameSampling:
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
        return cls(num_frames, fps)

    def indices(self, total: int, fps: float, most: int = MAX_FRAMES) -> list[int]:
        """The numbers of the frames, rising.

        Args:
            total: Frames of the video.
            fps: Its frames per second.
            most: Most frames, if neither their number nor their rate is given.
        """
        if self._fps is not None:
            count = max(1, round(total / fps * self._fps))
        else:
            count = min(DEFAULT_FRAMES, most) if self._num_frames is None else self._num_frames
        count = min(count, total, MAX_FRAMES)
        if count == 1:
            return [0]
        return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def _error(reason: str) -> RequestError:
    return RequestError(f"mm_processor_kwargs: {reason}.", parameter="mm_processor_kwargs")
