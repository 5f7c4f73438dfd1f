"""Incremental detokenization: turns a growing list of token ids into pieces of text that never change.

Only a *window* is decoded: the tokens whose text has not been returned yet, preceded by the tokens of the previous
window as context (many decoders treat the first token of a text differently). The text of the window is returned as
soon as no later token can change it:

    token ids   ... | context | pending ............ | (future)
    decode            "wor"     "ld caf" + half an é     wait: the text ends in U+FFFD
    decode            "wor"     "ld café"                return "ld café"; pending becomes context

A window waits while it ends in an incomplete character (U+FFFD), or in raw-byte tokens, which become text or several
U+FFFD only when the run of bytes ends. At the end of the sequence the rest is returned as it is.

The first context is the end of the prompt, so that the text is what follows the prompt's text: decoders of the
SentencePiece kind would drop the space of the first word. A character that begins in the prompt and ends in the output
belongs to the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.tokenizer.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_LONG_WINDOW = 8
"""An incomplete character spans at most three tokens, so a longer window that ends in U+FFFD also has complete ones."""

_PROMPT_TOKENS = 8
"""Tokens of the prompt that are the first context. One is enough for most decoders, four for a split character."""


class IncrementalDetokenizer:
    """Decodes one sequence in pieces.

    Their concatenation is what the text of prompt and sequence has after that of the prompt, or the text of the
    sequence without a prompt.

    Args:
        tokenizer: Decodes the windows.
        prompt_token_ids: The tokens before the sequence. Ids that the tokenizer does not have are ignored.
        skip_special_tokens, spaces_between_special_tokens: As in SamplingParams.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt_token_ids  # empty once it has been read
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_ids = tokenizer.byte_ids
        self._needs_context = not tokenizer.decodes_bytewise
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._prompt_part = ""  # the text of pending tokens that belong to the prompt

    def append(self, token_ids: Sequence[int]) -> str:
        """Appends tokens. Returns the text that no later token can change, often empty."""
        if self._prompt:
            self._read_prompt()
        if not self._needs_context and not self._pending:  # most tokens are whole characters
            text = "".join([self._tokenizer.token_text(i) for i in token_ids if i not in self._skipped])
            if _INCOMPLETE not in text:
                return text
        self._add_pending(token_ids)
        if not self._pending or self._pending[-1] in self._byte_ids:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return self._emit_long_window() if len(self._pending) > _LONG_WINDOW else ""
        return self._emit_window(text)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Appends the last tokens. Returns the rest of the text, with incomplete characters as U+FFFD."""
        if self._prompt:
            self._read_prompt()
        self._add_pending(token_ids)
        if not self._pending:
            return ""
        piece = self._piece_of(self._decode(self._context + self._pending))
        self._pending = []
        return piece

    def _add_pending(self, token_ids: Sequence[int]) -> None:
        self._pending += [i for i in token_ids if i not in self._skipped] if self._skipped else token_ids

    def _read_prompt(self) -> None:
        """Makes the last tokens of the prompt the context; those of an incomplete character at its end are pending."""
        tail = self._last_prompt_tokens()
        self._prompt = ()
        if not tail or not (self._needs_context or self._tokenizer.token_text(tail[-1]).endswith(_INCOMPLETE)):
            return
        text = self._decode(tail)
        size, before = len(tail), text
        while before.endswith(_INCOMPLETE) and len(tail) - size < 4:
            size -= 1
            before = self._decode(tail[:size])
        if before.endswith(_INCOMPLETE):  # the prompt ends in bytes that are no characters
            size, before = len(tail), text
        self._pending = tail[size:]
        if self._needs_context:
            self._context, self._context_text = tail[:size], before
        self._prompt_part = text[len(before) :]

    def _last_prompt_tokens(self) -> list[int]:
        """The last tokens of the prompt that have text, from the beginning of a character on."""
        tail: list[int] = []
        for token_id in reversed(self._prompt):
            if token_id in self._skipped or not 0 <= token_id < self._tokenizer.length:
                continue
            tail.append(token_id)
            if len(tail) >= _PROMPT_TOKENS and not self._continues_character(token_id):
                break
        return tail[::-1]

    def _continues_character(self, token_id: int) -> bool:
        return token_id in self._byte_ids and self._tokenizer.token_bytes(token_id)[0] & 0xC0 == 0x80

    def _piece_of(self, text: str) -> str:
        """The window's part of `text` (context and window), without what belongs to the prompt."""
        if text.startswith(self._context_text):
            piece = text[len(self._context_text) :]
        else:  # bytes of the context and of the window, which are no character together
            piece = self._decode(self._pending)
        if self._prompt_part:
            pairs = enumerate(zip(piece, self._prompt_part, strict=False))
            common = min(len(piece), len(self._prompt_part))
            piece = piece[next((i for i, (mine, prompts) in pairs if mine != prompts), common) :]
            self._prompt_part = ""
        return piece

    def _emit_window(self, text: str) -> str:
        """Returns the window's part of `text` (context and window), and makes the window the next context."""
        piece = self._piece_of(text)
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
                piece = self._piece_of(text)
                self._pending = back
                return piece
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
