"""Keyword arguments of a dataclass of settings: names, aliases, keywords of other engines, and misspellings."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mvllm import plugin_groups
from mvllm.config.foreign_keywords import engine_keywords, translate
from mvllm.config.option import Option, options_of
from mvllm.errors import ConfigError

_T = TypeVar("_T")

_SHORTEST_FORM = 3  # letters


def accepts_every_name(cls: type[_T]) -> type[_T]:
    """A class decorator: the constructor of a dataclass of settings accepts what `settings_by_name` accepts."""
    declared = cls.__init__

    @functools.wraps(declared)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        options = options_of(cls)
        self._given_names = {option.name: alias for option in options for alias in option.aliases if alias in kwargs}
        declared(self, *args, **settings_by_name(options, kwargs))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def settings_by_name(options: Iterable[Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments under the names of the settings. Keywords of other engines are translated or dropped.

    Raises:
        ConfigError: A keyword does not exist (a similar one is named), or a setting is given under two names with
            different values.
    """
    if given.keys() <= (declared := {option.name for option in options}):
        return dict(given)
    names = dict.fromkeys(declared) | {alias: option.name for option in options for alias in option.aliases}
    found: dict[str, Any] = {}
    for keyword, value in translate(given, engine_keywords()).items():
        if keyword not in names:
            nearest = nearest_setting(keyword, names)
            hint = f"Did you mean {nearest!r}?" if nearest else "`help(mvllm.LLM)` lists the settings."
            missing = plugin_groups.missing_part_of(plugin_groups.FOREIGN_KEYWORDS)
            raise ConfigError(f"There is no engine setting {keyword!r}. {hint}{missing}")
        name = names[keyword] or keyword
        if name in found and found[name] != value:
            raise ConfigError(
                f"{keyword} and {name} are the same setting: {value!r} and {found[name]!r} were given. Pass one."
            )
        found[name] = value
    return found


def nearest_setting(keyword: str, known: Iterable[str]) -> str | None:
    """The known name of which `keyword` is a misspelling, or None.

    Words that change the meaning are not taken for misspellings: `disable_x` is not `enable_x`, nor `min_x` `max_x`.
    """
    words = keyword.replace("-", "_").split("_")
    for candidate in difflib.get_close_matches(keyword, list(known), n=3, cutoff=0.75):
        others = candidate.split("_")
        if all(_is_like_one(word, others) for word in words):
            return candidate
    return None


def _is_like_one(word: str, others: list[str]) -> bool:
    """Whether a word is nearly one of others, or its long or short form: `length` and `len`."""
    forms = (other for other in others if min(len(word), len(other)) >= _SHORTEST_FORM)
    return bool(difflib.get_close_matches(word, others, n=1, cutoff=0.72)) or any(
        word.startswith(other) or other.startswith(word) for other in forms
    )


def listed_names(text: str | None) -> tuple[str, ...]:
    """`a, b` as (a, b), without duplicates."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def class_path(named: object) -> str:
    """`module:Class` of a class; a text unchanged."""
    return f"{named.__module__}:{named.__qualname__}" if isinstance(named, type) else str(named)
