"""Thoughts between `<think>` and `</think>`, before the answer.

Many templates write the opening mark into the prompt, so the prompt says whether an answer begins within thoughts.
"""

from __future__ import annotations

from mvllm.entrypoints.openai.parsers.interface import MarkFinder, Parser, Part, Reasoning, Text

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """The marks of Qwen3, DeepSeek-R1, and those after them.

    Args:
        prompt: What the answer follows.
        always: Whether an answer begins with thoughts even where neither prompt nor answer opens them.
    """

    def __init__(self, prompt: str, *, always: bool) -> None:
        end = prompt.rstrip()
        self._thinks = end.endswith(_OPEN) or (always and not end.endswith(_CLOSE))
        self._begun = False
        self._done = False
        self._start = ""
        self._close = MarkFinder(_CLOSE)
        self._space = True  # at the beginning of the answer's text

    def feed(self, text: str) -> list[Part]:
        if not self._begun:
            self._start += text
            start = self._start.lstrip()
            if start.startswith(_OPEN):
                text, self._thinks = start[len(_OPEN) :], True
            elif _OPEN.startswith(start):
                return []
            else:
                text = self._start
            self._begun, self._start = True, ""
        if not self._thinks:
            return [Text(text)] if text else []
        if self._done:
            return self._answer(text)
        thought, answer = self._close.feed(text)
        parts: list[Part] = [Reasoning(thought)] if thought else []
        if answer is not None:
            self._done = True
            parts += self._answer(answer)
        return parts

    def finish(self) -> list[Part]:
        if not self._begun:
            return [Text(self._start)] if self._start else []
        held = self._close.finish()
        return [Reasoning(held)] if held else []

    def _answer(self, text: str) -> list[Part]:
        if self._space:
            text = text.lstrip("\n")
            self._space = not text
        return [Text(text)] if text else []


def make_qwen3(prompt: str) -> Parser:
    """Thinks where prompt or answer says so."""
    return ThinkParser(prompt, always=False)


def make_deepseek_r1(prompt: str) -> Parser:
    """Thinks unless the prompt has closed the thoughts."""
    return ThinkParser(prompt, always=True)
