"""What the package adds to engines: `llm.images`, and its methods under their own names.

    llm.images.generate(...)         = llm.generate_images(...)
    llm.images.decode(...)           = llm.decode_images(...)
    llm.llm_engine.image_requests    converts requests for images, for requests of other kinds in the same call

Each function here is an entry point of the group `mvllm.engine_methods`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mvllm.extension_api import RequestError, RequestOutput
from mvllm.extension_api.engine import (
    LLM,
    AsyncLLM,
    LLMEngine,
    LoRARequest,
    PromptType,
    SamplingParams,
    as_prompt_list,
    failure_of,
    one_per_prompt,
    raise_failures,
)
from mvllm_image_generation.image_params import ImageParams
from mvllm_image_generation.outputs import GeneratedImage, ImageRequestOutput
from mvllm_image_generation.requests import ImageRequests, codes_array, decode_batches, encode_codes, set_pixels

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

DECODE = "decode_images"
"""The method of models, see `DecodesImages`."""

Engine = LLM | LLMEngine | AsyncLLM


def images(engine: Engine) -> Images | AsyncImages:
    """`llm.images`."""
    return AsyncImages(engine) if isinstance(engine, AsyncLLM) else Images(_as_llm(engine, "images"))


def generate_images(engine: Engine) -> Callable[..., Any]:
    """`llm.generate_images`."""
    return images(engine).generate


def decode_images(engine: Engine) -> Callable[..., Any]:
    """`llm.decode_images`; of an LLMEngine the call of the model, with codes and pixels as bytes."""
    if not isinstance(engine, LLMEngine):
        return images(engine).decode

    def decode(codes: bytes, rows: int, columns: int) -> Any:
        image_requests(engine)  # raises if the model generates no images
        return engine.call_model(DECODE, (codes, rows, columns))

    return decode


def image_requests(engine: Engine) -> ImageRequests:
    """`engine.image_requests`.

    Raises:
        RequestError: The model generates no images.
    """
    found = engine.llm_engine if isinstance(engine, LLM) else engine
    return ImageRequests(found.model_config, found.tokenizer if found.has_tokenizer else None)


def _as_llm(engine: LLM | LLMEngine, name: str) -> LLM:
    if not isinstance(engine, LLM):
        raise AttributeError(f"'LLMEngine' object has no attribute {name!r}; LLM and AsyncLLM have it")
    return engine


class Images:
    """Generates images with an LLM.

    Args:
        llm: The loaded model.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: ImageParams | Sequence[ImageParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        raise_on_error: bool = True,
    ) -> list[ImageRequestOutput]:
        """Generates images from each prompt, with a model that does (Janus, Emu3).

        Args:
            prompts: A prompt or a list of prompts. A text is formatted as the model expects it; token ids
                (`{"prompt_token_ids": ids}`) are used as they are.
            params: For all prompts, or one per prompt; None is `ImageParams()`.
            use_tqdm, priority, lora_request, raise_on_error: As for `LLM.generate`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: The model generates no images, or a prompt or parameter is invalid, and no prompt was
                processed.
            RequestFailedError: See `raise_on_error`.
            EngineDeadError: The engine has failed or was closed.
        """
        engine = self._llm.llm_engine
        requests = image_requests(engine)
        each = as_prompt_list(prompts)
        chosen = one_per_prompt(ImageParams() if params is None else params, len(each), "params")
        settings = [requests.sampling_params(one) for one in chosen]
        formatted = [requests.prompt(prompt, one) for prompt, one in zip(each, chosen, strict=True)]
        finished = self._llm.generate(
            formatted,
            settings,
            use_tqdm=use_tqdm,
            priority=priority,
            lora_request=lora_request,
            raise_on_error=False,
        )
        outputs = [requests.output(output, one) for output, one in zip(finished, chosen, strict=True)]
        wanted = [image for output, one in zip(outputs, chosen, strict=True) if one.decode for image in output.images]
        for batch in decode_batches(wanted):
            set_pixels(batch, engine.call_model(DECODE, encode_codes(batch)), requests.format.scale)
        if raise_on_error:
            raise_failures(outputs, map(failure_of, finished))
        return outputs

    def decode(self, codes: ArrayLike, *, height: int | None = None, width: int | None = None) -> np.ndarray:
        """Decodes image codes to pixels.

        Args:
            codes: int [n, number of codes], from 0: images of one size, row by row; one image may have one dimension.
            height, width: Their size in pixels, for models that let choose it; by default the model's.

        Returns:
            uint8 [n, height, width, 3]: red, green, blue.

        Raises:
            RequestError: The model generates no images, they have another number of codes, or a code does not exist.
        """
        engine = self._llm.llm_engine
        requests = image_requests(engine)
        array, rows, columns = codes_array(codes, requests.grid(ImageParams(height=height, width=width)))
        return _pixels(engine.call_model(DECODE, (array.tobytes(), rows, columns)), array, rows, columns, requests)


class AsyncImages:
    """Generates images with an AsyncLLM.

    Args:
        engine: The engine of an event loop.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def generate(
        self,
        prompt: PromptType,
        params: ImageParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> ImageRequestOutput:
        """Generates the images of one prompt. A cancellation aborts the request.

        Args:
            prompt, params: As for `Images.generate`.
            request_id, priority, lora_request: As for `AsyncLLM.generate`.

        Returns:
            The images. One that failed while it was generated has the finish reason `error` and an `error`.

        Raises:
            RequestError: The model generates no images, or the request is invalid.
            UnavailableError: Too many requests are waiting, the engine sleeps, or the request was aborted.
            EngineDeadError: The engine has stopped.
        """
        requests, chosen = image_requests(self._engine), ImageParams() if params is None else params

        def make() -> tuple[PromptType, SamplingParams]:
            settings = requests.sampling_params(chosen)
            return requests.prompt(prompt, chosen), settings

        formatted, settings = await asyncio.to_thread(make)
        request = self._engine.add_request(
            formatted, settings, request_id, priority=priority, lora_request=lora_request
        )
        async with await request as stream:
            last: RequestOutput | None = None
            async for output in stream:
                last = output
        if last is None:
            raise RequestError("The request was aborted before it started.")
        found = requests.output(last, chosen)
        if chosen.decode:
            await self.set_pixels(found.images)
        return found

    async def set_pixels(self, images: Sequence[GeneratedImage]) -> None:
        """Decodes the whole images among `images`, and sets their `pixels`.

        Raises:
            EngineSleepingError: The weights sleep.
            EngineDeadError: The engine has stopped.
        """
        scale = image_requests(self._engine).format.scale
        for batch in decode_batches(images):
            set_pixels(batch, await self._engine.call_model(DECODE, encode_codes(batch)), scale)

    async def decode(self, codes: ArrayLike, *, height: int | None = None, width: int | None = None) -> np.ndarray:
        """Decodes image codes to pixels, see `Images.decode`."""
        requests = image_requests(self._engine)
        array, rows, columns = codes_array(codes, requests.grid(ImageParams(height=height, width=width)))
        pixels = await self._engine.call_model(DECODE, (array.tobytes(), rows, columns))
        return _pixels(pixels, array, rows, columns, requests)


def _pixels(pixels: bytes, codes: np.ndarray, rows: int, columns: int, requests: ImageRequests) -> np.ndarray:
    scale = requests.format.scale
    return np.frombuffer(pixels, dtype=np.uint8).reshape(len(codes), rows * scale, columns * scale, 3).copy()
