"""Items get their places in texts and token ids.

Texts are words, a token each. Items: `<i>` stands for an image of two rows of pads between marks, `<v>` for a video,
whose frames use the pads of images.
"""

from __future__ import annotations

import pytest

from mvllm.errors import RequestError
from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal.processed_item import ProcessedItem, embedded_ranges
from tests.helpers.processed_items import process_prompt

WORDS = ["<i>", "<v>", "pad", "start", "end", "break", "a", "b", "c", "glued"]
PAD = WORDS.index("pad")


def tokenize(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def item(modality: str = "image", replacement: str = " start pad pad break pad end ", name: int = 0) -> ProcessedItem:
    ids = tokenize(replacement)
    start, stop, embedded = embedded_ranges(ids, PAD)
    placeholder = {"image": "<i>", "video": "<v>"}[modality]
    return ProcessedItem(
        modality=modality,
        content_hash=bytes([name]) * 32,
        placeholder=placeholder,
        placeholder_id=WORDS.index(placeholder),
        replacement=replacement,
        token_ids=ids,
        start=start,
        stop=stop,
        embedded=embedded,
        embedded_id=PAD,
        num_encoded=sum(b - a for a, b in embedded),
        features={"pixels": ArrayData("float32", [1], bytes(4))},
    )


def places(prompt: str | list[int], *items: ProcessedItem) -> tuple[str, list[tuple[int, int, int]]]:
    """The expanded prompt as words, and the name, offset and length of each item."""
    ids, placed = process_prompt(prompt, items, tokenize)
    return " ".join(WORDS[i] for i in ids), [(e.span.content_hash[0], e.span.offset, e.span.length) for e in placed]


def test_spans_of_a_text() -> None:
    words, found = places("a <i> b <i> c", item(name=1), item(replacement="start pad end", name=2))
    assert words == "a start pad pad break pad end b start pad end c"
    assert found == [(1, 2, 4), (2, 9, 1)]
    _, placed = process_prompt("<i>", [item()], tokenize)
    assert placed[0].span.embedded == [(0, 2), (3, 4)] and placed[0].span.num_embeddings == 3


def test_modalities_that_share_the_token_of_their_embeddings_keep_the_order_of_the_text() -> None:
    film = item("video", "start pad end start pad end", name=9)
    words, found = places("a <v> b <i>", item(replacement="pad", name=1), film)
    assert words == "a start pad end start pad end b pad"
    assert found == [(9, 2, 4), (1, 8, 1)]
    ids = tokenize(words)
    assert places(ids, item(replacement="pad", name=1), film)[1] == found  # the same prompt, expanded by the user


def test_token_ids_are_expanded_unless_they_are_already() -> None:
    one, two = item(name=1), item(replacement="start pad end", name=2)
    words, found = places(tokenize("a <i> b <i>"), one, two)
    assert words == "a start pad pad break pad end b start pad end"
    assert places(tokenize(words), one, two) == (words, found) and found == [(1, 2, 4), (2, 9, 1)]


def test_a_span_whose_other_tokens_depend_on_their_context() -> None:
    def glue(text: str) -> list[int]:
        return [WORDS.index("glued") if i == WORDS.index("break") else i for i in tokenize(text)]

    _, placed = process_prompt("a <i>", [item()], glue)
    assert (placed[0].span.offset, placed[0].span.length, placed[0].span.embedded) == (2, 4, [(0, 2), (3, 4)])


def test_an_item_of_cross_attention_has_no_positions() -> None:
    sound = item(replacement="a")
    _, placed = process_prompt("<i> b", [sound], tokenize)
    assert (placed[0].span.offset, placed[0].span.length) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "num_items", "why"),
    [
        ("a", 1, "0 placeholders '<i>' for 1 image item"),
        ("<i> <i>", 1, "2 placeholders '<i>' for 1 image item"),
        ("<i>", 2, "1 placeholder '<i>' for 2 image items"),
        ("<i> pad", 1, "4 tokens that take an embedding, but its items have 3"),
        ("pad pad <i>", 1, "5 tokens"),
        ([6], 1, "0 placeholders"),
        ([0, 0, 0], 2, "3 placeholders"),
        ([2, 2], 1, "0 placeholders"),
        ([0, 2], 1, "4 tokens"),
    ],
)
def test_wrong_numbers_of_placeholders(prompt: str | list[int], num_items: int, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        process_prompt(prompt, [item()] * num_items, tokenize)
    assert caught.value.parameter == "prompt"


def test_a_placeholder_that_is_no_single_token() -> None:
    strange = item()
    strange.placeholder_id = -1
    assert places("<i>", strange)[1] == [(0, 1, 4)]
    with pytest.raises(RequestError, match="Send the prompt as text"):
        process_prompt([0], [strange], tokenize)
