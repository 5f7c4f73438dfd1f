"""Converts the texts in `bad_words` of a request to token ids."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import RequestError
from mvllm.messages.sampling_param_checks import MAX_BAD_WORD_TOKENS


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokenizes each word as it is within a text, and as after a space.

    The second tokenization is omitted if it ends with the first one, which then blocks it as well.

    Raises:
        RequestError: A word has no tokens, or all words together have too many.
    """
    spaced = [" " + word.lstrip() for word in words]
    encoded = tokenizer.encode_within([*words, *spaced])
    found: list[list[int]] = []
    for word, plain, after_space in zip(words, encoded[: len(words)], encoded[len(words) :], strict=True):
        if not plain:
            raise RequestError(f"bad_words: {ascii(word)[:60]} has no token ids.", parameter="bad_words")
        found.append(plain)
        if after_space[-len(plain) :] != plain:
            found.append(after_space)
    if sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words may have {MAX_BAD_WORD_TOKENS} tokens, all words together; these have {sum(map(len, found))}.",
            parameter="bad_words",
        )
    return found
