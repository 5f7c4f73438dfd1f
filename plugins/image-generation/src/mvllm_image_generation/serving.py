"""`POST /v1/images/generations`: images of a prompt, as base64 of PNG files."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterator, Sequence

from mvllm.extension_api import APIError, ConfigError, RequestError, SamplingParams
from mvllm.extension_api.http import PromptType, RequestHandler, ServingContext, encode_json
from mvllm_image_generation.engine_methods import AsyncImages, image_requests
from mvllm_image_generation.image_params import ImageParams
from mvllm_image_generation.outputs import GeneratedImage, encode_png, require_pillow
from mvllm_image_generation.protocol import ImageGenerationRequest

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


class ImageGenerationHandler(RequestHandler):
    """Answers one request for images.

    Raises:
        RequestError: A field is invalid, or the server cannot make image files.
    """

    def __init__(self, context: ServingContext, model: str, request: ImageGenerationRequest) -> None:
        super().__init__(context, model, "img-", request.priority)
        self._request = request
        self._images = image_requests(self._engine)
        _check_formats(request)
        self._params = _image_params(request)
        with _size_errors():
            self._images.grid(self._params)

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        request, params, images = self._request, self._params, self._images
        if not request.prompt:
            raise RequestError("prompt must be a text that describes the image.", parameter="prompt")
        rendered: dict[str, str] = {}
        if images.format.chat_prompt is not None:
            for text in (request.prompt, params.negative_prompt):
                if isinstance(text, str):
                    self._engine.input_processor.check_text(text)
                    rendered[text] = await self._context.prompt_renderer.render_user_message(
                        text, images.format.chat_prompt
                    )
        prompt: dict[str, str] = {"prompt": request.prompt}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt

        def make() -> tuple[Sequence[PromptType], SamplingParams]:
            with _size_errors():
                settings = images.sampling_params(params, rendered.__getitem__)
            return [images.prompt(prompt, params, rendered.__getitem__)], settings  # type: ignore[arg-type]

        return await self._context.tokenizer_pool.run(make)

    async def full_response(self) -> bytes:
        """The body of the response. See RequestHandler."""
        (output,) = await self._engine_requests.collect()
        found = self._images.output(output, self._params)
        if not all(image.is_whole for image in found.images):
            raise APIError(
                503,
                "The request was aborted before its images were complete; try again.",
                code="aborted",
                retry_after=1,
            )
        await AsyncImages(self._engine).set_pixels(found.images)
        num_prompt, num_generated = len(found.prompt_token_ids), sum(len(image.token_ids) for image in found.images)
        rows, columns = self._images.grid(self._params)
        scale = self._images.format.scale
        body = {
            "created": self._created,
            "data": await self._context.tokenizer_pool.run(lambda: [_encode(image) for image in found.images]),
            "background": "opaque",
            "output_format": "png",
            "size": f"{columns * scale}x{rows * scale}",
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"text_tokens": num_prompt, "image_tokens": 0},
                "output_tokens": num_generated,
                "total_tokens": num_prompt + num_generated,
            },
        }
        return encode_json(body)


def _encode(image: GeneratedImage) -> dict[str, str]:
    assert image.pixels is not None, "whole images have been decoded"
    return {"b64_json": base64.b64encode(encode_png(image.pixels)).decode()}


def _check_formats(request: ImageGenerationRequest) -> None:
    if request.response_format not in (None, "b64_json"):
        raise RequestError(
            "response_format must be 'b64_json': the server stores no images, so there are no URLs.",
            parameter="response_format",
        )
    if request.output_format not in (None, "png"):
        raise RequestError("output_format must be 'png'.", parameter="output_format")
    if request.background == "transparent":
        raise RequestError("background must be 'opaque' or 'auto'.", parameter="background")
    if request.stream or request.partial_images:
        name = "stream" if request.stream else "partial_images"
        raise RequestError(f"{name} is not supported: images are sent when they are complete.", parameter=name)
    if request.image or request.mask:
        name = "image" if request.image else "mask"
        raise RequestError(f"{name} is not supported: images are not accepted as input.", parameter=name)
    try:
        require_pillow()
    except ConfigError as e:
        raise RequestError(f"This server makes no image files: {e}") from e


def _image_params(request: ImageGenerationRequest) -> ImageParams:
    height = width = None
    if request.size not in (None, "auto"):
        match = _SIZE.fullmatch(request.size or "")
        if match is None:
            raise RequestError(
                f"size must be 'auto' or a width and a height, such as '384x384'; found {ascii(request.size)[:40]}.",
                parameter="size",
            )
        width, height = int(match[1]), int(match[2])
    given = {
        name: value
        for name in ("n", "temperature", "top_k", "top_p", "seed", "guidance_scale", "negative_prompt")
        if (value := getattr(request, name)) is not None
    }
    with _size_errors():
        return ImageParams(height=height, width=width, **given)


@contextlib.contextmanager
def _size_errors() -> Iterator[None]:
    """Errors of height and width are errors of the field `size`."""
    try:
        yield
    except RequestError as e:
        if e.parameter in ("height", "width"):
            raise RequestError(str(e), parameter="size") from e
        raise
