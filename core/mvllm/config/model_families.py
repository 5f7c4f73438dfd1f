"""Families of models whose config.json another package reads: entry points of the group `mvllm.model_families`.

The name of an entry point is the `model_type` of config.json, its value a ModelFamily. It is loaded when a model of
that type is opened. Its model class is an entry point of `mvllm.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mvllm import plugin_groups
from mvllm.config.hf_config import HFConfig
from mvllm.config.token_spaces import ReadSpaces
from mvllm.errors import ModelError
from mvllm.installable import missing_part

_FAMILIES_OF_PARTS = {"emu3": "image-generation", "janus": "image-generation"}
"""Families of mvllm's own parts: known where the package is not installed."""


@dataclass(frozen=True)
class ModelFamily:
    """What core asks about the config of a family. Its module needs no torch.

    Attributes:
        architecture: The model class's, for configs without `architectures`.
        simplify: Changes the values of config.json, without `text_config`, in place: drops what is large and unused.
            Its second argument is the file's path, for errors.
        text_defaults: The values that `text_config` leaves out, of the whole config and its `text_config`.
        token_spaces: Reads the token spaces; None for models of text alone.
        text_only: The config has parts for encoders that the model class does not load.
    """

    architecture: str
    simplify: Callable[[dict[str, Any], str], None] | None = None
    text_defaults: Callable[[HFConfig, dict[str, Any]], dict[str, Any]] | None = None
    token_spaces: ReadSpaces | None = None
    text_only: bool = False


def find_family(model_type: object) -> ModelFamily | None:
    """The family of a `model_type`; None if no package has one.

    Raises:
        ModelError: The package that has it is not installed, or its object is not a ModelFamily.
        ConfigError: It is not allowed, cannot be loaded, or several have it.
    """
    if not isinstance(model_type, str):
        return None
    source = plugin_groups.find(plugin_groups.MODEL_FAMILIES, model_type)
    if source is None:
        part = _FAMILIES_OF_PARTS.get(model_type)
        if part is not None:
            what = f"A model of the type {model_type!r}"
            raise ModelError(missing_part(part, what) or f"{what} needs the package mvllm-{part}, which is missing.")
        return None
    family = plugin_groups.load(plugin_groups.MODEL_FAMILIES, source)
    if not isinstance(family, ModelFamily):
        raise ModelError(f"{source} must name a ModelFamily of mvllm.extension_api.model_families, found {family!r}.")
    return family
