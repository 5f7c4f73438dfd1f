"""Public interface for platforms whose device has a compiler or runtime of its own.

The package mvllm-graph has it (docs/how-to/install.md#parts): this module stands for the package that the entry point
`plugin_api.graph` of the group `mvllm.aliases` names. Importing it loads neither torch nor a device library.
"""

from typing import Any

from mvllm.platform.module_aliases import alias_module

_attribute = alias_module(__name__, part="graph")


def __getattr__(name: str) -> Any:
    return _attribute(name)


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
