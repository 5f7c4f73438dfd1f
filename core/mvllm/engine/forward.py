"""`forward`: a method of an engine that is one of a part of it, under the same name and with its documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Engine = TypeVar("Engine")
Part = TypeVar("Part")


def forward(
    part: Callable[[Engine], Part], method: Callable[Concatenate[Part, P], R]
) -> Callable[Concatenate[Engine, P], R]:
    """A method that calls `method` of a part.

    Args:
        part: Returns the part of an engine.
        method: A function of the part's class.
    """

    @wraps(method)
    def call(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(part(self), *args, **kwargs)

    return call
