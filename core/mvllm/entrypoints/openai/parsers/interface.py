"""Finds in what a model writes what is meant for others than the reader: calls of tools, and thoughts.

The idea: a parser takes text piece by piece, however it is cut, and gives out parts. A whole answer is one piece, so
what is streamed and what is not cannot differ. What may turn out to be a mark is held back until it is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: The tool's.
        arguments: A JSON object, as text. It is data of the model's making: nobody has looked at it.
    """

    name: str
    arguments: str


Part = Text | Reasoning | ToolCall


class Parser(ABC):
    """Takes one answer apart. Time and memory are linear in its length."""

    needs_special_tokens = False
    """Whether its marks are special tokens, which are left out of text unless asked for."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """The parts that are settled now."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The parts that were held back; called once, at the end."""


class MarkFinder:
    """Looks for a mark in a growing text and holds back what may be its beginning."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text before the mark, as far as it is settled; and what follows the mark, if it was found."""
        text = self._held + text
        self._held = ""
        before, found, after = text.partition(self._mark)
        if found:
            return before, after
        for length in range(min(len(self._mark) - 1, len(text)), 0, -1):
            if text.endswith(self._mark[:length]):
                self._held = text[-length:]
                return text[:-length], None
        return text, None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held
