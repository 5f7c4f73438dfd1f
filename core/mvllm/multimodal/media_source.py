"""MediaSource: the content of an item as bytes, before it is decoded; and how it is taken from what users pass.

what users pass                                                 form
bytes, data URL, http(s) URL, file                              encoded: a file's content
an image of Pillow, uint8 array [h, w] or [h, w, 1, 3 or 4]     pixels
uint8 array [n, h, w, 3], a list of images                      frames
float array [n], (array, sampling rate), a list of numbers      samples
"""

from __future__ import annotations

import array
import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec

from mvllm.config.multimodal import MultiModalConfig
from mvllm.errors import RequestError
from mvllm.messages.field_checks import describe_value
from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal.url_fetch import fetch_url

_PARAMETER = "multi_modal_data"
_MODES = {"L": 1, "RGB": 3, "RGBA": 4}
_TRANSPARENT = ("LA", "La", "PA", "RGBa")


class MediaSource(msgspec.Struct, array_like=True, omit_defaults=True):
    """The content of one item.

    Attributes:
        modality: `image`, `video`, `audio`, or `embeds`.
        form: `encoded`, `pixels`, `frames` or `samples`; see the module.
        data: The content: a file, or the elements of an array in C order.
        dtype, shape: Of an array.
        sampling_rate: Of samples; 0 for that of the model's processor.
        fps: Of frames.
    """

    modality: str
    form: str
    data: bytes
    dtype: str = ""
    shape: list[int] = []
    sampling_rate: int = 0
    fps: float = 0.0


def load_source(modality: str, value: Any, config: MultiModalConfig) -> MediaSource:
    """The content of an item as a user passes it. Blocks while it is fetched.

    Args:
        modality: `image`, `video` or `audio`.
        value: See the module.
        config: What may be read, and the limits.

    Raises:
        RequestError: It may not be read, exceeds a limit, or has none of the forms.
    """
    if isinstance(value, MediaSource):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _encoded(modality, bytes(value), config)
    if isinstance(value, str | os.PathLike):
        return _encoded(modality, _read_reference(os.fspath(value), config), config)
    loaders = {"image": _image, "video": _video, "audio": _audio}
    source = loaders[modality](value)
    if source is None:
        raise RequestError(
            f"An item of modality {modality!r} is bytes, a URL, a file or {_FORMS[modality]}; "
            f"found {describe_value(value)}.",
            parameter=_PARAMETER,
        )
    return source


_FORMS = {
    "image": "an image of Pillow, or a uint8 array [height, width, 3]",
    "video": "a list of images, or a uint8 array [frames, height, width, 3]",
    "audio": "a float array [samples], or (array, sampling rate)",
}


def _encoded(modality: str, data: bytes, config: MultiModalConfig) -> MediaSource:
    if len(data) > config.max_media_bytes:
        raise _too_large(len(data), config)
    if not data:
        raise RequestError(f"An {modality} has no bytes.".replace("An v", "A v"), parameter=_PARAMETER)
    return MediaSource(modality, "encoded", data)


def _too_large(size: int, config: MultiModalConfig) -> RequestError:
    return RequestError(f"An item has {size} bytes; {config.max_media_bytes} are allowed.", parameter=_PARAMETER)


def is_remote(value: object) -> bool:
    """Whether an item as a user passes it is a URL of another host."""
    return isinstance(value, str) and _scheme(value) in ("http", "https")


def fetch_remote(url: str, config: MultiModalConfig) -> bytes:
    """The content of a URL of another host. Blocks.

    Raises:
        RequestError: As `fetch_url`.
    """
    return fetch_url(
        url, allowed_hosts=config.allowed_media_domains, timeout=config.fetch_timeout, max_bytes=config.max_media_bytes
    )


def _scheme(text: str) -> str:
    return text[:8].split(":", 1)[0].lower() if ":" in text[:8] else ""


