"""ImageRequestOutput and GeneratedImage: what `generate_images` returns."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mvllm.extension_api import ConfigError, install_command
from mvllm.extension_api.engine import RequestMetrics

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(slots=True)
class GeneratedImage:
    """One generated image.

    Attributes:
        index: Its position among the `n` images of the prompt.
        codes: Its codes, from 0, row by row.
        rows, columns: Codes of a whole image.
        token_ids: What the engine generated: the codes as token ids, with the ends of rows of models that have them.
        pixels: uint8 [height, width, 3]: red, green, blue. None if it was not decoded, or is not whole.
        logprobs: The log-probability of each code in the distribution that it was sampled from, with guidance; None
            unless requested.
        conditional_logprobs: Of guided images with `logprobs`: the log-probability of each code without guidance.
        seed: Its seed, if the prompt had one.
        finish_reason: As in CompletionOutput; `length` for a whole image.
        weight_versions: As in CompletionOutput, in tokens.
        error, error_parameter: As in CompletionOutput, with the finish reason `error`. Other images are not affected.
    """

    index: int
    codes: list[int]
    rows: int
    columns: int
    token_ids: list[int]
    pixels: np.ndarray | None = None
    logprobs: list[float] | None = None
    conditional_logprobs: list[float] | None = None
    seed: int | None = None
    finish_reason: str | None = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    error_parameter: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all codes of the image were generated."""
        return len(self.codes) == self.rows * self.columns

    def pil(self) -> Image:
        """The pixels as an image of Pillow.

        Raises:
            ConfigError: Pillow is not installed, or the image has no pixels, also because it failed.
        """
        return pil_image(self._existing_pixels())

    def png(self) -> bytes:
        """The image as a PNG file.

        Raises:
            ConfigError: As `pil`.
        """
        return encode_png(self._existing_pixels())

    def _existing_pixels(self) -> np.ndarray:
        if self.error is not None:
            raise ConfigError(f"Image {self.index} failed and has no pixels: {self.error}")
        if self.pixels is None:
            raise ConfigError(
                f"Image {self.index} has {len(self.codes)} of {self.rows * self.columns} codes and was not decoded, so "
                "it has no pixels. Generate it with ImageParams(decode=True), without max_tokens."
            )
        return self.pixels


@dataclass(slots=True)
class ImageRequestOutput:
    """The images of one prompt.

    Attributes:
        request_id: The caller's id.
        prompt: The formatted prompt as text; None if token ids were given.
        prompt_token_ids: The prompt as token ids.
        images: By rising index.
        metrics: Times of the request's events.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    images: list[GeneratedImage]
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


def encode_png(pixels: np.ndarray) -> bytes:
    """uint8 [height, width, 3] as a PNG file.

    Raises:
        ConfigError: Pillow is not installed.
    """
    file = io.BytesIO()
    pil_image(pixels).save(file, format="PNG")
    return file.getvalue()


def pil_image(pixels: np.ndarray) -> Image:
    """uint8 [height, width, 3] as an image of Pillow.

    Raises:
        ConfigError: Pillow is not installed.
    """
    return require_pillow().fromarray(pixels)


def require_pillow() -> Any:
    """The module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as e:
        command = install_command("mvllm[images]")
        raise ConfigError(f"Image files need Pillow, which is not installed. Run: {command}") from e
    return Image
