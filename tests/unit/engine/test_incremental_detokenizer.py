"""Incrementally decoded text equals the text decoded at once, for any tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.engine.frontend.incremental_detokenizer import IncrementalDetokenizer, StopStringFinder
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from tests.unit.engine.tokenizers import KINDS, make_tokenizer

kinds = pytest.mark.parametrize("kind", list(KINDS))


def deltas_of(tokenizer, chunks, prompt=(), **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.append(chunk) for chunk in chunks), detokenizer.finish()]


@kinds
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_the_text_decoded_at_once(kind, data, skip):
    tokenizer = make_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.length - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    chunks, start = [], 0
    for size in sizes:
        chunks.append(ids[start : start + size])
        start += size
    pieces = deltas_of(tokenizer, chunks, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@kinds
@given(data=st.data(), skip=st.booleans())
def test_the_text_is_what_follows_the_text_of_the_prompt(kind, data, skip):
    tokenizer = make_tokenizer(kind)
    ids = st.integers(0, tokenizer.length - 1)
    prompt = data.draw(st.lists(ids, max_size=14))
    output = data.draw(st.lists(ids, max_size=14))
    options = {"skip_special_tokens": skip}
    before = tokenizer.hf.decode(prompt, clean_up_tokenization_spaces=False, **options)
    whole = tokenizer.hf.decode(prompt + output, clean_up_tokenization_spaces=False, **options)
    expected = whole[len(before) :]
    if "\ufffd" in whole or not whole.startswith(before):
        return  # no character or run of bytes is split: see below
    assert "".join(deltas_of(tokenizer, [[i] for i in output], prompt, **options)) == expected
    assert IncrementalDetokenizer(tokenizer, prompt, **options).finish(output) == expected


@pytest.mark.parametrize("kind", ["byte_fallback", "marks_first", "metaspace", "wordpiece", "word_suffix"])
@pytest.mark.parametrize("prompt", ["The cat", "def f(x):"])
def test_the_first_word_keeps_its_space(kind, prompt):
    tokenizer = make_tokenizer(kind)
    before, word = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, "small"))
    pieces = deltas_of(tokenizer, [[i] for i in word], before)
    assert "".join(pieces) == " small"
    assert tokenizer.decode(before) + "".join(pieces) == tokenizer.decode([*before, *word])


@pytest.mark.parametrize("kind", ["byte_fallback", "marks_first", "metaspace"])
def test_without_a_visible_prompt_the_first_word_has_no_space(kind):
    tokenizer = make_tokenizer(kind)
    words = tokenizer.encode("The cat", add_special_tokens=False)
    special = sorted(tokenizer.special_ids)
    for prompt in ([], special, [-1, tokenizer.length + 5]):
        assert "".join(deltas_of(tokenizer, [[i] for i in words], prompt)) == "The cat"
    kept = deltas_of(tokenizer, [[i] for i in words], special, skip_special_tokens=False)
    assert "".join(kept) == " The cat"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "marks_first", "gemma", "qwen2"])
@pytest.mark.parametrize("before", ["", "on the ", "🎉🎉🎉 ", "🎉🎉🎉\n"])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_begins_in_the_prompt_belongs_to_the_text(kind, before, num_bytes):
    tokenizer = make_tokenizer(kind)
    start = tokenizer.encode(before, add_special_tokens=False) if before else []
    bird = [i for i in tokenizer.encode("🦜", add_special_tokens=False) if "\ufffd" in tokenizer.token_text(i)]
    if len(bird) <= num_bytes:
        num_bytes = len(bird) - 1
    rest = [*bird[num_bytes:], *tokenizer.encode("on the", add_special_tokens=False)]
    whole = tokenizer.decode([*start, *bird, *rest[len(bird) - num_bytes :]])
    expected = whole[len(tokenizer.decode(start)) :]
    assert expected.startswith("🦜")
    prompt = [*start, *bird[:num_bytes]]
    assert "".join(deltas_of(tokenizer, [[i] for i in rest], prompt)) == expected
    assert IncrementalDetokenizer(tokenizer, prompt).finish(rest) == expected
    # Bytes of the prompt that never become a character are no text of the output.
    word = tokenizer.encode("mat", add_special_tokens=False)
    for pieces in (deltas_of(tokenizer, [[i] for i in word], prompt), deltas_of(tokenizer, [word], prompt)):
        assert "".join(pieces).strip() == "mat"
    assert deltas_of(tokenizer, [], prompt) == [""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma"])
def test_an_incomplete_character_of_the_output_changes_nothing_of_the_prompt(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode("on the\nü", add_special_tokens=False)
    bird = [i for i in tokenizer.encode("🦜", add_special_tokens=False) if "\ufffd" in tokenizer.token_text(i)]
    assert set("".join(deltas_of(tokenizer, [[bird[0]]], prompt))) == {"\ufffd"}


@kinds
def test_texts_of_tokens_add_up_to_the_text(kind):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("The cat sat on the mat", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).strip() == tokenizer.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == tokenizer.decode(ids).encode()


def test_two_tokens_that_differ_in_the_space_have_different_texts():
    for kind in ("byte_fallback", "marks_first", "metaspace"):
        tokenizer = make_tokenizer(kind)
        vocab = tokenizer.backend.get_vocab()
        pairs = [(i, vocab["▁" + name]) for name, i in vocab.items() if "▁" + name in vocab and "▁" not in name]
        assert pairs
        for plain, spaced in pairs:
            assert tokenizer.token_text(spaced) == " " + tokenizer.token_text(plain)


@kinds
@given(text=st.text(max_size=30))
def test_text_is_returned_token_by_token(kind, text):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    assert "".join(deltas_of(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_split_over_tokens_is_returned_in_one_delta(kind):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("a🦜b")
    pieces = deltas_of(tokenizer, [[i] for i in ids])
    assert "\ufffd" not in "".join(pieces)
    assert any("🦜" in piece for piece in pieces)


def test_plain_text_is_not_held_back():
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("The cat sat on the mat")
    assert deltas_of(tokenizer, [[i] for i in ids])[:-1] == [tokenizer.decode([i]) for i in ids]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("🦜")[:-1]
    assert deltas_of(tokenizer, [ids]) == ["", "\ufffd"]


def test_broken_bytes_do_not_stop_the_stream():
    tokenizer = make_tokenizer("byte_level")
    lone = tokenizer.encode("🦜")[0]
    pieces = deltas_of(tokenizer, [[lone]] * 200)
    assert "".join(pieces) == tokenizer.decode([lone] * 200)
    assert "".join(pieces[:100]).count("\ufffd") > 80


def test_special_tokens_are_skipped_or_kept_as_requested():
    tokenizer = make_tokenizer("byte_level")
    ids = [*tokenizer.encode("Hello"), tokenizer.eos_token_id, *tokenizer.encode(" world")]
    assert "".join(deltas_of(tokenizer, [[i] for i in ids])) == "Hello world"
    kept = deltas_of(tokenizer, [[i] for i in ids], skip_special_tokens=False)
    assert "".join(kept) == "Hello<|end|> world"


def test_a_word_keeps_its_space_after_a_skipped_token():
    tokenizer = make_tokenizer("byte_fallback")
    hello, world = (
        tokenizer.encode("Hello", add_special_tokens=False),
        tokenizer.encode("world", add_special_tokens=False),
    )
    ids = [*hello, tokenizer.eos_token_id, *world]
    assert "".join(deltas_of(tokenizer, [[i] for i in ids])) == "Hello world"


class TestStopStrings:
    def test_the_earliest_match_wins(self):
        assert StopStringFinder(["lazy", "fox"], False).find("the fox is lazy", 0) == ("fox", 4)

    def test_of_two_with_the_same_start_the_shorter_wins(self):
        assert StopStringFinder(["fox is", "fox"], False).find("the fox is lazy", 0) == ("fox", 4)

    def test_the_stop_string_is_kept_if_requested(self):
        assert StopStringFinder(["fox"], True).find("the fox is", 0) == ("fox", 7)

    def test_a_match_within_checked_text_is_skipped(self):
        stops = StopStringFinder(["fox"], False)
        assert stops.find("the fox", num_checked=7) is None
        assert stops.find("the fox, a fox", num_checked=7) == ("fox", 11)
        assert stops.find("the fox", num_checked=6) == ("fox", 4)

    @given(
        text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)
    )
    def test_exactly_the_possible_beginning_of_a_stop_string_is_held_back(self, text, stop):
        held = StopStringFinder(stop, False).num_held_back(text)
        could_begin = [n for n in range(1, len(text) + 1) for s in stop if n < len(s) and s.startswith(text[-n:])]
        assert held == max(could_begin, default=0)


def test_spaces_between_special_tokens_depend_on_the_tokenizer():
    """A Python tokenizer with this setting, like those of speech models."""
    from transformers import PreTrainedTokenizer

    class Words(PreTrainedTokenizer):
        words = ("<s>", "</s>", "one", "two")
        vocab_size = 4

        def get_vocab(self):
            return {word: i for i, word in enumerate(self.words)}

        def _convert_id_to_token(self, index):
            return self.words[index]

        def _convert_token_to_id(self, token):
            return self.words.index(token)

        def _decode(self, token_ids, spaces_between_special_tokens=True, **kwargs):
            text = super()._decode(token_ids, **kwargs)
            return text if spaces_between_special_tokens else text.replace("> <", "><")

    tokenizer = Tokenizer(lambda: Words(bos_token="<s>", eos_token="</s>"))
    ids = [0, 0, 2, 3, 1, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> <s> one two </s> </s>"
    for apart, text in ((True, "<s> <s> one two </s> </s>"), (False, "<s><s> one two </s></s>")):
        settings = {"skip_special_tokens": False, "spaces_between_special_tokens": apart}
        assert tokenizer.decode(ids, **settings) == text
        assert "".join(deltas_of(tokenizer, [ids[:3], ids[3:]], **settings)) == text
