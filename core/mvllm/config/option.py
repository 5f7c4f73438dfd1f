"""Option: the declaration of a setting, with its help, type and permitted values.

`option(...)` stores the declaration in a dataclass field's metadata; `options_of` reads it, so that the command line,
the reference pages and the checks use the same declaration.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mvllm.errors import ConfigError

GROUPS = ("model", "cache", "scheduler", "parallel", "load", "multimodal", "lora", "platform")
"""Groups of settings, in the order in which they are shown."""

_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a JSON object"}


@dataclass(frozen=True)
class Option:
    """A declared setting.

    Attributes:
        name: The keyword; on a command line, with dashes for underscores.
        kind: `int`, `float`, `bool`, `str` or `dict`.
        nullable: Whether None may be given.
        default: The default (`dataclasses.MISSING` for a required setting).
        help: One sentence for `--help`.
        group: One of GROUPS.
        choices: The permitted texts; empty for any text.
        hints: What to do instead, by texts that are often given and not permitted.
        words: Texts that may be given instead of a value of the kind: those of a Literal in the annotation.
        minimum, maximum: Permitted range, inclusive, except `minimum` if `above` is set.
        above: Whether `minimum` itself is excluded.
        aliases: Other names of the setting.
    """

    name: str
    kind: type
    nullable: bool
    default: Any
    help: str
    group: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: bool = False
    aliases: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def checked(self, value: Any, name: str | None = None) -> Any:
        """`value`, converted to the setting's type and checked.

        Args:
            name: The setting's name in messages; by default its own.

        Raises:
            ConfigError: It is not permitted; names the setting, the value and what is permitted.
        """
        name = name or self.name
        if value is None:
            if self.nullable:
                return None
            raise ConfigError(f"{name} must be {self.permitted()}, found None.")
        if isinstance(value, str) and value in self.words:
            return value
        value = self._of_kind(value, name)
        if self.choices and value not in self.choices:
            hint = self.hints.get(str(value).lower())
            if hint is None and (similar := difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.8)):
                hint = f"Did you mean {similar[0]!r}?"
            raise ConfigError(f"{name} must be {self.permitted()}, found {value!r}.{f' {hint}' if hint else ''}")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._in_range(value):
            raise ConfigError(f"{name} must be {self.permitted()}, found {value!r}.")
        return value

    def permitted(self) -> str:
        """The permitted values, in words."""
        if self.choices:
            text = "one of " + ", ".join(repr(choice) for choice in self.choices)
        else:
            text = _KIND_NAMES[self.kind]
            if self.minimum is not None:
                text += f" {'>' if self.above else '>='} {self.minimum}"
            if self.maximum is not None:
                text += f"{' and' if self.minimum is not None else ''} <= {self.maximum}"
        others = [*map(repr, self.words)]
        return " or ".join([", ".join([text, *others[:-1]]), *others[-1:]])

    def _of_kind(self, value: Any, name: str) -> Any:
        error = ConfigError(f"{name} must be {self.permitted()}, found {value!r}.")
        if self.kind in (int, float) and isinstance(value, bool):
            raise error
        if self.kind is int:
            try:
                return operator.index(value)
            except TypeError:
                raise error from None
        if self.kind is float:
            if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise error
            return float(value)
        if not isinstance(value, self.kind):
            raise error
        return value

    def _in_range(self, value: float) -> bool:
        if self.minimum is not None and (value < self.minimum or (self.above and value == self.minimum)):
            return False
        return self.maximum is None or value <= self.maximum


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    group: str,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: bool = False,
    aliases: tuple[str, ...] = (),
    hints: Mapping[str, str] = MappingProxyType({}),
    secret: bool = False,
) -> Any:
    """A dataclass field for a setting; the arguments are those of `Option`. A `secret` is not in the repr.

    Args:
        choices: A function is called when the settings are listed, for texts that depend on what is installed.
    """
    facts = {
        "help": help,
        "group": group,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "aliases": aliases,
        "hints": hints,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=facts)


def options_of(cls: type) -> tuple[Option, ...]:
    """The settings that a dataclass and its base classes declare with `option`, by group."""
    hints = typing.get_type_hints(cls)
    options = []
    for field in dataclasses.fields(cls):
        if "group" in field.metadata:
            kind, nullable, words = _kind_of(hints[field.name])
            facts = dict(field.metadata)
            if callable(facts["choices"]):
                facts["choices"] = facts["choices"]()
            options.append(Option(field.name, kind, nullable, field.default, **facts, words=words))
    return tuple(sorted(options, key=lambda option: GROUPS.index(option.group)))


def _kind_of(annotation: Any) -> tuple[type, bool, tuple[str, ...]]:
    """`int | Literal["auto"] | None` -> (int, True, ("auto",)); `dict[str, Any]` -> (dict, False, ())."""
    members = [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        members = list(typing.get_args(annotation))
    nullable = type(None) in members
    words = tuple(word for m in members if typing.get_origin(m) is typing.Literal for word in typing.get_args(m))
    [member] = [m for m in members if m is not type(None) and typing.get_origin(m) is not typing.Literal]
    return typing.get_origin(member) or member, nullable, words
