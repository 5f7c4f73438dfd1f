"""Items of a prompt beside text: images, videos, audio and ready embeddings.

A prompt is token ids plus items. An item owns a span of positions, some of which take a row of its embeddings instead
of the embedding of their token id:

    ids         A  B  V  P  P  N  P  P  N  E  C           P: the placeholder of the model's config.json
    span                 [-----------)                    offset 3, length 5
    rows                 0  1     2  3                    embedded [(0, 2), (3, 5)]

The embeddings come from the model's encoder, which runs on the item's features: what the model's processor has made of
the content. They are named by a hash of content and processor, so requests with the same image share them. The item of
a model with cross-attention has no positions: its span is empty, at offset 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mvllm.contract import ANY, Phase, phase

EMBEDS = "embeds"
"""The modality of ready embeddings."""


@phase(ANY)
class ArrayData(msgspec.Struct, array_like=True):
    """An array as bytes.

    Attributes:
        dtype: Its name, as numpy's: `float32`, `int64`, `bool`; or `bfloat16`.
        shape: Its shape.
        data: Its elements in C order, little-endian.
    """

    dtype: str
    shape: list[int]
    data: bytes


@phase(Phase.WORKER)
class ItemSpan(msgspec.Struct, array_like=True, omit_defaults=True):
    """Where an item stands in its prompt, and how positions continue behind it.

    Attributes:
        content_hash: 32 bytes: the name of the item's embeddings.
        offset: First position of the span.
        length: Number of positions of the span.
        embedded: (start, stop) pairs relative to `offset`, rising: the positions that take the rows of the embeddings,
            in order.
        rope_positions: int32 [3, length] relative to the position at which the span starts, for models with
            three-dimensional positions (temporal, height, width); None where every token is one further than the one
            before it.
        rope_length: How far positions advance over the span: the first token behind it has the position of its start
            plus this. None for `length`.
        is_causal: Its positions see earlier ones only, also in models whose images attend in both directions: ready
            embeddings and audio.
    """

    content_hash: bytes
    offset: int
    length: int
    embedded: list[tuple[int, int]]
    rope_positions: ArrayData | None = None
    rope_length: int | None = None
    is_causal: bool = False

    @property
    def stop(self) -> int:
        """The first position behind the span."""
        return self.offset + self.length

    @property
    def num_embeddings(self) -> int:
        """Rows of its embeddings that the prompt takes."""
        return sum(stop - start for start, stop in self.embedded)


class MultiModalItem(msgspec.Struct, array_like=True, omit_defaults=True):
    """One item of a request.

    Attributes:
        modality: `image`, `video`, `audio`, or `embeds` for ready embeddings, which no encoder changes.
        span: Where it stands.
        num_encoded: Rows of the encoder's result; those of `span.num_embeddings`, except for models with
            cross-attention.
        features: The processor's arrays for this item alone, the arguments of the model's encoder. Of `embeds`:
            `embeds` [rows, hidden_size].
    """

    modality: str
    span: ItemSpan
    num_encoded: int
    features: dict[str, ArrayData]

    @property
    def is_causal(self) -> bool:
        """Whether its positions see earlier ones only in every model."""
        return self.modality in (EMBEDS, "audio")


def omit_sent_features(items: Sequence[MultiModalItem], sent: set[bytes]) -> list[MultiModalItem]:
    """The items without the features that a message has already, in one with several requests.

    The n sequences of a prompt have the same items, whose features take megabytes.

    Args:
        sent: Content hashes of the items in the message so far. Those of `items` are added.
    """
    found: list[MultiModalItem] = []
    for item in items:
        is_sent = item.span.content_hash in sent
        sent.add(item.span.content_hash)
        found.append(msgspec.structs.replace(item, features={}) if is_sent else item)
    return found


def restore_sent_features(items: Sequence[MultiModalItem], received: dict[bytes, dict[str, ArrayData]]) -> None:
    """Undoes `omit_sent_features`: equal items then share their features.

    Args:
        received: Features of the items in the message so far, by content hash. Those of `items` are added.
    """
    for item in items:
        item.features = item.features or received.get(item.span.content_hash, {})
        received[item.span.content_hash] = item.features


@phase(Phase.WORKER)
class EncoderInput(msgspec.Struct, array_like=True):
    """An item whose encoder runs in a step. Attributes as in MultiModalItem and ItemSpan."""

    content_hash: bytes
    modality: str
    num_encoded: int
    features: dict[str, ArrayData]
