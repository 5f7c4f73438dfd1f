"""Log-probabilities in the shapes that clients read: four parallel lists (completions), a list of objects (chat)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from mvllm.engine.frontend.outputs import Logprob, PositionLogprobMap
from mvllm.engine.tokenizer.tokenizer import Tokenizer


class TokenFormatter:
    """How tokens are called in answers.

    Args:
        tokenizer: The model's.
        as_ids: Call them `token_id:<id>`, which is never ambiguous.
        skip_special: Whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._left_out = tokenizer.special_ids if skip_special else frozenset()

    def format(self, token_id: int) -> str:
        """What the token is called."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that it adds to the text; none where it is left out."""
        return b"" if token_id in self._left_out else token_bytes(self._tokenizer, token_id)

    def byte_values(self, token_id: int) -> list[int]:
        """The bytes that it stands for, which may be a part of a character."""
        return list(token_bytes(self._tokenizer, token_id))


class CompletionLogprobs:
    """The four lists of one choice, piece by piece.

    Args:
        names: How tokens are called.
        num_top: Alternatives to report for each token.
    """

    def __init__(self, names: TokenFormatter, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = 0
        # A character may be split over tokens, and counts where its last byte comes.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def format_next(self, token_ids: Sequence[int], positions: Iterable[PositionLogprobMap | None]) -> dict[str, Any]:
        """The lists for the next tokens; a token without a position (the first of a prompt) has null."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=False):
            token = self._names.format(token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._names.text_bytes(token_id)))
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(position[token_id].logprob))
            tops.append(self._top(token_id, position))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _top(self, token_id: int, position: PositionLogprobMap) -> dict[str, float]:
        """The most probable tokens, and the token itself. Of tokens with one name, the most probable counts."""
        top: dict[str, float] = {}
        for other, entry in _most_probable(position, self._num_top):
            top.setdefault(self._names.format(other), _finite(entry.logprob))
        top.setdefault(self._names.format(token_id), _finite(position[token_id].logprob))
        return top


def chat_logprobs(
    names: TokenFormatter, token_ids: Sequence[int], positions: Sequence[PositionLogprobMap], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a chat choice, or of a piece of one."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=False):
        entry = _chat_entry(names, token_id, position[token_id])
        entry["top_logprobs"] = [_chat_entry(names, i, lp) for i, lp in _most_probable(position, num_top)]
        content.append(entry)
    return {"content": content, "refusal": None}


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
    """The bytes that a token stands for."""
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


def _chat_entry(names: TokenFormatter, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {"token": names.format(token_id), "logprob": _finite(entry.logprob), "bytes": names.byte_values(token_id)}


def _finite(value: float) -> float:
    """JSON has no infinity; clients expect a number that no token beats."""
    return max(value, -9999.0)


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, and the others as what follows U+0100, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
