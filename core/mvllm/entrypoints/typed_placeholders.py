"""Placeholders that users type in a conversation stay text.

A chat template writes a placeholder for each image, and users may write the same characters: `Is <image> a token?`.
Only those of the template stand for images. So the others are cut before rendering, by digits that nobody can guess,
and each piece of the rendered prompt is tokenized alone:

    message      What does <image> mean?
    rendered     USER: <image> What does <CUTimage> mean? ASSISTANT:
    tokenized    "USER: <image> What does <"   "image> mean? ASSISTANT:"

A text that ends with the beginning of a placeholder, which another text may continue, is cut there, too. Such a cut is
only used if it is needed: `2 <` is tokenized as in any other conversation.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from mvllm.entrypoints.chat_template import as_object
from mvllm.errors import RequestError

_NUM_DIGITS = 32
"""Digits of a cut: filters of templates, such as `upper` and `tojson`, leave them as they are."""
_PART = 8
"""Digits that are recognized where a template has shortened a text."""


class TypedPlaceholders:
    """Cuts placeholders in the texts of one conversation.

    Args:
        placeholders: What stands for an item in a prompt, and the tokens that take embeddings.
        max_pieces: Most pieces of a prompt: each is at least one token.
    """

    def __init__(self, placeholders: Iterable[str], max_pieces: int) -> None:
        found = sorted({each for each in placeholders if len(each) > 1}, key=len)
        # Where `<image>x` is, `<image>` is cut.
        self._placeholders = [each for i, each in enumerate(found) if not each.startswith(tuple(found[:i]))]
        # One that begins inside of another one is found, too.
        self._pattern = re.compile("|".join(f"{re.escape(p[0])}(?={re.escape(p[1:])})" for p in self._placeholders))
        self._endings = {each[:length] for each in self._placeholders for length in range(1, len(each))}
        self._longest = max(map(len, self._placeholders), default=1)
        self._cut, self._cut_at_end = (f"{secrets.randbelow(10**_NUM_DIGITS):0{_NUM_DIGITS}}" for _ in range(2))
        self._max_pieces = max_pieces
        self._num_cuts = self._num_cuts_at_end = 0

    def cut_messages(self, messages: Any) -> Any:
        """As `cut`. Texts of JSON in the arguments of tool calls are cut as templates see them: as objects."""
        if not isinstance(messages, list | tuple):
            return self.cut(messages)
        return self.cut([self._with_cut_arguments(message) for message in messages])

    def cut(self, value: Any) -> Any:
        """A text, or a structure of JSON with texts, in which they are cut. What has none is equal to the argument.

        Raises:
            RequestError: There are too many, or the structure is nested too deeply.
        """
        try:
            return self._cut_value(value)
        except RecursionError:
            raise RequestError("The conversation is nested too deeply.", parameter="messages") from None

    def cut_prompt(self, rendered: str) -> tuple[str, str | None]:
        """The rendered conversation, and the text at which to cut it, see `TextPrompt`; None if nothing is cut.

        Raises:
            RequestError: The template has changed a cut, so that it cannot be found.
        """
        if self._num_cuts_at_end:
            rendered = self._with_cuts_at_end(rendered)
        if not self._num_cuts and not self._num_cuts_at_end:
            return rendered, None
        rest = rendered.replace(self._cut, "")
        for cut in (self._cut, self._cut_at_end):
            if cut[:_PART] in rest or cut[-_PART:] in rest:
                raise RequestError(
                    "The conversation has a text like the placeholder of an item, and the chat template shortens this "
                    f"text. Send it without {', '.join(self._placeholders)}.",
                    parameter="messages",
                )
        return rendered, self._cut if len(rest) < len(rendered) else None

    def _cut_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, Mapping):
            return {
                self._cut_text(key) if isinstance(key, str) else key: self._cut_value(each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._cut_value(each) for each in value]
        return value

    def _cut_text(self, text: str) -> str:
        if found := sum(map(text.count, self._placeholders)):
            self._num_cuts += found
            if self._num_cuts >= self._max_pieces:  # before texts grow by the cuts
                raise RequestError(
                    f"The conversation has more than {self._max_pieces} texts like the placeholder of an item, which "
                    f"are at least as many tokens, but prompt and output together may have {self._max_pieces} "
                    "(max_model_len). Shorten the conversation.",
                    parameter="messages",
                )
            text = self._pattern.sub(lambda match: match.group() + self._cut, text)
        if any(text[-length:] in self._endings for length in range(1, min(self._longest, len(text) + 1))):
            self._num_cuts_at_end += 1
            text += self._cut_at_end
        return text

    def _with_cut_arguments(self, message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list | tuple):
            return message
        return {**message, "tool_calls": [self._call_with_cut_arguments(call) for call in calls]}

    def _call_with_cut_arguments(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(text, str):
            return call
        arguments = as_object(text)
        if isinstance(arguments, str) or (cut := self.cut(arguments)) == arguments:
            return call
        return {**call, "function": {**function, "arguments": json.dumps(cut)}}

    def _with_cuts_at_end(self, rendered: str) -> str:
        """The text with the cuts at the ends of texts that are inside of a placeholder, and without the others."""
        parts: Sequence[str] = rendered.split(self._cut_at_end)
        joined = "".join(parts)
        ends = list(accumulate(map(len, parts[:-1])))
        inside: set[int] = set()
        for match in self._pattern.finditer(joined):
            longest = max(len(p) for p in self._placeholders if joined.startswith(p, match.start()))
            first, last = bisect_right(ends, match.start()), bisect_left(ends, match.start() + longest)
            inside.update(range(first, last))
        cuts = [self._cut if i in inside else "" for i in range(len(ends))]
        return "".join(piece for pair in zip(parts, [*cuts, ""], strict=True) for piece in pair)
