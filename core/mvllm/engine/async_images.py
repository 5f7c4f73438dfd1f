"""The methods of AsyncLLM that generate images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mvllm.engine.frontend.image_outputs import GeneratedImage, ImageRequestOutput
from mvllm.engine.frontend.image_requests import ImageRequests, codes_array, decode_batches, encode_codes, set_pixels
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.errors import RequestError
from mvllm.messages.commands import DecodeImages
from mvllm.messages.image_params import ImageParams
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_T = TypeVar("_T")


class AsyncImages(ABC):
    """Base of AsyncLLM, which defines the attributes that it uses."""

    _client: AsyncEngineCoreClient

    @property
    @abstractmethod
    def image_requests(self) -> ImageRequests:
        """Converts requests for images."""

    @abstractmethod
    def _require_alive(self) -> None:
        """Raises if the engine is closed or dead."""

    @abstractmethod
    async def _run_in_thread(self, work: Callable[[], _T], num_chars: int = 0) -> _T:
        """Runs work of the tokenizer in a thread."""

    @abstractmethod
    async def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutputStream:
        """Queues a request."""

    async def generate_images(
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
            prompt, params: As for `LLM.generate_images`.
            request_id, priority, lora_request: As for `generate`.

        Returns:
            The images. One that failed while it was generated has the finish reason `error` and an `error`.

        Raises:
            RequestError: The model generates no images, or the request is invalid.
            UnavailableError: Too many requests are waiting, the engine sleeps, or the request was aborted.
            EngineDeadError: The engine has stopped.
        """
        images, chosen = self.image_requests, ImageParams() if params is None else params

        def make() -> tuple[PromptType, SamplingParams]:
            settings = images.sampling_params(chosen)
            return images.prompt(prompt, chosen), settings

        formatted, settings = await self._run_in_thread(make)
        request = self.add_request(formatted, settings, request_id, priority=priority, lora_request=lora_request)
        async with await request as stream:
            last: RequestOutput | None = None
            async for output in stream:
                last = output
        if last is None:
            raise RequestError("The request was aborted before it started.")
        found = images.output(last, chosen)
        if chosen.decode:
            await self.set_pixels(found.images)
        return found

    async def set_pixels(self, images: Sequence[GeneratedImage]) -> None:
        """Decodes the whole images among `images`, and sets their `pixels`.

        Raises:
            EngineSleepingError: The weights sleep.
            EngineDeadError: The engine has stopped.
        """
        scale = self.image_requests.format.scale
        for batch in decode_batches(images):
            self._require_alive()
            set_pixels(batch, await self._client.call(DecodeImages(*encode_codes(batch))), scale)

    async def decode_images(
        self, codes: ArrayLike, *, height: int | None = None, width: int | None = None
    ) -> np.ndarray:
        """Decodes image codes to pixels, see `LLM.decode_images`."""
        self._require_alive()
        images = self.image_requests
        array, rows, columns = codes_array(codes, images.grid(ImageParams(height=height, width=width)))
        pixels = await self._client.call(DecodeImages(array.tobytes(), rows, columns))
        scale = images.format.scale
        return np.frombuffer(pixels, dtype=np.uint8).reshape(len(array), rows * scale, columns * scale, 3).copy()
