"""Implementations of models for architectures without a class of their own: entry points of `mvllm.model_impls`.

The name of one is a value of the setting `model_impl`. With `auto`, architectures that neither core nor a plugin has a
class for are run by `transformers`, which is known where its package is not installed:

    config.json ──an own class─────────────> core's or a plugin's (mvllm.models.registry)
                ──none, or model_impl=NAME─> ModelImplementation: may it run? how is config.json read? which class?
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvllm import plugin_groups
from mvllm.config.families import find_architecture, is_native
from mvllm.config.hf_config import HFConfig
from mvllm.installable import missing_part

FALLBACK = "transformers"
"""The implementation that `auto` uses for architectures without a class."""
_PART = "transformers-backend"
"""The part of mvllm that brings it."""
_NATIVE = ("auto", "native")


@dataclass(frozen=True)
class CompositeConfig:
    """A config of a language model and encoders.

    Attributes:
        text_values: The values of the language model, with the defaults of keys that config.json leaves out.
        placeholders: As in MultiModalModel.
    """

    text_values: dict[str, Any]
    placeholders: dict[str, int]


class ModelImplementation(ABC):
    """Runs architectures for which there is no class of their own. Front ends import it, so its module needs no torch.

    Attributes:
        items: The subclass of ItemFamily that processes items for its encoders, as `module:class`. It stands before
            that of the architecture. None: it takes items as native models do.
    """

    items: str | None = None

    @abstractmethod
    def unsupported_reason(self, architecture: str) -> str | None:
        """Why it does not run an architecture, as a sentence; None if no reason is known before the model is built."""

    @abstractmethod
    def model_class(self, architecture: str) -> str:
        """The model class, a CausalLM, as `module:class`. Called if there is no `unsupported_reason`."""

    def read_composite_config(self, whole: HFConfig) -> CompositeConfig | None:
        """Reads a checkpoint with encoders that no record says how to read.

        Args:
            whole: config.json as it is in the file.

        Returns:
            None if the model takes text alone, or if the config is unknown.
        """
        return None


def model_impl_names() -> tuple[str, ...]:
    """The values of the setting `model_impl`. Imports no implementation."""
    return (*_NATIVE, *sorted({FALLBACK, *plugin_groups.allowed_names(plugin_groups.MODEL_IMPLS)}))


def names_implementation(model_impl: str) -> bool:
    """Whether the setting names an implementation, which then runs architectures with a class, too."""
    return model_impl not in _NATIVE


def implementation_name(model_impl: str) -> str | None:
    """The implementation that runs architectures without a class; None for `native`, which runs none of them."""
    return {"auto": FALLBACK, "native": None}.get(model_impl, model_impl)


def runs_natively(architecture: str, model_impl: str) -> bool:
    """Whether a class of core or of an installed plugin runs an architecture, not an implementation for any of them.

    Raises:
        ConfigError: A plugin has it, but is not allowed, or several have it.
    """
    return not names_implementation(model_impl) and is_native(architecture)


def find_implementation(name: str) -> ModelImplementation | None:
    """The implementation of that name, imported; None if no installed package has it.

    Raises:
        ConfigError: Its package is not allowed or cannot be loaded, or several packages have the name.
    """
    source = plugin_groups.find(plugin_groups.MODEL_IMPLS, name)
    if source is None:
        return None
    published = "model_implementations.ModelImplementation"
    return plugin_groups.load_class(plugin_groups.MODEL_IMPLS, source, ModelImplementation, published)()


def unsupported_reason(architecture: str, name: str) -> str | None:
    """Why an implementation does not run an architecture, as a sentence: also that its package is not installed.

    Raises:
        ConfigError: As `find_implementation`.
    """
    found = find_implementation(name)
    if found is None:
        return f"{_missing(architecture, name)}."
    return found.unsupported_reason(architecture)


def read_composite_config(
    architecture: str, model_impl: str, folder: Path, overrides: Mapping[str, Any] | None
) -> CompositeConfig | None:
    """Reads a checkpoint with encoders that runs through an implementation, where no record says how to read it.

    Native classes without `Architecture.read_items` take text alone.

    Args:
        architecture, model_impl: As in ModelConfig.
        folder: The model folder.
        overrides: Keys of config.json to replace.

    Returns:
        None if a record reads it, if it takes text alone, or if the package that runs it is not installed.

    Raises:
        ModelError: config.json cannot be read.
        ConfigError: As `find_implementation`.
    """
    name = implementation_name(model_impl)
    record = find_architecture(architecture)
    if name is None or (record is not None and (not names_implementation(model_impl) or record.read_items is not None)):
        return None
    found = find_implementation(name)
    return None if found is None else found.read_composite_config(HFConfig.load(folder, overrides))


def _missing(architecture: str, name: str) -> str:
    what = f"Running {architecture!r} through {name}"
    if name != FALLBACK:
        return f"{what} needs a package with this model implementation, which is not installed"
    return missing_part(_PART, what) or f"{what} needs the package mvllm-{_PART}, which is missing."
