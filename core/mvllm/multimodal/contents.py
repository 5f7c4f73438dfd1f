"""The content of items after decoding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class VideoContent:
    """The sampled frames of a video.

    Attributes:
        frames: uint8 [num_frames, height, width, 3].
        fps: Frames per second of the whole video.
        indices: The number of each sampled frame in the video.
        total_frames: Frames of the whole video.
        duration: Seconds.
    """

    frames: np.ndarray[Any, Any]
    fps: float
    indices: list[int]
    total_frames: int
    duration: float


@dataclass(frozen=True, slots=True)
class AudioContent:
    """Sound.

    Attributes:
        samples: float32 [num_samples], one channel.
        sampling_rate: Samples per second.
    """

    samples: np.ndarray[Any, Any]
    sampling_rate: int


ItemContent: TypeAlias = Any
"""An image of Pillow in mode RGB, a VideoContent or an AudioContent."""


def hash_content(content: ItemContent, salt: bytes) -> bytes:
    """SHA-256 of `salt` and of a decoded content: equal pixels or samples have equal hashes, whatever their format."""
    digest = hashlib.sha256(salt)
    if isinstance(content, VideoContent):
        digest.update(f"video {content.frames.shape} {content.fps!r} {content.indices} {content.total_frames}".encode())
        digest.update(np.ascontiguousarray(content.frames).data)
    elif isinstance(content, AudioContent):
        digest.update(f"audio {content.samples.shape} {content.sampling_rate}".encode())
        digest.update(np.ascontiguousarray(content.samples).data)
    else:
        digest.update(f"image {content.size} {content.mode}".encode())
        digest.update(content.tobytes())
    return digest.digest()
