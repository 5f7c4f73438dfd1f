"""Log-probabilities in OpenAI's formats: four parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from mvllm.engine.frontend.outputs import Logprob, PositionLogprobMap
from mvllm.engine.tokenizer.tokenizer import Tokenizer


class TokenFormatter:
    """Formats tokens for responses.

    Args:
        tokenizer: The model's.
        as_ids: Format tokens as `token_id:<id>`, which is unambiguous.
        skip_special: Whether the text of the response omits special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skipped_ids = tokenizer.special_ids if skip_special else frozenset()

    def format(self, token_id: int) -> str:
        """The token as a string."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; none if it is skipped."""
        return b"" if token_id in self._skipped_ids else token_bytes(self._tokenizer, token_id)

    def byte_values(self, token_id: int) -> list[int]:
        """The token's bytes, which may be part of a character."""
        return list(token_bytes(self._tokenizer, token_id))


class CompletionLogprobs:
    """Builds the four lists of one choice, output by output.

    Args:
        formatter: Formats tokens.
        num_top: Alternatives to report for each token.
    """

    def __init__(self, formatter: TokenFormatter, num_top: int) -> None:
        self._formatter = formatter
        self._num_top = num_top
        self._offset = 0
        # A character may be split over tokens; it counts at the token with its last byte.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def format_next(self, token_ids: Sequence[int], positions: Iterable[PositionLogprobMap | None]) -> dict[str, Any]:
        """The lists of the next tokens. The first token of a prompt has no log-probability: null."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=False):
            token = self._formatter.format(token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._formatter.text_bytes(token_id)))
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(position[token_id].logprob))
            tops.append(self._top(token_id, position))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _top(self, token_id: int, position: PositionLogprobMap) -> dict[str, float]:
        """The most probable tokens and the token itself; of tokens with the same string, the most probable."""
        top: dict[str, float] = {}
        for other, entry in _most_probable(position, self._num_top):
            top.setdefault(self._formatter.format(other), _finite(entry.logprob))
        top.setdefault(self._formatter.format(token_id), _finite(position[token_id].logprob))
        return top


def chat_logprobs(
    formatter: TokenFormatter, token_ids: Sequence[int], positions: Sequence[PositionLogprobMap], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a chat choice, or of a chunk of one."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=False):
        entry = _chat_entry(formatter, token_id, position[token_id])
        entry["top_logprobs"] = [_chat_entry(formatter, i, lp) for i, lp in _most_probable(position, num_top)]
        content.append(entry)
    return {"content": content, "refusal": None}


def conditional_logprobs(values: Sequence[float]) -> list[float]:
    """The `conditional_logprobs` extension: of each token of a guided choice, the log-probability without guidance."""
    return [_finite(value) for value in values]


def prompt_logprobs(positions: Sequence[PositionLogprobMap | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension: for each prompt token, token id to log-probability, rank and text."""
    return [
        None
        if position is None
        else {
            str(i): {"logprob": _finite(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for i, lp in position.items()
        }
        for position in positions
    ]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token."""
    if token_id in tokenizer.special_ids:
        return tokenizer.token_text(token_id).encode()
    piece = tokenizer.token_name(token_id)
    if piece is not None:
        if tokenizer.decodes_bytewise and all(c in _BYTE_OF_CHARACTER for c in piece):
            return bytes(_BYTE_OF_CHARACTER[c] for c in piece)
        if token_id in tokenizer.byte_ids:
            return bytes([int(piece[3:5], 16)])
    return tokenizer.token_text(token_id).encode()


def _most_probable(position: PositionLogprobMap, count: int) -> Iterable[tuple[int, Logprob]]:
    ranked = [(i, lp) for i, lp in position.items() if lp.rank is not None and lp.rank <= count]
    return sorted(ranked, key=_rank)


def _rank(entry: tuple[int, Logprob]) -> int:
    return entry[1].rank or 0


def _chat_entry(formatter: TokenFormatter, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": formatter.format(token_id),
        "logprob": _finite(entry.logprob),
        "bytes": formatter.byte_values(token_id),
    }


def _finite(value: float) -> float:
    """`value`, or -9999.0 for minus infinity, which JSON does not have."""
    return max(value, -9999.0)


def _bytes_of_characters() -> dict[str, int]:
    """The bytes of the characters of byte-level vocabularies: printable ones are themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
