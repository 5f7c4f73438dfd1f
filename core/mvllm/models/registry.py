"""Model classes by architecture name in `config.json`. A model's module is imported when it is resolved.

Families' records name them (`config.model_family`). Other packages add architectures through entry points of
`mvllm.models`: the name is the architecture, the value `package.module:Class`, a CausalLM, or the module of a record.
Core's class takes precedence over a plugin's of the same name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mvllm import plugin_groups
from mvllm.config.families import core_architectures, find_architecture, is_of_core, record_of_plugin
from mvllm.config.model_family import Architecture
from mvllm.errors import ModelError
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)


def supported_architectures() -> tuple[str, ...]:
    """Native architectures, sorted: core's and those of installed plugins."""
    return tuple(sorted({*core_architectures(), *plugin_groups.allowed_names(plugin_groups.MODELS)}))


def is_native(architecture: str) -> bool:
    """Whether core or an installed plugin has a class for `architecture`.

    Raises:
        ConfigError: A plugin has it, but is not allowed, or several have it.
    """
    return is_of_core(architecture) or plugin_groups.find(plugin_groups.MODELS, architecture) is not None


def resolve_model_class(architecture: str, model_impl: str = "auto", language: str = "") -> type[CausalLM]:
    """The class that runs checkpoints of `architecture`.

    Args:
        model_impl: As in ModelConfig.
        language: `ModelConfig.language_architecture`.

    Raises:
        ModelError: There is none (the message lists the supported ones), or a plugin's class is not a CausalLM.
        ConfigError: The plugin that has it is not allowed, or cannot be loaded.
    """
    if model_impl == "transformers" or (model_impl == "auto" and not is_native(architecture)):
        return _fallback(architecture)
    if is_of_core(architecture):
        for plugin in plugin_groups.list_plugins(plugin_groups.MODELS):
            if plugin.name == architecture:
                logger.warning("%s has a class for %s, but core's own class is used.", plugin, architecture)
        return _core_class(architecture, language)
    source = plugin_groups.find(plugin_groups.MODELS, architecture)
    if source is None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}."
        )
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


def _load_from_plugin(source: plugin_groups.PluginSource, path: str) -> type[CausalLM]:
    """A class that a plugin names. Its errors name the package."""
    from mvllm.models.causal_lm import CausalLM

    named = dataclasses.replace(source, entry_point=path)
    found = plugin_groups.load(plugin_groups.MODELS, named)
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


def _fallback(architecture: str) -> type[CausalLM]:
    from mvllm.models.transformers_backend.supported_classes import has_encoders, unsupported_reason

    reason = unsupported_reason(architecture)
    if reason is not None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}. "
            f"As for others: {reason}"
        )
    if has_encoders(architecture):
        from mvllm.models.transformers_backend.multimodal import TransformersMultiModalForCausalLM

        return TransformersMultiModalForCausalLM
    from mvllm.models.transformers_backend.model import TransformersForCausalLM

    return TransformersForCausalLM
