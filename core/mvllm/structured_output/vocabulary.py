"""What the grammar library must know about tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.errors import RequestError
from mvllm.structured_output import llguidance_library


class Vocabulary(msgspec.Struct, frozen=True):
    """A tokenizer in a form that travels.

    Attributes:
        tokenizer: It as JSON, as the `tokenizers` package writes it.
        vocab_size: Tokens in a row of logits; those that no token has are never allowed.
        end_ids: Tokens that end a sequence.
    """

    tokenizer: str
    vocab_size: int
    end_ids: list[int]

    def build(self) -> Any:
        """The library's own object. Takes up to a second for large vocabularies.

        Raises:
            RequestError: The library cannot tell which bytes the tokens stand for.
        """
        try:
            return llguidance_library.load().LLTokenizer(
                self.tokenizer, n_vocab=self.vocab_size, eos_token=self.end_ids or None
            )
        except ValueError as e:
            raise RequestError(
                f"structured_outputs cannot be had with this model's tokenizer: {one_line(e)}",
                parameter="structured_outputs",
            ) from e


def one_line(error: object) -> str:
    """A message of the llguidance_library, without its line breaks and of a length to show."""
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return text[:400] + "..." if len(text) > 400 else text
