"""Which method of the engine core's parts answers which command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from mvllm.errors import ConfigError
from mvllm.messages.commands import EngineCommand, name_of

R = TypeVar("R")
P = ParamSpec("P")
_ATTRIBUTE = "_answers"


def answers(kind: type[EngineCommand[R]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks the method that answers the commands of a class. Its arguments are the command's fields, in order."""

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, _ATTRIBUTE, kind)
        return method

    return mark


class Answers:
    """Calls the method that answers a command.

    Args:
        parts: Objects with methods marked by `answers`, each of another command.
    """

    def __init__(self, *parts: object) -> None:
        self._methods: dict[type[EngineCommand[Any]], Callable[..., Any]] = {}
        for part in parts:
            for name, function in vars(type(part)).items():
                if (kind := getattr(function, _ATTRIBUTE, None)) is not None:
                    assert kind not in self._methods, name
                    self._methods[kind] = getattr(part, name)

    def call(self, command: EngineCommand[R]) -> R:
        """The answer to a command.

        Raises:
            ConfigError: No method answers it.
            Exception: What the method raised.
        """
        method = self._methods.get(type(command))
        if method is None:
            known = ", ".join(sorted(map(name_of, self._methods)))
            raise ConfigError(f"The engine core has no answer to {command!r:.80}; it answers {known}.")
        answer: R = method(*msgspec.structs.astuple(command))
        return answer
