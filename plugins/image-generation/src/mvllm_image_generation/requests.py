"""Prompts and sampling parameters of images, and images from the engine's outputs.

text ── chat template ── tokenizer ── + begin of image ──> TokensPrompt       prompt, as transformers' processors
ImageParams ─────────────────────────────────────────────> SamplingParams     make it
RequestOutput ── codes without ends of rows ─────────────> ImageRequestOutput
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from mvllm.extension_api import ModelConfig, RequestError, RequestOutput
from mvllm.extension_api.engine import (
    CompletionOutput,
    PromptType,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
    TokensPrompt,
    child_seed,
    longer_sequences,
    render_user_message,
)
from mvllm.extension_api.parameters import describe_value
from mvllm_image_generation.formats import IMAGE, ImageFormat, image_format, image_space
from mvllm_image_generation.image_params import ImageParams
from mvllm_image_generation.outputs import GeneratedImage, ImageRequestOutput

IMAGES_AT_ONCE = 16
"""Images that are decoded by one call of the worker, between two steps."""

_NEGATIVE_TEXT = ""


class ImageRequests:
    """Converts the image requests of one engine.

    Args:
        config: The model's configuration.
        tokenizer: The model's tokenizer; None accepts only token ids.

    Attributes:
        format: The format of the model's images.

    Raises:
        RequestError: The model generates no images.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        found = image_format(config)
        if found is None:
            raise RequestError(
                f"The model {config.model} ({config.architecture}) generates text, not images.", parameter="model"
            )
        self.format: ImageFormat = found
        self._config = config
        self._tokenizer = tokenizer

    def grid(self, params: ImageParams) -> tuple[int, int]:
        """Rows and columns of codes of an image.

        Raises:
            RequestError: The model has no images of that size.
        """
        scale, found = self.format.scale, self.format
        if params.height is None or params.width is None:
            return found.rows, found.columns
        if not found.names_size and (params.height, params.width) != (found.rows * scale, found.columns * scale):
            raise RequestError(
                f"height and width are {params.height} and {params.width}, but this model's images have "
                f"{found.rows * scale} x {found.columns * scale} pixels. Leave them out.",
                parameter="height",
            )
        for name, value in (("height", params.height), ("width", params.width)):
            if value % scale:
                raise RequestError(
                    f"{name} is {value}, but must be a multiple of {scale}, the pixels per code along each side.",
                    parameter=name,
                )
        return params.height // scale, params.width // scale

    def prompt(
        self, prompt: PromptType, params: ImageParams, render: Callable[[str], str] | None = None
    ) -> PromptType | TokensPrompt:
        """The prompt for the engine: a text is formatted, token ids are used as they are.

        Args:
            render: Renders a text as a user's message with the chat template; by default the tokenizer's.

        Raises:
            RequestError: It has images, its text cannot be formatted, or it leaves no room for an image.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, Mapping) and {"multi_modal_data", "images", "image"} & prompt.keys():
            raise RequestError(
                "Images are not supported as input: pass a text, or {'prompt_token_ids': [...]}.", parameter="prompt"
            )
        given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str) or (isinstance(prompt, Mapping) and given is not None):
            if isinstance(given, Sized):
                self._check_room("prompt", len(given), params)
            return prompt
        shown, ids = self._format("prompt", text, params, render)
        self._check_room("prompt", len(ids), params)
        extra: dict[str, Any] = (
            {k: v for k, v in prompt.items() if k != "prompt"} if isinstance(prompt, Mapping) else {}
        )
        return {**extra, "prompt_token_ids": ids, "prompt": shown}  # type: ignore[return-value]

    def sampling_params(self, params: ImageParams, render: Callable[[str], str] | None = None) -> SamplingParams:
        """The sampling parameters of the images of a prompt.

        Raises:
            RequestError: A value is out of its range.
        """
        if not isinstance(params, ImageParams):
            raise RequestError(f"params must be ImageParams; found {describe_value(params)}.", parameter="params")
        rows, columns = self.grid(params)
        scale = self.format.guidance_scale if params.guidance_scale is None else params.guidance_scale
        num_tokens = self.format.num_tokens(rows, columns)
        if params.max_tokens is None and num_tokens >= self._config.max_model_len:
            raise RequestError(
                f"An image of {rows} x {columns} codes has {num_tokens} tokens, but prompt and image together may have "
                f"{self._config.max_model_len} (max_model_len). Ask for a smaller image, or start the engine with "
                f"{longer_sequences(self._config)}.",
                parameter="height",
            )
        settings: dict[str, Any] = {}
        if self.format.row_end_id is not None:
            settings["forced_token_ids"] = {
                row * (columns + 1) + columns: self.format.row_end_id for row in range(rows)
            }
        return SamplingParams(
            n=params.n,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            max_tokens=num_tokens if params.max_tokens is None else params.max_tokens,
            ignore_eos=True,
            logprobs=0 if params.returns_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            guidance_scale=scale,
            negative_prompt=self._negative_prompt(params, render) if scale != 1.0 else None,
            token_space=IMAGE,
            **settings,
        )

    def _negative_prompt(self, params: ImageParams, render: Callable[[str], str] | None) -> list[int] | None:
        """The token ids of the unconditional prompt; None for the engine's default."""
        negative = params.negative_prompt
        if negative is None and self.format.names_size:
            negative = _NEGATIVE_TEXT
        if isinstance(negative, str):
            if self._tokenizer is None:
                raise RequestError(
                    "The engine was started with skip_tokenizer_init, so the unconditional prompt must be token ids. "
                    "Set negative_prompt to a list of token ids, or guidance_scale to 1.",
                    parameter="negative_prompt",
                )
            negative = self._format("negative_prompt", negative, params, render)[1]
        if params.negative_prompt is not None and isinstance(negative, Sized):
            self._check_room("negative_prompt", len(negative), params)
        return negative

    def _check_room(self, name: str, length: int, params: ImageParams, how: str = "") -> None:
        """Checks that a whole image fits behind a prompt of `length` tokens, unless `max_tokens` asks for less."""
        rows, columns = self.grid(params)
        num_tokens, most = self.format.num_tokens(rows, columns), self._config.max_model_len
        if params.max_tokens is None and length + num_tokens > most:
            raise RequestError(
                f"{name} has {how}{length} tokens and an image of {rows} x {columns} codes has {num_tokens}, but both "
                f"together may have {most} (max_model_len). Shorten {name}, or start the engine with "
                f"{longer_sequences(self._config)}.",
                parameter=name,
            )

    def output(self, output: RequestOutput, params: ImageParams) -> ImageRequestOutput:
        """The images of a finished request, without pixels. A sequence that failed gives an image with its error."""
        grid = self.grid(params)
        images = [self._image(sequence, params, *grid) for sequence in output.outputs]
        return ImageRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            images,
            output.metrics,
            output.num_cached_tokens,
        )

    def _image(self, sequence: CompletionOutput, params: ImageParams, rows: int, columns: int) -> GeneratedImage:
        first = image_space(self._config).first
        count = len(sequence.token_ids)
        width = columns if self.format.row_end_id is None else columns + 1
        places = [i for i in range(min(count, rows * width)) if i % width < columns]
        logprobs = None
        if sequence.logprobs is not None:
            logprobs = [sequence.logprobs[i][sequence.token_ids[i]].logprob for i in places]
        conditional = sequence.conditional_logprobs
        return GeneratedImage(
            index=sequence.index,
            codes=[sequence.token_ids[i] - first for i in places],
            rows=rows,
            columns=columns,
            token_ids=sequence.token_ids,
            logprobs=logprobs,
            conditional_logprobs=None if conditional is None else [conditional[i] for i in places],
            seed=None if params.seed is None else child_seed(params.seed, sequence.index),
            finish_reason=sequence.finish_reason,
            weight_versions=sequence.weight_versions,
            error=sequence.error,
            error_parameter=sequence.error_parameter,
        )

    def _format(
        self, name: str, text: str, params: ImageParams, render: Callable[[str], str] | None
    ) -> tuple[str, list[int]]:
        """A text as the model expects it, and its token ids. `name` is the parameter in errors."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "The engine was started with skip_tokenizer_init, so it accepts token ids, not text. "
                "Pass {'prompt_token_ids': [...]}.",
                parameter="prompt",
            )
        begin = self.format.begin_token_ids
        if not begin:
            raise RequestError(
                f"{self._config.path} names no token that begins an image, so text cannot be turned into a prompt. Add "
                "'boi_token_id' to its generation_config.json, or pass {'prompt_token_ids': [...]}.",
                parameter="prompt",
            )
        self._check_room(name, tokenizer.num_tokens_lower_bound(text), params, "at least ")  # before tokenizing it
        if self.format.chat_prompt is not None:
            text = (render or self._render)(text)
            return text, [*tokenizer.encode(text), *begin]
        rows, columns = self.grid(params)
        size = tokenizer.encode(f"{rows}*{columns}", add_special_tokens=False)
        ids = tokenizer.encode(text, add_special_tokens=False) if text else []
        bos = self._config.hf_config.get("bos_token_id")
        start = [bos] if isinstance(bos, int) else []
        return text, [*start, *ids, begin[0], *size, *begin[1:]]

    def _render(self, text: str) -> str:
        assert self._tokenizer is not None and self.format.chat_prompt is not None
        found = render_user_message(self._tokenizer, text)
        return self.format.chat_prompt.format(text) if found is None else found


def decode_batches(images: Iterable[GeneratedImage]) -> list[list[GeneratedImage]]:
    """The whole images, as the worker decodes them: those of one size together, IMAGES_AT_ONCE at a time."""
    by_size: dict[tuple[int, int], list[GeneratedImage]] = {}
    for image in images:
        if image.is_whole:
            by_size.setdefault((image.rows, image.columns), []).append(image)
    return [
        found[start : start + IMAGES_AT_ONCE]
        for found in by_size.values()
        for start in range(0, len(found), IMAGES_AT_ONCE)
    ]


def encode_codes(images: Sequence[GeneratedImage]) -> tuple[bytes, int, int]:
    """The arguments of the model's `decode_images` for images of one size."""
    codes = np.array([image.codes for image in images], dtype="<i4")
    return codes.tobytes(), images[0].rows, images[0].columns


def set_pixels(images: Sequence[GeneratedImage], pixels: bytes, scale: int) -> None:
    """Sets the pixels of a batch from the result of `decode_images`."""
    rows, columns = images[0].rows, images[0].columns
    shape = (len(images), rows * scale, columns * scale, 3)
    for image, array in zip(images, np.frombuffer(pixels, dtype=np.uint8).reshape(shape), strict=True):
        image.pixels = array


def codes_array(codes: Any, grid: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """Codes as little-endian int32 [n, rows * columns], rows and columns.

    Raises:
        RequestError: They are not whole images of `grid` codes.
    """
    rows, columns = grid
    try:
        array = np.asarray(codes)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if not array.size or array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.shape[-1] != rows * columns:
        found = f"{array.dtype} {list(array.shape)}" if array.size else describe_value(codes)
        raise RequestError(
            f"codes must be integers [n, {rows * columns}]: images of {rows} x {columns} codes, row by row; found "
            f"{found}.",
            parameter="codes",
        )
    if array.min() < 0 or array.max() >= 2**31:
        raise RequestError(f"codes must be from 0 on; found {array.min()} to {array.max()}.", parameter="codes")
    return np.atleast_2d(array).astype("<i4"), rows, columns
