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
        return _as_id(token_id) if self._as_ids else self._tokenizer.token_text(token_id)

    def format_key(self, token_id: int) -> str:
        """The token as a string; bytes that are a part of a character as `bytes:\\xe2\\x80`, as OpenAI writes them."""
        text = self.format(token_id)
        if "\ufffd" in text:
            data = self._tokenizer.token_bytes(token_id)
            if data != text.encode():
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text

    def is_visible(self, token_id: int) -> bool:
        """Whether the token adds to the text of the response."""
        return token_id not in self._skipped_ids

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token."""
        return token_id in self._tokenizer.special_ids

    def text_bytes(self, token_id: int, *, is_first: bool) -> bytes:
        """The bytes that a visible token adds to the text; see `Tokenizer.token_bytes`."""
        return self._tokenizer.token_bytes(token_id, is_first=is_first)

    def byte_values(self, token_id: int) -> list[int]:
        """The token's bytes, which may be part of a character."""
        return list(self._tokenizer.token_bytes(token_id))


class CompletionLogprobs:
    """Builds the four lists of one choice, output by output.

    Args:
        formatter: Formats tokens.
        num_top: Alternatives to report for each token.
        prompt_token_ids: The tokens before the choice.
    """

    def __init__(self, formatter: TokenFormatter, num_top: int, prompt_token_ids: Sequence[int] = ()) -> None:
        self._formatter = formatter
        self._num_top = num_top
        self._offset = 0
        self._is_first = not any(map(formatter.is_visible, prompt_token_ids))
        # A character may be split over tokens; it counts at the token with its last byte.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def format_next(self, token_ids: Sequence[int], positions: Iterable[PositionLogprobMap | None]) -> dict[str, Any]:
        """The lists of the next tokens of the output."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._formatter.is_visible(token_id):
                self._offset += len(self._next_text(token_id))
        return self._lists(token_ids, positions, offsets)

    def format_prompt(
        self, text: str, token_ids: Sequence[int], positions: Iterable[PositionLogprobMap | None]
    ) -> dict[str, Any]:
        """The lists of the tokens of an echoed prompt. The first token has no log-probability: null.

        Args:
            text: The echoed text. It may differ from that of the tokens: in special tokens, and in spaces before words.
        """
        self._is_first = True
        offsets = []
        for token_id in token_ids:
            start, self._offset = self._place_in(text, token_id)
            offsets.append(start)
        self._offset = len(text)
        self._characters.reset()
        self._is_first = self._is_first and not text
        return self._lists(token_ids, positions, offsets)

    def _next_text(self, token_id: int) -> str:
        """The characters that a token completes."""
        data = self._formatter.text_bytes(token_id, is_first=self._is_first)
        self._is_first = False
        return self._characters.decode(data)

    def _place_in(self, text: str, token_id: int) -> tuple[int, int]:
        """Where the next token of a prompt begins and ends in its text."""
        start = self._offset
        special = self._formatter.is_special(token_id)
        piece = self._formatter.text_bytes(token_id, is_first=False).decode() if special else self._next_text(token_id)
        for at, found in ((start, piece), (start, piece.lstrip()), (_skip_space(text, start), piece.lstrip())):
            if found and text.startswith(found, at):
                return at, at + len(found)
        added = special or not piece.strip()  # by the tokenizer, and not in the text
        return start, start if added else min(start + len(piece), len(text))

    def _lists(
        self, token_ids: Sequence[int], positions: Iterable[PositionLogprobMap | None], offsets: list[int]
    ) -> dict[str, Any]:
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=False):
            tokens.append(self._formatter.format_key(token_id))
            values.append(None if position is None else _finite(position[token_id].logprob))
            tops.append(None if position is None else self._top(token_id, position))
        return {
            "text_offset": offsets[: len(tokens)],
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _top(self, token_id: int, position: PositionLogprobMap) -> dict[str, float]:
        """The most probable tokens and the token itself. Another one with the same string is `token_id:<id>`."""
        own = self._formatter.format_key(token_id)
        top: dict[str, float] = {}
        for other, entry in _most_probable(position, self._num_top):
            key = own if other == token_id else self._formatter.format_key(other)
            if other != token_id and (key == own or key in top):
                key = _as_id(other)
            top[key] = _finite(entry.logprob)
        top.setdefault(own, _finite(position[token_id].logprob))
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


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _skip_space(text: str, start: int) -> int:
    """The index of the next character at or after `start` that is no white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start
