"""DraftModel: the model of a method of speculative decoding, which is loaded beside the served model."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError
from mvllm.models.draft_head import DraftHead
from mvllm.worker.decoder_forward import DecoderForward, StepForward
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.space_logits import LogitsModel
from mvllm.worker.state_layers import step_backend_of

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

_Base = TypeVar("_Base")


@dataclass(frozen=True)
class DraftModel:
    """A draft model or a draft head.

    Attributes:
        config: Its config.
        model: The model, with its weights.
    """

    config: ModelConfig
    model: CausalLM

    @property
    def is_head(self) -> bool:
        """Whether it reads hidden states of the served model."""
        return isinstance(self.model, DraftHead)

    @property
    def logits_model(self) -> LogitsModel:
        """What computes logits of its hidden states."""
        return self.model

    def combine(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> torch.Tensor | None:
        """What its forward pass gets of a step of the served model, see DraftHead; None if it is no head."""
        return self.model.combine(hidden, layer_states) if isinstance(self.model, DraftHead) else None

    def forward(self, layers: KVCacheLayers) -> StepForward:
        """Its forward pass.

        Args:
            layers: The attention layers of the rank, those of this model included.
        """
        groups = layers.attention_groups_of(self.model.attention_layers())
        return DecoderForward(self.model, groups, step_backend_of(self.model.state_layers()))


def class_of_method(settings: SpeculativeConfig, path: str, base: type[_Base], published: str) -> type[_Base]:
    """Imports a class that a method of speculative decoding names.

    Args:
        path: `module:class`.
        base: The class that it must be derived from.
        published: The base class as packages import it, below `mvllm.extension_api`.

    Raises:
        ConfigError: It cannot be imported, or is no such class.
    """
    module, _, name = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"The method {settings.method!r} of speculative_config names the class {path!r}, whose module cannot be "
            f"imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"The method {settings.method!r} of speculative_config names the class {path!r}, which is no subclass of "
            f"mvllm.extension_api.{published}."
        )
    return found
