"""A prompt or several, and a setting for all of them or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType


def as_prompt_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """A list of prompts; a single prompt becomes a list of one."""
    return [cast(PromptType, prompts)] if _is_single_prompt(prompts) else list(cast(Iterable[PromptType], prompts))


def _is_single_prompt(prompts: object) -> bool:
    if isinstance(prompts, str | Mapping | range):
        return True
    if isinstance(prompts, list | tuple):
        # Scalars of array libraries have no dimension; a prompt that is an array has one.
        is_array = bool(prompts) and getattr(prompts[0], "ndim", 0) > 0
        return bool(prompts) and not is_array and not isinstance(prompts[0], str | Mapping | list | tuple | range)
    return getattr(prompts, "ndim", 2) < 2 or not isinstance(prompts, Iterable)


def one_per_prompt(value: Any, count: int, name: str) -> Any:
    """`value` for each of `count` prompts; a list must have one entry per prompt."""
    if isinstance(value, list | tuple):
        if len(value) != count:
            raise RequestError(
                f"{name} is a list of {len(value)} for {count} prompts; give one, or one per prompt.", parameter=name
            )
        return value
    return [value] * count