def _read_reference(text: str, config: MultiModalConfig) -> bytes:
    """The content of a data URL, another URL, or a file."""
    scheme = _scheme(text)
    if scheme == "data":
        return _read_data_url(text, config)
    if is_remote(text):
        return fetch_remote(text, config)
    if scheme == "file":
        try:
            parts = urlsplit(text)
        except ValueError as e:
            raise RequestError(f"A file URL is not valid: {e}.", parameter=_PARAMETER) from e
        if parts.netloc not in ("", "localhost"):
            raise RequestError("A file URL begins with file:/// and names no host.", parameter=_PARAMETER)
        return _read_file(unquote(parts.path), config)
    return _read_file(text, config)


def _read_data_url(text: str, config: MultiModalConfig) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise RequestError("A data URL has no comma in front of its content.", parameter=_PARAMETER)
    if not head.lower().endswith(";base64"):
        try:
            return unquote_to_bytes(body)
        except UnicodeEncodeError as e:
            raise RequestError(f"A data URL is not valid Unicode: {e.reason}.", parameter=_PARAMETER) from e
    return decode_base64(body, config)


def decode_base64(text: str, config: MultiModalConfig, parameter: str = _PARAMETER) -> bytes:
    """The bytes of an item in base64, which may have line breaks.

    Args:
        parameter: The field of the request, for errors.

    Raises:
        RequestError: It is not base64, or too large.
    """
    text = "".join(text.split())
    if len(text) * 3 // 4 > config.max_media_bytes + 4:
        raise _too_large(len(text) * 3 // 4, config)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise RequestError(f"The base64 of {parameter} is not valid: {e}.", parameter=parameter) from e


def _read_file(name: str, config: MultiModalConfig) -> bytes:
    if config.allowed_local_media_path is None:
        raise RequestError(
            f"The file {name[:80]!r} may not be read: the engine was started without allowed_local_media_path. "
            "Name a folder there, or pass the content.",
            parameter=_PARAMETER,
        )
    folder = Path(config.allowed_local_media_path).resolve()
    try:
        path = (folder / name).resolve(strict=True)
        if not path.is_relative_to(folder) or not path.is_file():
            raise FileNotFoundError
        with path.open("rb") as file:
            data = file.read(config.max_media_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # the same for files elsewhere, so that nobody learns of them
        raise RequestError(
            f"There is no file {name[:80]!r} that may be read in the folder allowed_local_media_path.",
            parameter=_PARAMETER,
        ) from None
    if len(data) > config.max_media_bytes:
        raise _too_large(len(data), config)
    return data


def _image(value: Any) -> MediaSource | None:
    if hasattr(value, "mode") and hasattr(value, "tobytes") and hasattr(value, "convert"):  # Pillow's
        if value.mode not in _MODES:
            is_transparent = value.mode in _TRANSPARENT or "transparency" in getattr(value, "info", {})
            value = value.convert("RGBA" if is_transparent else "RGB")
        width, height = value.size
        return MediaSource("image", "pixels", value.tobytes(), "uint8", [height, width, _MODES[value.mode]])
    if not _is_array(value, "uint8") or value.ndim not in (2, 3):
        return None
    shape = [*map(int, value.shape)]
    if len(shape) == 2:
        shape.append(1)
    if shape[2] not in _MODES.values():
        return None
    return MediaSource("image", "pixels", value.tobytes(), "uint8", shape)


def _video(value: Any) -> MediaSource | None:
    metadata: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, metadata = value
    fps = metadata.get("fps") or 24.0
    if not isinstance(fps, int | float) or not 0 < fps < 1e4:
        raise RequestError(f"The fps of a video must be a positive number; found {fps!r:.40}.", parameter=_PARAMETER)
    if _is_array(value, "uint8") and value.ndim == 4 and value.shape[3] == 3 and len(value):
        return MediaSource("video", "frames", value.tobytes(), "uint8", [*map(int, value.shape)], fps=float(fps))
    return _video_of_images(value, float(fps)) if isinstance(value, list | tuple) and value else None


def _video_of_images(images: Sequence[Any], fps: float) -> MediaSource | None:
    """A video of images, all of one size; None if they are others."""
    found = [_image(each.convert("RGB") if hasattr(each, "convert") else each) for each in images]
    frames = [each for each in found if each is not None and each.shape[2] == 3]
    if len(frames) < len(images) or any(each.shape != frames[0].shape for each in frames):
        return None
    data = b"".join(each.data for each in frames)
    return MediaSource("video", "frames", data, "uint8", [len(frames), *frames[0].shape], fps=fps)


def _audio(value: Any) -> MediaSource | None:
    rate: Any = 0
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], int | float):
        value, rate = value[0], value[1]
        is_number = isinstance(rate, SupportsFloat) and type(rate) is not bool
        if not is_number or not 100 <= rate <= 1_000_000 or rate % 1:
            raise RequestError(
                f"A sampling rate must be from 100 to 1000000; found {rate!r:.40}.", parameter=_PARAMETER
            )
    if isinstance(value, list | tuple) and value and all(isinstance(each, int | float) for each in value):
        try:
            data = array.array("f", value)
        except OverflowError as e:
            raise RequestError(f"A sample of an audio is too large: {e}.", parameter=_PARAMETER) from e
        return MediaSource("audio", "samples", data.tobytes(), "float32", [len(data)], sampling_rate=int(rate))
    if not _is_array(value) or value.ndim != 1 or not len(value) or value.dtype.kind != "f":
        return None
    samples = value.astype("float32")
    return MediaSource("audio", "samples", samples.tobytes(), "float32", [len(samples)], sampling_rate=int(rate))


