"""Turns a growing list of token ids into a growing text that is never taken back.

The idea: decode only a *window*, the tokens whose text has not been given out yet, preceded by the tokens of the window
before (many decoders treat the first token differently, so the window must not begin a text). The window is given out
as soon as nothing that follows can change it:

    token ids   ... | context | pending ............ | (future)
    decode            "wor"     "ld caf" + half an é     not yet: the text ends in U+FFFD
    decode            "wor"     "ld café"                give out "ld café"; pending becomes context

Two things make a window wait: an incomplete character at its end (U+FFFD), and a run of raw-byte tokens, which becomes
text or a row of U+FFFD only when the run ends. Whatever still waits when the sequence ends is given out as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.tokenizer.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_LONG_WINDOW = 8
"""An incomplete character spans at most three tokens; a longer window that ends in U+FFFD holds settled text too."""


class IncrementalDetokenizer:
    """Text of one sequence, piece by piece. The pieces add up to `tokenizer.decode` of all token ids.

    Args:
        tokenizer: Decodes.
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
        """Takes the next tokens and returns the text that is settled now, often empty."""
        self._pending += [i for i in token_ids if i not in self._skipped] if self._skipped else token_ids
        if not self._pending or self._pending[-1] in self._byte_ids:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return self._emit_long_window() if len(self._pending) > _LONG_WINDOW else ""
        return self._emit_window(text)

    def finish(self) -> str:
        """The text that was still waiting, with incomplete characters as U+FFFD."""
        return self._emit_window(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit_window(self, text: str) -> str:
        """Gives out the window, whose text after the context is `text`, and makes it the context of the next."""
        piece = text[len(self._context_text) :]
        if self._needs_context:
            shown = self._decode(self._pending)
            # Tokens without text of their own say nothing about what stands before the next window.
            self._context = self._pending if shown else self._context + self._pending
            self._context_text = shown or self._decode(self._context)
        self._pending = []
        return piece

    def _emit_long_window(self) -> str:
        """Gives out the front of a long window that ends in U+FFFD (a model that emits broken bytes).

        A cut is safe where decoding the two sides apart equals decoding them together: no character spans it.
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
    """Finds the first stop string in a growing text, and holds back what may turn out to be the beginning of one.

    Args:
        stop: The stop strings, none of them empty.
        include: Keep the stop string in the text.
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = stop
        self._include = include
        # A character that only ends stop strings cannot be part of a beginning of one.
        self._inner = frozenset("".join(text[:-1] for text in stop))

    def find(self, text: str, settled: int) -> tuple[str, int] | None:
        """The stop string that begins first among those that end beyond `settled` characters.

        Returns:
            The stop string and the length to which `text` is to be cut, or None.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, settled - len(stop) + 1))
            if start >= 0 and (best is None or (start, len(stop)) < best[:2]):
                best = (start, len(stop), stop)
        if best is None:
            return None
        start, length, stop = best
        return stop, start + length if self._include else start

    def num_held_back(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a stop string."""
        if not text or text[-1] not in self._inner:
            return 0
        return max(self._overlap(text, stop) for stop in self._stop)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return len(text) - start
            start = text.find(stop[0], start + 1)
        return 0
