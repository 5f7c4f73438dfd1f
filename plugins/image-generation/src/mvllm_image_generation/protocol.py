"""The bodies of `POST /v1/images/generations`: of requests and of responses."""

from __future__ import annotations

from typing import Any, TypedDict

from mvllm.extension_api.http import ClientRequest


class ImageGenerationRequest(ClientRequest, kw_only=True):
    """Body of `POST /v1/images/generations`.

    Attributes:
        size: `WIDTHxHEIGHT` in pixels, or `auto` (the default) for the model's.
        response_format: `b64_json`, the default.
        guidance_scale, temperature, top_k, top_p, seed, negative_prompt: As in ImageParams.
    """

    prompt: str | None = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # No effect.
    quality: str | None = None
    style: str | None = None
    moderation: str | None = None
    output_compression: int | None = None

    # Unsupported, unless null or a value that changes nothing.
    background: str | None = None
    stream: bool | None = None
    partial_images: int | None = None
    image: Any = None
    mask: Any = None


class ImageData(TypedDict):
    """An image: base64 of a PNG file."""

    b64_json: str


class ImageInputTokens(TypedDict):
    """The kinds of input tokens."""

    text_tokens: int
    image_tokens: int


class ImagesUsage(TypedDict):
    """The tokens of a prompt and of its images."""

    input_tokens: int
    input_tokens_details: ImageInputTokens
    output_tokens: int
    total_tokens: int


class ImagesResponse(TypedDict):
    """The images of a prompt."""

    created: int
    data: list[ImageData]
    background: str
    output_format: str
    size: str
    usage: ImagesUsage
