"""The methods of LLM that generate images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mvllm.engine.frontend.image_outputs import ImageRequestOutput
from mvllm.engine.frontend.image_requests import codes_array, decode_batches, encode_codes, set_pixels
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.entrypoints.prompt_lists import as_prompt_list, one_per_prompt
from mvllm.messages.image_params import ImageParams
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class LLMImages(ABC):
    """Base of LLM."""

    @property
    @abstractmethod
    def llm_engine(self) -> LLMEngine:
        """The engine that runs the requests."""

    @abstractmethod
    def _generate(
        self,
        engine: LLMEngine,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams],
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Validates all prompts and parameters, then generates."""

    def generate_images(
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
            use_tqdm, priority, lora_request, raise_on_error: As for `generate`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: The model generates no images, or a prompt or parameter is invalid, and no prompt was
                processed; or see `raise_on_error`.
            EngineDeadError: The engine has failed or was closed.
        """
        engine = self.llm_engine
        images = engine.image_requests
        each = as_prompt_list(prompts)
        chosen = one_per_prompt(ImageParams() if params is None else params, len(each), "params")
        settings = [images.sampling_params(one) for one in chosen]
        formatted = [images.prompt(prompt, one) for prompt, one in zip(each, chosen, strict=True)]
        finished = self._generate(engine, formatted, settings, use_tqdm, priority, lora_request, raise_on_error)
        outputs = [images.output(output, one) for output, one in zip(finished, chosen, strict=True)]
        wanted = [image for output, one in zip(outputs, chosen, strict=True) if one.decode for image in output.images]
        for batch in decode_batches(wanted):
            set_pixels(batch, engine.decode_images(*encode_codes(batch)), images.format.scale)
        return outputs

    def decode_images(self, codes: ArrayLike, *, height: int | None = None, width: int | None = None) -> np.ndarray:
        """Decodes image codes to pixels.

        Args:
            codes: int [n, number of codes], from 0: images of one size, row by row; one image may have one dimension.
            height, width: Their size in pixels, for models that let choose it; by default the model's.

        Returns:
            uint8 [n, height, width, 3]: red, green, blue.

        Raises:
            RequestError: The model generates no images, they have another number of codes, or a code does not exist.
        """
        images = self.llm_engine.image_requests
        array, rows, columns = codes_array(codes, images.grid(ImageParams(height=height, width=width)))
        pixels = self.llm_engine.decode_images(array.tobytes(), rows, columns)
        scale = images.format.scale
        return np.frombuffer(pixels, dtype=np.uint8).reshape(len(array), rows * scale, columns * scale, 3).copy()
