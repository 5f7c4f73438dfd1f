"""ModuleNames: names of modules in checkpoints, for model classes that have other names than their checkpoints."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping


class ModuleNames:
    """Translates names of modules and tensors by their components.

    Args:
        renamed: A component of names in checkpoints, or several (`self_attn.out_proj`), and its name in the class.
        aliases: Likewise, of names that only settings about modules have, such as those of transformers' classes.
    """

    def __init__(self, renamed: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> None:
        self._renamed = dict(renamed)
        self._expression = _components(self._renamed)
        self._theirs = [(_components([ours]), theirs) for theirs, ours in {**renamed, **(aliases or {})}.items()]

    def ours(self, name: str) -> str:
        """The class's name of a checkpoint's module or tensor."""
        if not self._renamed:
            return name
        return self._expression.sub(lambda found: self._renamed[found.group()], name)

    def theirs(self, name: str) -> tuple[str, ...]:
        """The names that checkpoints may have for the class's module `name`, without that name."""
        changes = [change for change in self._theirs if change[0].search(name)]
        found = []
        for count in range(len(changes), 0, -1):
            for chosen in itertools.combinations(changes, count):
                other = name
                for expression, theirs in chosen:
                    other = expression.sub(theirs, other)
                found.append(other)
        return tuple(found)


def _components(names: Mapping[str, str] | list[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, names))})(?![^.])")


def names_with_prefixes(names: Iterable[str], prefixes: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The names that modules have in checkpoints where a language model is one part of several.

    Args:
        names: Names of the language model alone.
        prefixes: (prefix in such checkpoints, prefix in the language model's class).
    """
    return tuple(
        prefix + name.removeprefix(ours) for name in names for prefix, ours in prefixes if name.startswith(ours)
    )
