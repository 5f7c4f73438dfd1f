"""Limits of the sizes that requests ask of the model's processor (`mm_processor_kwargs`).

A processor resizes what it gets: an image of one pixel with `{"size": {"longest_edge": 100000}}` would take gigabytes
and minutes. What it makes of an image has the limit that images have themselves, `max_pixels`.

What the numbers of a size mean depends on the family:

    {"height": h, "width": w}, [h, w]          pixels along the sides
    {"max_height": h, "max_width": w}          pixels along the sides of what an image is fitted into
    {"shortest_edge": s, "longest_edge": l}    pixels along the sides; or pixels of the whole image, if the processor's
                                               own numbers are that large (Qwen2-VL and later)
    s                                          the shorter side
    min_pixels: p                              pixels of the whole image, which smaller ones get
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mvllm.errors import RequestError
from mvllm.multimodal.contents import ItemContent, VideoContent

_LARGEST_SIDE = 1 << 15
"""Larger numbers in the processor's own `size` are pixels of a whole image."""
_LARGEST_NUMBER = 1 << 24
"""Permitted whatever `max_pixels` is, for numbers that are no pixels, such as samples of audio."""
_SIZES = ("size", "crop_size", "max_image_size")
_EDGES = ("shortest_edge", "longest_edge")
_SIDES = (("height", "width"), ("max_height", "max_width"))
_FEWEST = "min_pixels"


def check_numbers(kwargs: Mapping[str, Any], max_pixels: int) -> None:
    """Checks that no number is beyond any use, whatever it means. Needs neither the content nor the processor.

    Raises:
        RequestError: One is.
    """
    most = max(max_pixels, _LARGEST_NUMBER)
    for name, value in _leaves(kwargs):
        if isinstance(value, int | float) and not abs(value) <= most:
            raise _error(f"{name} is {value!r:.40}; numbers may be up to {most}")


def check_requested_sizes(kwargs: Mapping[str, Any], content: ItemContent, max_pixels: int, default_size: Any) -> None:
    """Checks that the processor makes no more pixels of a content than are allowed.

    Args:
        kwargs: Of the request.
        content: Audio has no size.
        max_pixels: Most pixels of an image, and of all frames of a video.
        default_size: The processor's own `size`.

    Raises:
        RequestError: It would make more.
    """
    if isinstance(content, VideoContent):
        num_frames, height, width, _ = content.frames.shape
    elif hasattr(content, "size") and isinstance(content.size, tuple):
        num_frames, (width, height) = 1, content.size
    else:
        return
    # A dict, or transformers' SizeDict.
    of_default = default_size.get if isinstance(default_size, Mapping) else partial(getattr, default_size)
    counts_pixels = max(of_default(edge, None) or 0 for edge in _EDGES) > _LARGEST_SIDE
    for name, size in _sizes(kwargs):
        each = float(size) if name == _FEWEST else _pixels_of(size, height, width, counts_pixels=counts_pixels)
        pixels = num_frames * each
        if pixels > max_pixels:
            what = "image" if num_frames == 1 else "video"
            raise _error(
                f"{name} makes {int(pixels)} pixels of this {what}; {max_pixels} are allowed (max_media_pixels)"
            )


def _pixels_of(size: Any, height: int, width: int, *, counts_pixels: bool) -> float:
    """Pixels of an image of `height` x `width` after it is resized, as far as `size` says."""
    if _is_number(size):
        size = {"shortest_edge": size}
    for tall, wide in ((size.get(first), size.get(second)) for first, second in _SIDES):
        if _is_number(tall) and _is_number(wide):
            return float(tall) * float(wide)
    shortest, longest = (float(size[edge]) if _is_number(size.get(edge)) else None for edge in _EDGES)
    if counts_pixels:
        return shortest or 0.0  # `longest_edge` is only a limit
    ratio = max(height, width) / max(1, min(height, width))
    by_shortest = float("inf") if shortest is None else shortest * shortest * ratio
    by_longest = float("inf") if longest is None else longest * longest / ratio
    found = min(by_shortest, by_longest)
    return 0.0 if found == float("inf") else found


def _sizes(kwargs: Mapping[str, Any], of: str = "size") -> Iterator[tuple[str, Any]]:
    if any(kwargs.keys() >= set(sides) for sides in _SIDES) or not kwargs.keys().isdisjoint(_EDGES):
        yield of, kwargs
    for name, value in kwargs.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, name)
        elif _is_number(value) and (name in _SIZES or name == _FEWEST):
            yield name, value
        elif name in _SIZES and isinstance(value, list | tuple) and value and all(map(_is_number, value)):
            yield name, value[0] if len(value) == 1 else {"height": value[0], "width": value[1]}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each, name)
    else:
        yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _error(reason: str) -> RequestError:
    return RequestError(f"mm_processor_kwargs: {reason}.", parameter="mm_processor_kwargs")
