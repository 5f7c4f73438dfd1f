"""Keywords that other engines have and mvllm does without: each is accepted, with its effect or one log line.

A script written for another engine passes settings that mvllm does not declare. Packages say the meaning of those that
they know (`ForeignKeywords`), mvllm-compat of those of vLLM. A keyword either gives the value of a setting of mvllm
(`setting`), or has no effect; if its value asks for something that mvllm does not do, one warning says what happens
instead (`instead`). Where doing without would change what a user relies on, the keyword is an error (`is_refused`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from mvllm import plugin_groups
from mvllm.errors import ConfigError
from mvllm.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class ForeignKeyword:
    """A keyword that is not a setting of mvllm.

    Attributes:
        instead: What mvllm does instead, as the rest of the sentence that begins with the keyword and its value.
        same: Values that ask for what mvllm does anyway: they need no warning. None and False never need one.
        setting: The setting that takes the value. `key` names an entry of that setting, which is then a dict.
        key: See `setting`.
        factor_of: The setting that a value is a factor of. Without that setting the value has no effect.
        kind: What the option takes on a command line: one value, nothing (`flag`, with `--no-...`), or a `list`.
        is_refused: Whether a value that is not among `same` is an error instead of a warning.
    """

    instead: str = ""
    same: tuple[Any, ...] = ()
    setting: str | None = None
    key: str | None = None
    factor_of: str | None = None
    kind: Literal["value", "flag", "list"] = "value"
    is_refused: bool = False


@dataclass(frozen=True)
class ForeignKeywords:
    """The keywords of other engines that a package knows. Entry points of `mvllm.foreign_keywords` name one.

    Attributes:
        engine: Settings of an engine by name, or by a pattern with `*` for a word of one maker's hardware. Their
            defaults in other engines are among `same`.
        server: Options of `mvllm serve` by name, with `_` for `-`.
    """

    engine: Mapping[str, ForeignKeyword] = field(default_factory=dict)
    server: Mapping[str, ForeignKeyword] = field(default_factory=dict)


_ONE_BY_ONE = "Long prompts are computed one by one; long_prefill_token_threshold limits their tokens in a step."

_EARLIER_NAMES: Mapping[str, ForeignKeyword] = {
    "max_long_partial_prefills": ForeignKeyword(_ONE_BY_ONE, (1,), factor_of="long_prefill_token_threshold"),
    "max_num_partial_prefills": ForeignKeyword(_ONE_BY_ONE),
}
"""Keywords that core accepts without a package."""


def engine_keywords() -> Mapping[str, ForeignKeyword]:
    """The settings of other engines that core and installed packages know.

    Raises:
        ConfigError: A package's keywords cannot be loaded, or are no ForeignKeywords.
    """
    found = dict(_EARLIER_NAMES)
    for keywords in _installed():
        found |= keywords.engine
    return found


def server_keywords() -> Mapping[str, ForeignKeyword]:
    """The options of other engines' servers that installed packages know. Raises as `engine_keywords`."""
    return {name: keyword for keywords in _installed() for name, keyword in keywords.server.items()}


def _installed() -> list[ForeignKeywords]:
    found: list[ForeignKeywords] = []
    for source in plugin_groups.list_plugins(plugin_groups.FOREIGN_KEYWORDS):
        if plugin_groups.is_allowed(source):
            keywords = plugin_groups.load(plugin_groups.FOREIGN_KEYWORDS, source)
            if not isinstance(keywords, ForeignKeywords):
                raise ConfigError(f"{source} must name ForeignKeywords, found {keywords!r}.")
            found.append(keywords)
    return found


def find_foreign(name: str, table: Mapping[str, ForeignKeyword]) -> ForeignKeyword | None:
    """The entry of a keyword, by its name or by the pattern that it matches."""
    if name in table:
        return table[name]
    return next((entry for key, entry in table.items() if "*" in key and fnmatchcase(name, key)), None)


def translate(given: Mapping[str, Any], table: Mapping[str, ForeignKeyword], *, prefix: str = "") -> dict[str, Any]:
    """Keyword arguments with the foreign ones replaced by settings of mvllm, or dropped with a warning.

    Args:
        prefix: What stands before a name where the user wrote it, such as `--`; dashes then stand for underscores.

    Raises:
        ConfigError: A foreign keyword and the setting that it stands for are both given, with different values; or
            a keyword is refused.
    """
    entries = {name: find_foreign(name, table) for name in given}
    found = {name: value for name, value in given.items() if entries[name] is None}
    for name, value in given.items():
        keyword = entries[name]
        if keyword is None or value is None:
            continue
        if keyword.setting is not None:
            _store(found, name, keyword, value)
            continue
        shown = prefix + (name.replace("_", "-") if prefix else name)
        if keyword.factor_of is not None and found.get(keyword.factor_of):
            found[keyword.factor_of] = _multiply(shown, value, keyword.factor_of, found[keyword.factor_of])
        elif not _is_same(value, keyword.same):
            if keyword.is_refused:
                raise ConfigError(f"{shown} is not supported. {keyword.instead}")
            logger.warning("%s=%.80r has no effect. %s", shown, value, keyword.instead)
    return found


def _multiply(name: str, factor: Any, setting: str, value: Any) -> Any:
    """A setting of which another engine has a factor, such as the number of requests that it applies to."""
    if type(factor) is not int or factor < 1:
        raise ConfigError(f"{name} must be an integer >= 1, not {factor!r}.")
    if factor == 1 or type(value) is not int:
        return value
    logger.warning("%s=%d multiplies %s, which is %d instead of %d.", name, factor, setting, factor * value, value)
    return factor * value


def _store(found: dict[str, Any], name: str, keyword: ForeignKeyword, value: Any) -> None:
    setting = str(keyword.setting)
    if keyword.key is not None:
        present = found.get(setting) or {}
        value = {keyword.key: value, **present} if isinstance(present, Mapping) else present
    elif found.get(setting) not in (None, value):
        raise ConfigError(f"{name} and {setting} are the same setting, and differ. Pass {setting} alone.")
    found[setting] = value


def _is_same(value: Any, same: tuple[Any, ...]) -> bool:
    """Whether the value asks for what mvllm does anyway. True is not 1."""
    return value is False or any(type(value) is type(each) and value == each for each in same)
