"""Attributes of LLM, LLMEngine and AsyncLLM that other packages add: entry points of the group `mvllm.engine_methods`.

    llm.images ── no attribute of LLM ──> entry point `images` ──> function(llm) ──> the attribute's value

The function is called for each access, and returns a method, or an object with methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mvllm import plugin_groups
from mvllm.installable import missing_part

_METHODS_OF_PARTS = dict.fromkeys(("decode_images", "generate_images", "image_requests", "images"), "image-generation")
"""Methods of mvllm's own parts: known where the package is not installed."""


class AddedMethods:
    """Base of the classes that packages add methods to. An attribute that the class has itself takes precedence.

    Type checkers know the methods of mvllm's own parts, as Any; their types are in the parts.
    """

    decode_images: Any
    generate_images: Any
    image_requests: Any
    images: Any

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            return _added_attribute(self, name)


def _added_attribute(engine: object, name: str) -> object:
    """
    Raises:
        AttributeError: No installed package adds it; names the package if one is known. Or a property has raised it.
        ConfigError: The package that adds it is not allowed or cannot be loaded, or several add it.
    """
    if hasattr(type(engine), name):  # a property that has raised an AttributeError, which says why
        return object.__getattribute__(engine, name)
    if not name.startswith("_"):
        source = plugin_groups.find(plugin_groups.ENGINE_METHODS, name)
        if source is not None:
            value: object = plugin_groups.load(plugin_groups.ENGINE_METHODS, source)(engine)
            return value
    kind = type(engine).__name__
    part = _METHODS_OF_PARTS.get(name)
    hint = None if part is None else missing_part(part, f"{kind}.{name}")
    raise AttributeError(hint or f"{kind!r} object has no attribute {name!r}")
