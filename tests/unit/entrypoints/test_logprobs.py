"""Text offsets of tokens."""

from __future__ import annotations

import pytest

from mvllm.engine.frontend.incremental_detokenizer import IncrementalDetokenizer
from mvllm.engine.frontend.outputs import Logprob
from mvllm.entrypoints.openai.common.logprobs import CompletionLogprobs, TokenFormatter
from tests.unit.engine.tokenizers import make_tokenizer
from tests.unit.entrypoints.builders import TOKENIZER

TEXT = "The cat \U0001fae8 sat 𝄞𝄞 on ﷽ the mat."  # with characters that are split over tokens


@pytest.mark.parametrize("piece", [1, 2, 1000])
def test_offsets_are_correct_after_a_character_that_is_split_over_tokens(piece: int) -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TEXT
    names = TokenFormatter(TOKENIZER, as_ids=False, skip_special=True)
    lists = CompletionLogprobs(names, 0)
    offsets, tokens = [], []
    for i in range(0, len(ids), piece):
        part = lists.format_next(ids[i : i + piece], [None] * len(ids[i : i + piece]))
        offsets += part["text_offset"]
        tokens += part["tokens"]
    split = [token for token in tokens if token.startswith("bytes:\\x")]
    assert len(split) > 8
    for offset, token in zip(offsets, tokens, strict=True):
        if token not in split:
            assert TEXT[offset:].startswith(token)
    assert offsets == sorted(offsets) and offsets[-1] < len(TEXT)


def offsets_with(tokenizer, text, prompt, output, *, skip: bool) -> list[tuple[str, int]]:
    lists = CompletionLogprobs(TokenFormatter(tokenizer, as_ids=False, skip_special=skip), 0, prompt)
    parts = [lists.format_prompt(text, prompt, [None] * len(prompt))] if text is not None else []
    parts += [lists.format_next([i], [None]) for i in output]
    return [pair for part in parts for pair in zip(part["tokens"], part["text_offset"], strict=True)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_fallback", "marks_first", "metaspace", "wordpiece", "gemma", "byte_level"])
@pytest.mark.parametrize("given", [True, False])
def test_offsets_point_into_the_echoed_text(kind: str, skip: bool, given: bool) -> None:
    """Also after special tokens, which the tokenizer adds or the text names, and before which words get a mark."""
    tokenizer = make_tokenizer(kind)
    eos = tokenizer.token_text(tokenizer.eos_token_id)
    text = f"the cat{eos}the cat {eos} sat"
    prompt = tokenizer.encode(text)
    output = tokenizer.encode("on the mat", add_special_tokens=False)
    if not given:
        text = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = text + IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip).finish(output)
    found = offsets_with(tokenizer, text, prompt, output, skip=skip)
    assert [offset for _, offset in found] == sorted(offset for _, offset in found)
    for (token, offset), token_id in zip(found, [*prompt, *output], strict=True):
        if token_id not in tokenizer.special_ids:
            assert whole[offset:].startswith((token, token.lstrip()))
        elif token == eos and (given or not skip):
            assert whole[offset:].startswith(eos)
    assert whole[found[len(prompt)][1] :] == whole[len(text) :] != ""


@pytest.mark.parametrize("prompt", ["", "the cat"])
@pytest.mark.parametrize("kind", ["byte_fallback", "marks_first", "metaspace"])
def test_offsets_of_an_output_are_those_of_its_text(kind: str, prompt: str) -> None:
    tokenizer = make_tokenizer(kind)
    before = [*sorted(tokenizer.special_ids), *(tokenizer.encode(prompt, add_special_tokens=False) if prompt else [])]
    output = tokenizer.encode("sat on the mat", add_special_tokens=False)
    text = IncrementalDetokenizer(tokenizer, before).finish(output)
    assert text == ("" if prompt == "" else " ") + "sat on the mat"
    for at, (token, offset) in enumerate(offsets_with(tokenizer, None, before, output, skip=True)):
        assert text[offset:].startswith(token.lstrip() if at == 0 and not prompt else token)


def test_no_alternative_is_dropped_because_another_one_has_the_same_string() -> None:
    tokenizer = make_tokenizer("marks_first")
    names = ("is", "▁is", "<0xE2>", "<0xE3>", "<0x61>", "a")
    ids = [tokenizer.backend.token_to_id(name) for name in names]
    position = {token_id: Logprob(-1.0 - rank, rank + 1) for rank, token_id in enumerate(ids)}
    lists = CompletionLogprobs(TokenFormatter(tokenizer, as_ids=False, skip_special=True), 6, [ids[0]])
    found = lists.format_next([ids[-1]], [position])
    assert found["tokens"] == ["a"]
    assert list(found["top_logprobs"][0].items()) == [
        ("is", -1.0),
        (" is", -2.0),
        ("bytes:\\xe2", -3.0),
        ("bytes:\\xe3", -4.0),
        (f"token_id:{ids[4]}", -5.0),  # the byte of "a": the sampled token has the string
        ("a", -6.0),
    ]
