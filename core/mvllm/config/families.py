"""Finds the record of a model's family, of core or of another package, and imports no other record.

    core            `mvllm.families` lists the records by their architectures and model types
    other packages  an entry point of `mvllm.models`: the name is the architecture, the value a module without a class.
                    One of `mvllm.model_types`, for configs without `architectures`: the name is the `model_type`

The module of a record has the constant `FAMILY`. Names of core take precedence.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvllm import plugin_groups
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ConfigError, ModelError
from mvllm.installable import missing_part

_INDEX = "mvllm.families"
"""Imported by name, as records are: they name classes of all layers, and are above this one, as other packages are."""
_ANY_TYPE = ModelType()
_TYPES_OF_PARTS = {"emu3": "image-generation", "janus": "image-generation"}
"""Model types of mvllm's own parts: known where the package is not installed."""


def find_architecture(name: str) -> Architecture | None:
    """The record of an architecture. None if there is none, as of a plugin that names a class alone.

    Raises:
        ConfigError, ModelError: As `record_of_plugin`.
    """
    family = _core_family(_index().architectures, name) or _plugin_family(name)
    return None if family is None else family.architectures.get(name)


def find_model_type(config: Mapping[str, Any] | HFConfig) -> ModelType:
    """How a config.json is read, by its `model_type`: as its own family says, else core's family of that type.

    Args:
        config: The values of config.json, or of a part of it.

    Raises:
        ConfigError, ModelError: The package that reads this type is not installed, cannot be loaded, or is not allowed
            and there is no `architectures`.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        return _ANY_TYPE
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        own = None if is_of_core(architectures[0]) else _plugin_family(architectures[0])
        if own is not None and name in own.model_types:
            return own.model_types[name]
    family = _core_family(_index().model_types, name) or _plugin_family_of_type(name, is_needed=not architectures)
    return _ANY_TYPE if family is None else family.model_types.get(name, _ANY_TYPE)


def multimodal_model(architecture: str, hf_config: HFConfig) -> MultiModalModel | None:
    """What a model takes beside text; None for text alone, as of checkpoints that are only the text part.

    Raises:
        ModelError: config.json lacks a value.
    """
    found = find_architecture(architecture)
    return None if found is None or found.read_items is None else found.read_items(hf_config)


def core_architectures() -> tuple[str, ...]:
    """The architectures of core's records."""
    return tuple(_index().architectures)


def core_model_types() -> tuple[str, ...]:
    """The model types of core's records."""
    return tuple(_index().model_types)


def is_of_core(architecture: str) -> bool:
    """Whether core has a record of an architecture."""
    return architecture in _index().architectures


def is_native(architecture: str) -> bool:
    """Whether core or an installed plugin has a class for an architecture.

    Raises:
        ConfigError: A plugin has it, but is not allowed, or several have it.
    """
    return is_of_core(architecture) or plugin_groups.find(plugin_groups.MODELS, architecture) is not None


def record_of_plugin(source: plugin_groups.PluginSource) -> ModelFamily | None:
    """The record that an entry point of `mvllm.models` names; None if it names a class.

    Raises:
        ConfigError: The module cannot be imported.
        ModelError: It has no `FAMILY` with the architecture.
    """
    if ":" in source.entry_point:
        return None
    family = getattr(plugin_groups.load(plugin_groups.MODELS, source), "FAMILY", None)
    if not isinstance(family, ModelFamily) or source.name not in family.architectures:
        raise ModelError(
            f"{source} must name a CausalLM, as `module:class`, or a module whose constant FAMILY is a ModelFamily of "
            f"mvllm.extension_api.model_families that has this architecture, found {family!r:.200}."
        )
    return family


def _plugin_family(architecture: str) -> ModelFamily | None:
    """The record of another package's architecture. None if the package is not allowed, or if several have the name:
    who builds the model reports it."""
    try:
        source = plugin_groups.find(plugin_groups.MODELS, architecture)
    except ConfigError:
        return None
    return None if source is None else record_of_plugin(source)


def _plugin_family_of_type(model_type: str, *, is_needed: bool) -> ModelFamily | None:
    """The record of another package's model type.

    Args:
        is_needed: Nothing else says what the model is. Otherwise a package that is not allowed is as one that is not
            installed.
    """
    if not is_needed and model_type not in plugin_groups.allowed_names(plugin_groups.MODEL_TYPES):
        source = None
    else:
        source = plugin_groups.find(plugin_groups.MODEL_TYPES, model_type)
    if source is None:
        part = _TYPES_OF_PARTS.get(model_type)
        if part is not None:
            what = f"A model of the type {model_type!r}"
            raise ModelError(missing_part(part, what) or f"{what} needs the package mvllm-{part}, which is missing.")
        return None
    family = getattr(plugin_groups.load(plugin_groups.MODEL_TYPES, source), "FAMILY", None)
    if not isinstance(family, ModelFamily) or model_type not in family.model_types:
        raise ModelError(
            f"{source} must name a module whose constant FAMILY is a ModelFamily of "
            f"mvllm.extension_api.model_families that has this model type, found {family!r:.200}."
        )
    return family


def _core_family(modules: Mapping[str, str], name: str) -> ModelFamily | None:
    module = modules.get(name)
    if module is None:
        return None
    family: ModelFamily = importlib.import_module(module).FAMILY
    return family


@dataclass(frozen=True)
class _Index:
    """The modules of core's records.

    Attributes:
        architectures, model_types: The module, by name.
    """

    architectures: Mapping[str, str]
    model_types: Mapping[str, str]


@functools.cache
def _index() -> _Index:
    index = importlib.import_module(_INDEX)
    return _Index(index.architectures(), index.model_types())
