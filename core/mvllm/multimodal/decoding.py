"""Decodes the content of items, within limits. Runs in the processor's process.

Images are decoded by Pillow, audio and videos by PyAV, which has FFmpeg's libraries. What a file says of itself
(format, pixels, duration) is checked before anything is decoded.
"""

from __future__ import annotations

import importlib
import io
from typing import Any

import numpy as np

from mvllm.errors import ConfigError, RequestError
from mvllm.installation import install_command
from mvllm.multimodal.contents import AudioContent, ItemContent, VideoContent
from mvllm.multimodal.frame_sampling import FrameSampling
from mvllm.multimodal.media_source import MediaSource

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats of Pillow that are decoded. Others of it start programs or read other files (EPS), or are rarely used."""

MAX_VIDEO_FRAMES = 1 << 17
"""Most frames of a video that are read to find those that are sampled."""

_MAX_SIDE = 1 << 16
_MOST_ELONGATED = 200
"""Largest ratio of the sides of an image. Processors that resize the shorter side would make gigabytes of others."""


class DecodingLimits:
    """The largest contents.

    Args:
        max_pixels: Most pixels of an image, and of all sampled frames of a video.
        max_audio_seconds: Longest audio.
    """

    def __init__(self, max_pixels: int, max_audio_seconds: float) -> None:
        self.max_pixels = max_pixels
        self.max_audio_seconds = max_audio_seconds


def decode(source: MediaSource, limits: DecodingLimits, *, sampling_rate: int, sampling: FrameSampling) -> ItemContent:
    """The content of an item.

    Args:
        sampling_rate: Samples per second of the audio.
        sampling: Which frames of a video are used.

    Raises:
        RequestError: The content exceeds a limit, is damaged, or has a format that is not decoded.
    """
    match source.modality, source.form:
        case "image", "pixels":
            return _image_of_pixels(source, limits)
        case "image", _:
            return _decode_image(source.data, limits)
        case "video", "frames":
            return _video_of_frames(source, limits, sampling)
        case "video", _:
            return _decode_video(source.data, limits, sampling)
        case "audio", "samples":
            return _audio_of_samples(source, limits, sampling_rate)
        case _:
            return _decode_audio(source.data, limits, sampling_rate)


# --- images


def _decode_image(data: bytes, limits: DecodingLimits) -> Any:
    image_module: Any = _import("PIL.Image", "Pillow")
    if looks_like_markup(data):
        raise _error("image", "it is SVG, HTML or another text; send PNG, JPEG, WebP, GIF, BMP or TIFF")
    image_module.MAX_IMAGE_PIXELS = None  # checked below, with the limit of the engine
    try:
        image = image_module.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Exception as e:
        raise _error("image", f"it is none of {', '.join(IMAGE_FORMATS)}, or damaged") from e
    width, height = image.size
    _check_size(width, height, limits)
    try:
        image.seek(0)
        image.load()
        image = _oriented(image)
    except MemoryError:
        raise
    except Exception as e:
        raise _error("image", f"it is damaged or truncated: {_one_line(e)}") from e
    return to_rgb(image)


_TRANSPOSES = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""By EXIF's orientation: names in `PIL.Image.Transpose`. Pillow's `exif_transpose` also writes the EXIF data anew, and
fails where other parts of it are damaged."""


def _oriented(image: Any) -> Any:
    """The image as its EXIF orientation shows it. Damaged EXIF data is ignored."""
    image_module: Any = _import("PIL.Image", "Pillow")
    try:
        name = _TRANSPOSES.get(image.getexif().get(0x0112, 1))
    except Exception:  # noqa: BLE001  (the pixels are good)
        return image
    return image if name is None else image.transpose(image_module.Transpose[name])


