"""The tokenizer in the form that the grammar library needs."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mvllm.errors import RequestError
from mvllm.structured_output import llguidance_library

_REGEX_PLACE = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<spaces> *)\^")
_MAX_PATTERN = 100


class Vocabulary(msgspec.Struct, frozen=True):
    """A serializable tokenizer.

    Attributes:
        tokenizer: The tokenizer as JSON, as the `tokenizers` package writes it.
        vocab_size: Tokens in a row of logits. Ids without a token are never allowed.
        end_ids: Tokens that end a sequence.
    """

    tokenizer: str
    vocab_size: int
    end_ids: list[int]

    def build(self) -> Any:
        """Builds the library's LLTokenizer. Takes up to a second for large vocabularies.

        Raises:
            RequestError: The library cannot map the tokens to bytes.
        """
        try:
            return llguidance_library.load().LLTokenizer(
                self.tokenizer, n_vocab=self.vocab_size, eos_token=self.end_ids or None
            )
        except ValueError as e:
            raise RequestError(
                f"structured_outputs does not support this model's tokenizer: {one_line(e)}",
                parameter="structured_outputs",
            ) from e


def one_line(error: object) -> str:
    """A library message on one line, cut to 400 characters. Of a regular expression's the reason and its place."""
    if "regex parse error:\n" in str(error):
        reason = str(error).rpartition("\nerror: ")[2].partition("\n")[0]
        place = _REGEX_PLACE.search(str(error))
        if place is None:
            return f"{reason} (in a regex)"
        return f"{reason}, at character {len(place['spaces']) + 1} of the regex {place['pattern'][:_MAX_PATTERN]!r}"
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return text[:400] + "..." if len(text) > 400 else text
