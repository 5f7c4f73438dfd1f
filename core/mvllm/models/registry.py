"""Model classes by architecture name in `config.json`. A model's module is imported when it is resolved.

Families' records name them (`config.model_family`). Other packages add architectures through entry points of
`mvllm.models`: the name is the architecture, the value `package.module:Class`, a CausalLM, or the module of a record.
Core's class takes precedence over a plugin's of the same name. Architectures without a class are run by the
implementation that `model_impl` says, if it can (`config.model_implementations`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mvllm import plugin_groups
from mvllm.config.architecture_support import supported_architectures as supported_architectures
from mvllm.config.families import find_architecture, is_of_core, record_of_plugin
from mvllm.config.model_family import Architecture
from mvllm.config.model_implementations import (
    find_implementation,
    implementation_name,
    runs_natively,
    unsupported_reason,
)
from mvllm.errors import ModelError
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)


def resolve_model_class(architecture: str, model_impl: str = "auto", language: str = "") -> type[CausalLM]:
    """The class that runs checkpoints of `architecture`.

    Args:
        model_impl: As in ModelConfig.
        language: `ModelConfig.language_architecture`.

    Raises:
        ModelError: There is none, or a plugin's class is not a CausalLM.
        ConfigError: The plugin that has it is not allowed, or cannot be loaded.
    """
    implementation = implementation_name(model_impl)
    if implementation is not None and not runs_natively(architecture, model_impl):
        return _class_of_implementation(architecture, implementation)
    if is_of_core(architecture):
        for plugin in plugin_groups.list_plugins(plugin_groups.MODELS):
            if plugin.name == architecture:
                logger.warning("%s has a class for %s, but core's own class is used.", plugin, architecture)
        return _core_class(architecture, language)
    source = plugin_groups.find(plugin_groups.MODELS, architecture)
    if source is None:
        raise ModelError(f"The architecture {architecture!r} is not supported: no class is registered under this name.")
    return _plugin_class(source, language)


@functools.cache
def _core_class(architecture: str, language: str) -> type[CausalLM]:
    found = find_architecture(architecture)
    assert found is not None, "core has it"
    return _build_class(architecture, found, language, _import_class)


def _plugin_class(source: plugin_groups.PluginSource, language: str) -> type[CausalLM]:
    record = record_of_plugin(source)
    if record is None:
        return _load_from_plugin(source, source.entry_point)
    load = functools.partial(_load_from_plugin, source)
    return _build_class(source.name, record.architectures[source.name], language, load)


def _load_from_plugin(
    source: plugin_groups.PluginSource, path: str, group: plugin_groups.PluginGroup = plugin_groups.MODELS
) -> type[CausalLM]:
    """A class that a plugin names. Its errors name the package."""
    from mvllm.models.causal_lm import CausalLM

    named = dataclasses.replace(source, entry_point=path)
    found = plugin_groups.load(group, named)
    if not (isinstance(found, type) and issubclass(found, CausalLM)):
        raise ModelError(f"{named} must name a subclass of mvllm.extension_api.CausalLM, found {found!r}.")
    return found


def _import_class(path: str) -> type[CausalLM]:
    module, _, name = path.partition(":")
    found: type[CausalLM] = getattr(importlib.import_module(module), name)
    return found


def _build_class(
    name: str, architecture: Architecture, language: str, load: Callable[[str], type[CausalLM]]
) -> type[CausalLM]:
    """The class of an architecture: the one that its record names, or one with several bases.

    Args:
        language: `ModelConfig.language_architecture`.
        load: Imports a class by its path, `module:class`.
    """
    bases = tuple(map(load, architecture.bases))
    if architecture.language_model is not None:
        bases = *bases, _language_class(name, language or architecture.language_model)
    if len(bases) == 1 and bases[0].__name__ == name:
        return bases[0]
    return type(name, bases, {"__doc__": f"`{name}` of Hugging Face checkpoints."})


def _language_class(architecture: str, language: str) -> type[CausalLM]:
    found = find_architecture(language)
    if found is None or len(found.bases) > 1 or found.language_model is not None:
        raise ModelError(
            f"The architecture {architecture!r} with the language model {language!r} is not supported: no class is "
            "known for this language model. Check `model_type` of `text_config` in config.json."
        )
    return _import_class(found.bases[0])


def _class_of_implementation(architecture: str, name: str) -> type[CausalLM]:
    reason = unsupported_reason(architecture, name)
    if reason is not None:
        raise ModelError(f"The architecture {architecture!r} is not supported. {reason[0].upper() + reason[1:]}")
    implementation, source = find_implementation(name), plugin_groups.find(plugin_groups.MODEL_IMPLS, name)
    assert implementation is not None and source is not None, "otherwise there is a reason"
    return _load_from_plugin(source, implementation.model_class(architecture), plugin_groups.MODEL_IMPLS)
