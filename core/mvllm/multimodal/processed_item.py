"""ProcessedItem: what the processor has made of one item, before it has a place in a prompt."""

from __future__ import annotations

import msgspec

from mvllm.messages.multimodal import ArrayData


class ProcessedItem(msgspec.Struct, array_like=True, omit_defaults=True):
    """One processed item.

        replacement   <start> <pad> <pad> <break> <pad> <pad> <end>
        token_ids        7       9     9     4       9     9     8
        span                   [------------------------)              start 1, stop 6, embedded [(0, 2), (3, 5)]

    Attributes:
        modality: `image`, `video` or `audio`.
        content_hash: 32 bytes: hash of content, processor and arguments.
        placeholder: What stands for the item in the text of a prompt.
        placeholder_id: Its token id.
        replacement: The text that replaces it.
        token_ids: The token ids of `replacement` alone.
        start, stop: The span among `token_ids`: from its first to its last position that takes an embedding.
        embedded: As in ItemSpan.
        embedded_id: The token id of the positions that take an embedding.
        num_encoded, features: As in MultiModalItem.
        rope_positions, rope_length: As in ItemSpan.
    """

    modality: str
    content_hash: bytes
    placeholder: str
    placeholder_id: int
    replacement: str
    token_ids: list[int]
    start: int
    stop: int
    embedded: list[tuple[int, int]]
    embedded_id: int
    num_encoded: int
    features: dict[str, ArrayData]
    rope_positions: ArrayData | None = None
    rope_length: int | None = None

    @property
    def span_ids(self) -> list[int]:
        """The token ids of the span."""
        return self.token_ids[self.start : self.stop]

    @property
    def num_embeddings(self) -> int:
        """Rows of its embeddings that the prompt takes."""
        return sum(stop - start for start, stop in self.embedded)

    @property
    def num_bytes(self) -> int:
        """Its approximate size."""
        return sum(len(array.data) for array in self.features.values()) + 8 * len(self.token_ids) + 1024


def embedded_ranges(token_ids: list[int], embedded_id: int) -> tuple[int, int, list[tuple[int, int]]]:
    """The span of an item among token ids, all of whose placeholders are its own.

    Returns:
        Its first position, the first position behind it, and the (start, stop) pairs that take an embedding, relative
        to the first. (0, 0, []) if there is none.
    """
    places = [i for i, token_id in enumerate(token_ids) if token_id == embedded_id]
    if not places:
        return 0, 0, []
    first = places[0]
    ranges: list[tuple[int, int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place - first:
            ranges[-1] = (ranges[-1][0], place - first + 1)
        else:
            ranges.append((place - first, place - first + 1))
    return first, places[-1] + 1, ranges
