"""Items of prompts in the front end: has them prepared, and gives them their places in the prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import RequestError
from mvllm.messages.multimodal import EMBEDS, ArrayData, ItemSpan, MultiModalItem
from mvllm.messages.requests import RequestPair
from mvllm.messages.sampling_params import SamplingParams
from mvllm.multimodal.item_memory import ItemLease, LeasedArray
from mvllm.multimodal.item_request import count_contents, has_items
from mvllm.multimodal.media_fetcher import FetchGroup
from mvllm.multimodal.media_source import as_item_list, embeddings_source
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processor_client import ProcessorClient, RemoteItem
from mvllm.multimodal.prompt_expansion import expand_text, expand_token_ids, order_in_text, place_items

ITEM_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "multi_modal_items")
"""Keys of a prompt dict that concern items."""

PreparedItems = Sequence[ProcessedItem]
"""The items of one prompt: those of each modality in their order."""


class PromptItems:
    """Prepares the items of prompts.

    Args:
        config: The engine's configuration.
        client: Prepares items.
    """

    def __init__(self, config: EngineConfig, client: ProcessorClient) -> None:
        self._config = config
        self._client = client

    def check(self, prompt: object) -> None:
        """Checks the items of a prompt without reading their contents. Other prompts have none.

        Raises:
            RequestError: The model does not take them.
        """
        if has_items(prompt):
            self._check_accepted()
            self._client.check(prompt)  # type: ignore[arg-type]

    def reserve(self, prompts: Sequence[object]) -> Future[ItemLease]:
        """Memory for the items of prompts that are prepared together, see `ItemMemory.reserve`.

        Raises:
            RequestError: The engine is shutting down.
        """
        counts: Counter[str] = Counter()
        for prompt in prompts:
            counts.update(count_contents(prompt))
        return self._client.memory.reserve(counts)

    def fetch_group(self) -> FetchGroup:
        """The fetches of one call, see `MediaFetcher.group`."""
        return self._client.fetcher.group()

    def start_fetching(self, prompt: object, group: FetchGroup) -> list[RemoteItem]:
        """Begins to fetch the items of a checked prompt that are URLs of other hosts; none for prompts without items.

        Raises:
            RequestError: The engine is shutting down.
        """
        return self._client.start_fetching(prompt, group) if has_items(prompt) else []  # type: ignore[arg-type]

    @property
    def max_bytes(self) -> int:
        """Most bytes of the items of several prompts that are prepared together."""
        return self._client.memory.max_bytes

    def submit(self, prompt: object) -> Future[list[ProcessedItem]] | None:
        """Prepares the items of a prompt in a thread; None for prompts without items.

        Raises:
            RequestError: As `check`. The future has the errors of contents.
        """
        if not has_items(prompt):
            return None
        self._check_accepted()
        return self._client.submit(prompt)  # type: ignore[arg-type]

    def prepare_all(self, prompts: Sequence[object], check_for_prompt: Callable[..., Any]) -> list[PreparedItems]:
        """The prepared items of each prompt, several prompts at a time. Blocks.

        Args:
            check_for_prompt: Calls a function for a prompt: its position, the prompts, the function, its arguments. It
                adds the position to errors.

        Raises:
            RequestError: The first one of a prompt.
        """
        futures: list[Future[list[ProcessedItem]] | None] = []
        try:
            for i, prompt in enumerate(prompts):
                futures.append(check_for_prompt(i, prompts, self.submit, prompt))
            return [
                () if future is None else check_for_prompt(i, prompts, future.result)
                for i, future in enumerate(futures)
            ]
        finally:
            for future in futures:
                if future is not None:
                    future.cancel()

    def read_embeds(self, value: object, check_length: Callable[[int], None]) -> list[MultiModalItem]:
        """The item of a prompt that is ready embeddings.

        Args:
            value: A tensor of torch or an array of numpy [n, hidden_size], or an ArrayData of such.
            check_length: Checks the number of its rows.

        Raises:
            RequestError: The engine takes none, or these have another shape.
        """
        self.check_embeds_enabled()
        if isinstance(value, LeasedArray):
            value = value.array
        if not isinstance(value, ArrayData):
            shape = tuple(getattr(value, "shape", ()))
            if len(shape) in (2, 3):
                check_length(int(shape[-2]))
            value = embeddings_source(value, self._config.model.hidden_size)
        num_rows = value.shape[0]
        check_length(num_rows)
        name = hashlib.sha256(f"{EMBEDS} {value.dtype} {value.shape}".encode() + value.data).digest()
        return [MultiModalItem(EMBEDS, ItemSpan(name, 0, num_rows, [(0, num_rows)]), num_rows, {EMBEDS: value})]

    def check_embeds_enabled(self) -> None:
        """Checks that requests may bring ready embeddings.

        Raises:
            RequestError: They may not.
        """
        self._check_accepted()
        if not self._config.multimodal.enable_embeds:
            raise RequestError(
                "prompt_embeds is off: start the engine with enable_prompt_embeds=True (--enable-prompt-embeds).",
                parameter="prompt_embeds",
            )

    def _check_accepted(self) -> None:
        if self._config.multimodal.refusal is not None:
            raise RequestError(self._config.multimodal.refusal, parameter="multi_modal_data")


def name_for_salt(items: Sequence[MultiModalItem], cache_salt: str | None) -> list[MultiModalItem]:
    """The items with names that only requests of the same `cache_salt` have: they name what is cached of an item."""
    if cache_salt is None:
        return list(items)
    named = []
    for item in items:
        name = hashlib.sha256(b"cache_salt" + item.span.content_hash + cache_salt.encode()).digest()
        span = msgspec.structs.replace(item.span, content_hash=name)
        named.append(msgspec.structs.replace(item, span=span))
    return named


def with_contents(prompt: object, contents: Mapping[tuple[str, int], bytes]) -> object:
    """A prompt whose items at these places (modality, position) have these contents."""
    if not contents:
        return prompt
    assert isinstance(prompt, Mapping)
    data = dict(prompt["multi_modal_data"])
    for modality in {modality for modality, _ in contents}:
        items = as_item_list(data[modality], modality)
        data[modality] = [contents.get((modality, i), item) for i, item in enumerate(items)]
    return {**prompt, "multi_modal_data": data}


def check_item_keys(prompt: Mapping[str, Any]) -> None:
    """Checks the keys that need another one.

    Raises:
        RequestError: One is missing, or two exclude each other.
    """
    for key in ("mm_processor_kwargs", "multi_modal_uuids"):
        if prompt.get(key) and not prompt.get("multi_modal_data"):
            raise RequestError(f"{key} needs multi_modal_data, the items that it concerns.", parameter=key)
    if prompt.get("prompt_embeds") is None:
        return
    for key in ("prompt", "prompt_token_ids", "multi_modal_data"):
        if prompt.get(key):
            raise RequestError(f"prompt_embeds is a whole prompt; it excludes {key!r}.", parameter="prompt_embeds")


def check_placed(items: object, num_tokens: int) -> list[MultiModalItem]:
    """The items of an expanded prompt.

    Raises:
        RequestError: They are not what `InputProcessor.expand` returns.
    """
    found: list[MultiModalItem] = []
    end = 0
    for item in items if isinstance(items, list | tuple) else [None]:
        if not isinstance(item, MultiModalItem) or not end <= item.span.offset or item.span.stop > num_tokens:
            raise RequestError(
                "multi_modal_items must be the items of the same prompt, as the engine has placed them. Pass "
                "multi_modal_data.",
                parameter="multi_modal_items",
            )
        end = item.span.stop
        found.append(item)
    return found


def expand_prompt_text(text: str, items: PreparedItems) -> tuple[str, list[ProcessedItem]]:
    """The text with its placeholders replaced, and the items in the order of their places.

    Items of models with cross-attention have no places.

    Raises:
        RequestError: The numbers of placeholders and items differ.
    """
    if not any(item.embedded for item in items):
        return text, list(items)
    waiting: dict[str, list[ProcessedItem]] = {}
    for item in items:
        waiting.setdefault(item.modality, []).append(item)
    counts = {modality: len(each) for modality, each in waiting.items()}
    order = order_in_text(text, {item.modality: item.placeholder for item in items}, counts)
    ordered = [waiting[modality].pop(0) for modality in order]
    return expand_text(text, ordered), ordered


def refuse_truncation() -> None:
    """Raises the RequestError of a prompt with items that is to be truncated."""
    raise RequestError(
        "truncate_prompt_tokens cannot be combined with images, audio or embeddings: it could cut one in two.",
        parameter="truncate_prompt_tokens",
    )


def check_params_with_items(
    params: SamplingParams, items: Sequence[MultiModalItem], pair: RequestPair | None = None
) -> None:
    """Checks that the parameters can be combined with items.

    Raises:
        RequestError: They cannot.
    """
    if pair is not None:
        raise RequestError(
            f"{pair.parameter} cannot be combined with images, audio or embeddings in the prompt.",
            parameter=pair.parameter,
        )
    if params.prompt_logprobs is not None and any(item.modality == EMBEDS for item in items):
        raise RequestError(
            "prompt_logprobs cannot be combined with prompt_embeds, whose positions have no tokens.",
            parameter="prompt_logprobs",
        )


__all__ = [
    "ITEM_KEYS",
    "PreparedItems",
    "PromptItems",
    "check_item_keys",
    "check_params_with_items",
    "check_placed",
    "expand_prompt_text",
    "expand_token_ids",
    "name_for_salt",
    "place_items",
    "refuse_truncation",
    "with_contents",
]
