"""ItemRequest: the items of one prompt as users pass them, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.config.multimodal import DEFAULT_LIMIT, MODALITIES, MultiModalConfig
from mvllm.errors import RequestError
from mvllm.messages.field_checks import describe_value
from mvllm.multimodal.media_source import as_item_list
from mvllm.multimodal.requested_sizes import check_numbers

MAX_UUID_LENGTH = 256
_MAX_KWARGS_LENGTH = 4096
_RESERVED_KWARGS = ("return_tensors", "device", "backend")


@dataclass(frozen=True)
class ItemRequest:
    """The items of one prompt.

    Attributes:
        items: (modality, content, the user's name of the content or None) of each; those of a modality in their order.
        counts: Their number by modality.
        kwargs: JSON of arguments of the processor.
        cache_salt: That of the prompt: items of other salts are not used, and theirs not this one's.
    """

    items: list[tuple[str, Any, str | None]]
    counts: dict[str, int]
    kwargs: bytes
    cache_salt: str | None = None


def has_items(prompt: object) -> bool:
    """Whether a prompt has items that the processor's process prepares."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def count_contents(prompt: object) -> dict[str, int]:
    """About how many items a prompt has, by modality. It need not be valid."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    values = data.items() if isinstance(data, Mapping) else ()
    return {
        str(modality): min(len(value), 64) if isinstance(value, list) else int(value is not None)
        for modality, value in values
    }


def read_item_request(prompt: Mapping[str, Any], model: ModelConfig, config: MultiModalConfig) -> ItemRequest:
    """The items of a prompt with `multi_modal_data`. Looks at their number only, not at their contents.

    Raises:
        RequestError: The model does not take them, there are too many, or a field has another type.
    """
    data = prompt["multi_modal_data"]
    if not isinstance(data, Mapping):
        raise RequestError(
            f"multi_modal_data must be a dict such as {{'image': image}}; found {describe_value(data)}.",
            parameter="multi_modal_data",
        )
    uuids = prompt.get("multi_modal_uuids") or {}
    if not isinstance(uuids, Mapping):
        raise RequestError(
            f"multi_modal_uuids must be a dict such as {{'image': ['name']}}; found {describe_value(uuids)}.",
            parameter="multi_modal_uuids",
        )
    items: list[tuple[str, Any, str | None]] = []
    counts: dict[str, int] = {}
    for modality, value in data.items():
        values = [] if value is None else as_item_list(value, str(modality))
        if not len(values):
            continue
        check_modality(str(modality), len(values), model, config)
        names = _uuids(uuids.get(modality), str(modality), len(values))
        items += [(str(modality), each, name) for each, name in zip(values, names, strict=True)]
        counts[str(modality)] = len(values)
    salt = prompt.get("cache_salt")
    kwargs = _kwargs(prompt.get("mm_processor_kwargs"), config.max_pixels)
    return ItemRequest(items, counts, kwargs, salt if isinstance(salt, str) else None)


def check_modality(modality: str, count: int, model: ModelConfig, config: MultiModalConfig) -> None:
    """Checks that the model takes items of a modality, and so many.

    Raises:
        RequestError: It does not.
    """
    if modality not in MODALITIES:
        raise RequestError(
            f"multi_modal_data has the keys {', '.join(MODALITIES)}; found {modality[:40]!r}.",
            parameter="multi_modal_data",
        )
    takes = () if model.multimodal is None else model.multimodal.modalities
    if modality not in takes:
        what = f"takes only text and {', '.join(takes)}" if takes else "takes only text"
        raise RequestError(
            f"The model {model.model} ({model.architecture}) {what}; the prompt has items of modality {modality!r}.",
            parameter="multi_modal_data",
        )
    limit = config.limit_per_prompt.get(modality, DEFAULT_LIMIT)
    if count > limit:
        raise RequestError(
            f"The prompt has {count} items of modality {modality!r}; {limit} are allowed (limit_mm_per_prompt).",
            parameter="multi_modal_data",
        )


def _uuids(value: object, modality: str, count: int) -> Sequence[str | None]:
    if value is None:
        return [None] * count
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or len(names) != count:
        raise RequestError(
            f"multi_modal_uuids[{modality!r}] must have one name or null for each of {count} items.",
            parameter="multi_modal_uuids",
        )
    for name in names:
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_UUID_LENGTH):
            raise RequestError(
                f"A name in multi_modal_uuids is a text of 1 to {MAX_UUID_LENGTH} characters; found "
                f"{describe_value(name)}.",
                parameter="multi_modal_uuids",
            )
    return names


def _kwargs(value: object, max_pixels: int) -> bytes:
    if value is None:
        return b"{}"
    if not isinstance(value, Mapping):
        raise RequestError(
            f"mm_processor_kwargs must be a dict; found {describe_value(value)}.", parameter="mm_processor_kwargs"
        )
    # Processors also take them for one modality: {"images_kwargs": {...}}.
    groups = [value, *(each for each in value.values() if isinstance(each, Mapping))]
    reserved = [name for name in _RESERVED_KWARGS if any(name in group for group in groups)]
    if reserved:
        raise RequestError(
            f"mm_processor_kwargs may not set {', '.join(reserved)}, which the engine decides.",
            parameter="mm_processor_kwargs",
        )
    try:
        encoded = json.dumps(dict(value), sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(
            f"mm_processor_kwargs must hold JSON values only: {e}.", parameter="mm_processor_kwargs"
        ) from e
    check_numbers(value, max_pixels)
    if len(encoded) > _MAX_KWARGS_LENGTH:
        raise RequestError(
            f"mm_processor_kwargs may have {_MAX_KWARGS_LENGTH} characters of JSON.", parameter="mm_processor_kwargs"
        )
    return encoded
