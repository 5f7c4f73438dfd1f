"""Modules that are published as `mvllm.…` and that another package has: entry points of the group `mvllm.aliases`.

The name of an entry point is the module's without `mvllm.`, its value the module that it stands for:

    [project.entry-points."mvllm.aliases"]
    testing = "mvllm_conformance"

    import mvllm.testing.plugin ──AliasFinder──> import mvllm_conformance.plugin ──> one module object, two names

A module without submodules is the same object under both names. A package gets an object of its own, without a
folder: else Python, and pytest's import hook, would find the files of its submodules under the second name and run
them twice. Its attributes are those of the package that it stands for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mvllm import plugin_groups
from mvllm.errors import ConfigError
from mvllm.installable import missing_part


class MissingPartError(ModuleNotFoundError):
    """The package that has a module of mvllm is not installed; the message names it."""


def alias_module(name: str, part: str) -> Callable[[str], object]:
    """Lets the calling module stand for that of another package, and installs the finder of its submodules.

        __path__: list[str] = []
        __getattr__ = alias_module(__name__, part="conformance")

    Args:
        name: The calling module's name. A module that has submodules also sets `__path__` to an empty list.
        part: The part of mvllm that has it, for the error if it is missing.

    Returns:
        The `__getattr__` of the calling module. It imports the other one on first use.

    Raises:
        MissingPartError: No installed package has it.
        ImportError: Several have it, or `MVLLM_PLUGINS` does not allow the one that has it.
    """
    try:
        source = plugin_groups.find(plugin_groups.ALIASES, name.removeprefix("mvllm."))
    except ConfigError as e:
        raise ImportError(str(e), name=name) from e
    if source is None:
        message = missing_part(part, name) or f"{name} needs the package mvllm-{part}, which is not installed"
        raise MissingPartError(message, name=name)
    finder = AliasFinder(name, source.entry_point)
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)
    return finder.attributes_of(name)


@dataclass(frozen=True)
class AliasFinder(MetaPathFinder, Loader):
    """Finds and loads the submodules of an alias.

    Attributes:
        alias: The published name: `mvllm.testing`.
        target: The module that it stands for.
    """

    alias: str
    target: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec with the file of the module that `fullname` stands for; None if there is no such module."""
        if not fullname.startswith(f"{self.alias}."):
            return None
        found = importlib.util.find_spec(self._target_of(fullname))
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Replaces a new module by the one that it stands for; makes a new package a view of its own."""
        name = module.__name__
        if hasattr(module, "__path__"):
            module.__path__ = []
            module.__dict__["__getattr__"] = self.attributes_of(name)
        else:
            sys.modules[name] = importlib.import_module(self._target_of(name))  # the import system returns this one

    def attributes_of(self, name: str) -> Callable[[str], object]:
        """A module's `__getattr__` that reads the attributes of the module that `name` stands for."""
        target = self._target_of(name)
        return lambda attribute: getattr(importlib.import_module(target), attribute)

    def _target_of(self, name: str) -> str:
        return self.target + name[len(self.alias) :]