def _is_array(value: Any, dtype: str | None = None) -> bool:
    """Whether it is an array of numpy. numpy itself need not be imported for that."""
    if not hasattr(value, "__array_interface__") or not hasattr(value, "tobytes"):
        return False
    return dtype is None or str(value.dtype) == dtype


def embeddings_source(value: Any, hidden_size: int) -> ArrayData:
    """Ready embeddings as a user passes them: an array of numpy or torch [n, hidden_size] of floats.

    Raises:
        RequestError: It has another shape or dtype, or values that are not finite.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    if not _is_array(value) or value.dtype.kind != "f":
        raise RequestError(
            f"prompt_embeds must be a float tensor of torch or array of numpy; found {describe_value(value)}.",
            parameter="prompt_embeds",
        )
    return check_embeddings(value, hidden_size)


def check_embeddings(value: Any, hidden_size: int) -> ArrayData:
    """The array as a message, float32.

    Raises:
        RequestError: It has another shape, or values that are not finite.
    """
    shape = [*map(int, value.shape)]
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or not shape[0] or shape[1] != hidden_size:
        raise RequestError(
            f"prompt_embeds must have the shape [tokens, {hidden_size}] (the model's hidden_size) and at least one "
            f"token; found {shape}.",
            parameter="prompt_embeds",
        )
    value = value.astype("float32").reshape(shape)
    lowest, highest = float(value.min()), float(value.max())
    if not (lowest > float("-inf") and highest < float("inf")):  # NaN, too
        raise RequestError("prompt_embeds has values that are not finite.", parameter="prompt_embeds")
    return ArrayData("float32", shape, value.tobytes())


def as_item_list(value: Any, modality: str) -> Sequence[Any]:
    """The items of one modality: a list of them, or one."""
    if isinstance(value, list):
        if modality == "audio" and value and all(isinstance(each, int | float) for each in value):
            return [value]
        if modality == "video" and value and _is_list_of_frames(value):
            return [value]
        return value
    return [value]


def _is_list_of_frames(value: list[Any]) -> bool:
    return all(hasattr(each, "convert") or (_is_array(each) and each.ndim == 3) for each in value)
