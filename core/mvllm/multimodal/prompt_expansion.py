"""Places processed items in a prompt: replaces placeholders, and finds the spans.

text        "Describe <image> and <image>."
expanded    "Describe <start><pad><pad><end> and <start><pad><end>."     then tokenized as a whole
token ids   51 7 9 9 8 24 7 9 8 3
spans          [2, 4)       [7, 8)                                       given to the items in order
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mvllm.errors import RequestError
from mvllm.messages.multimodal import ItemSpan, MultiModalItem
from mvllm.multimodal.processed_item import ProcessedItem, embedded_ranges


def order_in_text(text: str, placeholders: Mapping[str, str], counts: Mapping[str, int]) -> list[str]:
    """The modalities of the items of a text, in the order of their placeholders.

    Args:
        placeholders: By modality, what stands for an item.
        counts: Number of items of the prompt by modality.

    Raises:
        RequestError: The numbers differ.
    """
    by_text = {placeholders[modality]: modality for modality in counts}
    pattern = "|".join(re.escape(each) for each in sorted(by_text, key=len, reverse=True))
    order = [by_text[match.group()] for match in re.finditer(pattern, text)] if pattern else []
    _check_counts(order, counts, placeholders)
    return order


def expand_text(text: str, items: Sequence[ProcessedItem]) -> str:
    """The text with each placeholder replaced. `items` are in the order of `order_in_text`."""
    pieces = []
    start = 0
    for item in items:
        at = text.index(item.placeholder, start)
        pieces += [text[start:at], item.replacement]
        start = at + len(item.placeholder)
    return "".join([*pieces, text[start:]])


def expand_token_ids(ids: Sequence[int], items: Sequence[ProcessedItem]) -> tuple[list[int], list[ProcessedItem]]:
    """Token ids with each placeholder replaced, and the items in the order of their places.

    A prompt in which the placeholders are already as many as the embeddings is taken as it is, as one of a model with
    cross-attention, whose items have no places.

    Args:
        items: Those of each modality in their order.

    Raises:
        RequestError: The numbers of placeholders and items differ.
    """
    if not any(item.embedded for item in items):
        return list(ids), list(items)
    waiting: dict[int, list[ProcessedItem]] = {}
    for item in items:
        if item.placeholder_id < 0:
            raise RequestError(
                f"The placeholder {item.placeholder!r} of a {item.modality} is not one token of this model, so token "
                "ids cannot hold it. Send the prompt as text.",
                parameter="prompt",
            )
        waiting.setdefault(item.placeholder_id, []).append(item)
    counts = {key: len(each) for key, each in waiting.items()}
    found = {key: sum(1 for each in ids if each == key) for key in waiting}
    embedded = {item.embedded_id for item in items}
    is_expanded = sum(1 for each in ids if each in embedded) == sum(item.num_embeddings for item in items)
    if is_expanded and (found != counts or embedded.isdisjoint(waiting)):
        return list(ids), _order_of_spans(ids, items)
    for key, count in counts.items():
        if found[key] != count:
            raise _wrong_count(found[key], count, waiting[key][0].modality, waiting[key][0].placeholder)
    expanded: list[int] = []
    order: list[ProcessedItem] = []
    for token_id in ids:
        if token_id not in waiting:
            expanded.append(token_id)
            continue
        item = waiting[token_id].pop(0)
        expanded += item.token_ids
        order.append(item)
    return expanded, order


def place_items(ids: Sequence[int], items: Sequence[ProcessedItem]) -> list[MultiModalItem]:
    """The items with their spans.

    Args:
        ids: The expanded prompt.
        items: In the order of their places.

    Raises:
        RequestError: The placeholders of the prompt are not those of the items.
    """
    ids = list(ids)
    placed = []
    at = 0
    for item in items:
        if not item.embedded:  # a model with cross-attention
            placed.append(_placed(item, ItemSpan(item.content_hash, 0, 0, [])))
            continue
        try:
            offset = ids.index(item.embedded_id, at)
        except ValueError:
            raise _mismatch(items, ids) from None
        span_ids = item.span_ids
        embedded, length = item.embedded, len(span_ids)
        if ids[offset : offset + length] != span_ids:  # the tokens between its placeholders depend on their context
            places = [i for i in range(offset, len(ids)) if ids[i] == item.embedded_id][: item.num_embeddings]
            if len(places) < item.num_embeddings:
                raise _mismatch(items, ids)
            length = places[-1] + 1 - offset
            _, _, embedded = embedded_ranges(ids[offset : offset + length], item.embedded_id)
            if item.rope_positions is not None and (length != len(span_ids) or embedded != item.embedded):
                raise _mismatch(items, ids)
        at = offset + length
        span = ItemSpan(item.content_hash, offset, length, embedded, item.rope_positions, item.rope_length)
        placed.append(_placed(item, span))
    wanted = {item.embedded_id for item in items if item.embedded}
    if sum(1 for each in ids if each in wanted) != sum(item.num_embeddings for item in items):
        raise _mismatch(items, ids)
    return placed


def _placed(item: ProcessedItem, span: ItemSpan) -> MultiModalItem:
    return MultiModalItem(item.modality, span, item.num_encoded, item.features)


def _order_of_spans(ids: Sequence[int], items: Sequence[ProcessedItem]) -> list[ProcessedItem]:
    """The items of an expanded prompt in the order of their places; those of one modality keep their order."""
    ids = list(ids)
    waiting: dict[str, list[ProcessedItem]] = {}
    for item in items:
        waiting.setdefault(item.modality, []).append(item)
    order: list[ProcessedItem] = []
    at = 0
    while any(waiting.values()):
        nexts = [(_find(ids, each[0].embedded_id, at), each) for each in waiting.values() if each]
        offset = min(place for place, _ in nexts)
        here = [each for place, each in nexts if place == offset]
        exact = [each for each in here if ids[offset : offset + len(each[0].span_ids)] == each[0].span_ids]
        item = max(exact or here, key=lambda each: len(each[0].span_ids)).pop(0)
        order.append(item)
        at = offset + len(item.span_ids)
    return order


def _find(ids: list[int], token_id: int, start: int) -> int:
    try:
        return ids.index(token_id, start)
    except ValueError:
        return len(ids)


def _check_counts(order: Sequence[str], counts: Mapping[str, int], placeholders: Mapping[str, str]) -> None:
    for modality, count in counts.items():
        found = order.count(modality)
        if found != count:
            raise _wrong_count(found, count, modality, placeholders[modality])


def _wrong_count(found: int, count: int, modality: str, placeholder: str) -> RequestError:
    return RequestError(
        f"The prompt has {found} placeholder{'' if found == 1 else 's'} {placeholder!r} for {count} "
        f"{modality} item{'' if count == 1 else 's'}. Write one for each, in the order of the items.",
        parameter="prompt",
    )


def _mismatch(items: Sequence[ProcessedItem], ids: Sequence[int]) -> RequestError:
    wanted = {item.embedded_id for item in items}
    found = sum(1 for each in ids if each in wanted)
    return RequestError(
        f"The prompt has {found} tokens that take an embedding, but its items have "
        f"{sum(item.num_embeddings for item in items)}. Its text must not spell the tokens {sorted(wanted)} itself.",
        parameter="prompt",
    )