def to_rgb(image: Any) -> Any:
    """The image in mode RGB; what is transparent becomes white."""
    image_module: Any = _import("PIL.Image", "Pillow")
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = image_module.new("RGBA", layer.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, layer).convert("RGB")
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):  # 16 bits: Pillow would cut values off, not scale them
        values = np.asarray(image).astype(np.float64)
        scale = 255.0 / 65535.0 if image.mode != "F" else 1.0
        return image_module.fromarray(np.clip(values * scale, 0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _image_of_pixels(source: MediaSource, limits: DecodingLimits) -> Any:
    image_module: Any = _import("PIL.Image", "Pillow")
    height, width, channels = source.shape
    _check_size(width, height, limits)
    pixels = np.frombuffer(source.data, np.uint8).reshape(source.shape)
    return to_rgb(image_module.fromarray(pixels[:, :, 0] if channels == 1 else pixels))


def _check_size(width: int, height: int, limits: DecodingLimits) -> None:
    if width < 1 or height < 1 or max(width, height) > _MAX_SIDE or width * height > limits.max_pixels:
        raise _error("image", f"it has {width} x {height} pixels; {limits.max_pixels} are allowed")
    if max(width, height) > _MOST_ELONGATED * min(width, height):
        raise _error("image", f"its sides, {width} x {height} pixels, differ by more than {_MOST_ELONGATED} times")


_MARKUP = (b"<?xml", b"<svg", b"<!doc", b"<html", b"<head", b"<body", b"<!--", b"{", b"<script")


def looks_like_markup(data: bytes) -> bool:
    """Whether a file is SVG, HTML, XML or JSON, by its first characters."""
    head = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return head.startswith(_MARKUP)


# --- audio


def _decode_audio(data: bytes, limits: DecodingLimits, sampling_rate: int) -> AudioContent:
    av: Any = _import("av", "av")
    if looks_like_markup(data):
        raise _error("audio", "it is a text; send WAV, MP3, FLAC, Ogg or another audio file")
    max_samples = int(limits.max_audio_seconds * sampling_rate)
    pieces: list[np.ndarray[Any, Any]] = []
    count = 0
    try:
        with av.open(io.BytesIO(data), options=_SAFE_OPTIONS) as container:
            if not container.streams.audio:
                raise _error("audio", "the file has no audio")
            stream = container.streams.audio[0]
            _check_duration(container, limits)
            # FFmpeg's own way to one channel makes equal channels louder; the mean does not.
            resampler = av.AudioResampler(format="fltp", rate=sampling_rate)
            for frame in container.decode(stream):
                for piece in resampler.resample(frame):
                    pieces.append(piece.to_ndarray().mean(axis=0))
                    count += len(pieces[-1])
                if count > max_samples:
                    raise _too_long(limits)
            pieces += [piece.to_ndarray().mean(axis=0) for piece in resampler.resample(None)]
    except (RequestError, MemoryError):
        raise
    except Exception as e:
        raise _error("audio", f"it cannot be decoded: {_one_line(e)}") from e
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(samples):
        raise _error("audio", "it has no samples")
    return AudioContent(samples.astype(np.float32), sampling_rate)


def _audio_of_samples(source: MediaSource, limits: DecodingLimits, sampling_rate: int) -> AudioContent:
    samples = np.frombuffer(source.data, np.float32)
    rate = source.sampling_rate or sampling_rate
    if len(samples) > limits.max_audio_seconds * rate:
        raise _too_long(limits)
    if not np.isfinite(samples).all():
        raise _error("audio", "its samples are not finite")
    if rate == sampling_rate:
        return AudioContent(samples, rate)
    av: Any = _import("av", "av")
    frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate)
    pieces = [piece.to_ndarray().reshape(-1) for each in (frame, None) for piece in resampler.resample(each)]
    return AudioContent(np.concatenate(pieces).astype(np.float32), sampling_rate)


def _check_duration(container: Any, limits: DecodingLimits) -> None:
    """Refuses by the duration that the file states; what it does not state is counted while decoding."""
    if container.duration is not None and container.duration / 1e6 > limits.max_audio_seconds:
        raise _too_long(limits)


def _too_long(limits: DecodingLimits) -> RequestError:
    return _error("audio", f"it is longer than {limits.max_audio_seconds:g} s, which are allowed")


# --- videos


def _decode_video(data: bytes, limits: DecodingLimits, sampling: FrameSampling) -> VideoContent:
    av: Any = _import("av", "av")
    if looks_like_markup(data):
        raise _error("video", "it is a text; send MP4, WebM, MKV, MOV or another video file")
    try:
        with av.open(io.BytesIO(data), options=_SAFE_OPTIONS) as container:
            if not container.streams.video:
                raise _error("video", "the file has no video")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            _check_frame(width, height, limits)
            stream.thread_type = "NONE"
            total, fps = _count_frames(av, data, stream)
            indices = sampling.indices(total, fps, limits.max_pixels // (width * height))
            if len(indices) * width * height > limits.max_pixels:
                raise _error(
                    "video",
                    f"its {len(indices)} sampled frames of {width} x {height} pixels have more than the "
                    f"{limits.max_pixels} pixels allowed; send fewer frames (num_frames or fps) or smaller ones",
                )
            frames = _read_frames(container, stream, indices, (width, height))
    except (RequestError, MemoryError):
        raise
    except Exception as e:
        raise _error("video", f"it cannot be decoded: {_one_line(e)}") from e
    if not frames:
        raise _error("video", "no frame of it can be decoded")
    indices = indices[: len(frames)]
    return VideoContent(np.stack(frames), fps, indices, total, total / fps)


def _count_frames(av: Any, data: bytes, stream: Any) -> tuple[int, float]:
    """Frames of the video, and frames per second."""
    fps = float(stream.average_rate or stream.guessed_rate or 24)
    total = int(stream.frames)
    if total <= 0:  # the file does not say: packets are counted, without decoding
        with av.open(io.BytesIO(data), options=_SAFE_OPTIONS) as container:
            packets = container.demux(container.streams.video[0])
            total = 0
            for packet in packets:
                total += packet.size > 0
                if total > MAX_VIDEO_FRAMES:
                    break
    if total > MAX_VIDEO_FRAMES:
        raise _error("video", f"it has more than {MAX_VIDEO_FRAMES} frames")
    if total <= 0 or not 0 < fps < 1e4:
        raise _error("video", "it has no frames")
    return total, fps


def _read_frames(container: Any, stream: Any, indices: list[int], size: tuple[int, int]) -> list[Any]:
    wanted = set(indices)
    last = max(indices)
    found: dict[int, np.ndarray[Any, Any]] = {}
    width, height = size
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:  # a later frame may have another size, which would not have been checked
            found[number] = frame.to_ndarray(format="rgb24", width=width, height=height)
        if number >= last:
            break
    return [found[index] for index in indices if index in found]


def _video_of_frames(source: MediaSource, limits: DecodingLimits, sampling: FrameSampling) -> VideoContent:
    count, height, width, _ = source.shape
    _check_frame(width, height, limits)
    indices = sampling.indices(count, source.fps, limits.max_pixels // (width * height))
    if len(indices) * width * height > limits.max_pixels:
        raise _error("video", f"its frames have more than {limits.max_pixels} pixels")
    frames = np.frombuffer(source.data, np.uint8).reshape(source.shape)
    return VideoContent(frames[indices], source.fps, indices, count, count / source.fps)


def _check_frame(width: int, height: int, limits: DecodingLimits) -> None:
    if width < 1 or height < 1 or max(width, height) > _MAX_SIDE or width * height > limits.max_pixels:
        raise _error("video", f"its frames have {width} x {height} pixels; {limits.max_pixels} are allowed")
    if max(width, height) > _MOST_ELONGATED * min(width, height):
        raise _error("video", f"the sides of its frames, {width} x {height} pixels, differ too much")


_SAFE_OPTIONS = {"protocol_whitelist": "", "enable_drefs": "0", "use_absolute_path": "0"}
"""Formats that list other files or URLs (HLS, concat, MOV references) may open none of them."""


# --- errors


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(
            f"Images, audio and videos need the package {package}, which is not installed here. "
            f"Run: {install_command('mvllm[multimodal]')}"
        ) from e


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _error(modality: str, reason: str) -> RequestError:
    article = "An" if modality in ("image", "audio") else "A"
    return RequestError(f"{article} {modality} cannot be read: {reason}.", parameter="multi_modal_data")
