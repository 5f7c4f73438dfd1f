"""Incremental detokenization: turns a growing list of token ids into pieces of text that never change.

Only a *window* is decoded: the tokens whose text has not been returned yet, preceded by the tokens of the previous
window as context (many decoders treat the first token of a text differently). The text of the window is returned as
soon as no later token can change it:

    token ids   ... | context | pending ............ | (future)
    decode            "wor"     "ld caf" + half an é     wait: the text ends in U+FFFD
    decode            "wor"     "ld café"                return "ld café"; pending becomes context

A window waits while it ends in an incomplete character (U+FFFD), or in raw-byte tokens, which become text or several
U+FFFD only when the run of bytes ends. At the end of the sequence the rest is returned as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.tokenizer.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_LONG_WINDOW = 8
"""An incomplete character spans at most three tokens, so a longer window that ends in U+FFFD also has complete ones."""


class IncrementalDetokenizer:
    """Decodes one sequence in pieces. Their concatenation equals `tokenizer.decode` of all token ids.

    Args:
        tokenizer: Decodes the windows.
        skip_special_tokens, spaces_between_special_tokens: As in SamplingParams.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_ids = tokenizer.byte_ids
        self._needs_context = not tokenizer.decodes_bytewise
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def append(self, token_ids: Sequence[int]) -> str:
        """Appends tokens. Returns the text that no later token can change, often empty."""
        if not self._needs_context and not self._pending:  # most tokens are whole characters
            text = "".join([self._tokenizer.token_text(i) for i in token_ids if i not in self._skipped])
            if _INCOMPLETE not in text:
                return text
        self._pending += [i for i in token_ids if i not in self._skipped] if self._skipped else token_ids
        if not self._pending or self._pending[-1] in self._byte_ids:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return self._emit_long_window() if len(self._pending) > _LONG_WINDOW else ""
        return self._emit_window(text)

    def finish(self) -> str:
        """Returns the rest of the text, with incomplete characters as U+FFFD."""
        return self._emit_window(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit_window(self, text: str) -> str:
        """Returns the window's part of `text` (context and window), and makes the window the next context."""
        piece = text[len(self._context_text) :]
        if self._needs_context:
            text = self._decode(self._pending)
            # Tokens without text are no context by themselves.
            self._context = self._pending if text else self._context + self._pending
            self._context_text = text or self._decode(self._context)
        self._pending = []
        return piece

    def _emit_long_window(self) -> str:
        """Returns the front of a long window that ends in U+FFFD (a model that emits invalid bytes).

        A split is valid if decoding both parts separately equals decoding them together: no character spans it.
        """
        if not self._tokenizer.decodes_bytewise:
            return ""
        for keep in (3, 4, 5, 6):
            front, back = self._pending[:-keep], self._pending[-keep:]
            text = self._decode(front)
            if text + self._decode(back) == self._decode(self._pending):
                self._pending = back
                return text
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, spaces_between_special_tokens=self._spaces
        )


class StopStringFinder:
    """Finds the first stop string in a growing text, and the end of the text that may be the start of one.

    Args:
        stop: The stop strings, none of them empty.
        include: Keep the stop string in the text.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = stop
        self._include = include
        # A character that occurs only at the end of stop strings cannot be in a proper prefix of one.
        self._inner = frozenset("".join(text[:-1] for text in stop))

    def find(self, text: str, num_checked: int) -> tuple[str, int] | None:
        """The stop string that begins first among those that end after `num_checked` characters.

        Returns:
            The stop string and the length to which `text` must be cut, or None.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_checked - len(stop) + 1))
            if start >= 0 and (best is None or (start, len(stop)) < best[:2]):
                best = (start, len(stop), stop)
        if best is None:
            return None
        start, length, stop = best
        return stop, start + length if self._include else start

    def num_held_back(self, text: str) -> int:
        """Number of characters at the end of `text` that may be the beginning of a stop string."""
        if not text or text[-1] not in self._inner:
            return 0
        return max(self._overlap(text, stop) for stop in self._stop)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return len(text) - start
            start = text.find(stop[0], start + 1)
        return 0
