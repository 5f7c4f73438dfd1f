"""DraftMethod: one method of speculative decoding: how its settings are read, and which proposer runs it.

    speculative_config={"method": "suffix", ...}
        ──entry point `suffix` of `mvllm.proposers`──> DraftMethod.read ──> SpeculativeConfig
                                                                            └ proposer: "package.module:Class"
    worker ──imports that class──> Proposer (`mvllm.worker.spec_decode.proposer`)

The front end reads settings without torch. Only workers import the proposer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64

COMMON_KEYS = ("method", "num_speculative_tokens", "adaptive")
"""Keys of `speculative_config` that every method has."""

ReadConfig = Callable[[str, str | None], HFConfig]
"""Reads `config.json` of a model, as it is, from its folder or name and its revision."""


class BuildModel(Protocol):
    """Builds the config of a model."""

    def __call__(
        self,
        name: str,
        revision: str | None,
        quantization: str | None,
        hf_overrides: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Builds the config.

        Args:
            name: Its folder or name.
            revision, quantization: As in ModelConfig.
            hf_overrides: Keys to replace in its `config.json`.
        """


@dataclass(frozen=True)
class SpeculativeConfig:
    """Method and number of draft tokens.

    Attributes:
        method: The name of the method.
        num_speculative_tokens: Most draft tokens of a sequence per step.
        prompt_lookup_min, prompt_lookup_max: For `ngram`: shortest and longest n-gram that is matched.
        model: The draft model or draft head, for methods that have one. It is loaded beside the served model, and its
            attention layers have their part of each KV block.
        proposer: The class that proposes, `module:class`; it is created with a ProposerContext.
        model_class: The class of `model`, `module:class`; empty for that of its architecture.
        reads_hidden: The proposer reads the hidden states from which the served model computes logits.
        reads_layers: The layers of the served model before which the proposer reads the residual stream.
        options: Further settings of the method, for its proposer.
        adaptive: Steps have fewer draft tokens, or none, where measured times show that this gives more tokens per
            second. Otherwise always `num_speculative_tokens`.
        is_default: The user has not asked for drafts. Where something excludes them, there are none.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    model: ModelConfig | None = None
    proposer: str = ""
    model_class: str = ""
    reads_hidden: bool = False
    reads_layers: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    adaptive: bool = True
    is_default: bool = False

    @property
    def num_lookahead_tokens(self) -> int:
        """KV cache slots after those of a step that drafting needs for each sequence."""
        return 0 if self.model is None else self.num_speculative_tokens


@dataclass(frozen=True)
class DraftSettings:
    """The settings of `speculative_config`, whose keys are known to exist in the method.

    Attributes:
        method: The method's name.
        values: All settings.
        target: The served model.
        build_model: Builds the config of a draft model.
        read_config: Reads the `config.json` of a draft model.
    """

    method: str
    values: Mapping[str, Any]
    target: ModelConfig
    build_model: BuildModel
    read_config: ReadConfig

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """The value of a key.

        Raises:
            ConfigError: It is no integer between the bounds.
        """
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"speculative_config: {name} must be an integer from {least} to {most}, found {value!r:.40}."
            )
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """The value of a key.

        Raises:
            ConfigError: It is no number between the bounds.
        """
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(
                f"speculative_config: {name} must be a number from {least:g} to {most:g}, found {value!r:.40}."
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """The value of a key.

        Raises:
            ConfigError: It is neither true nor false.
        """
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"speculative_config: {name} must be true or false, found {value!r:.40}.")
        return value

    def text(self, name: str) -> str | None:
        """The value of a key; None without it.

        Raises:
            ConfigError: It is no text.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"speculative_config: {name} must be a text, found {value!r:.40}.")
        return value

    def num_speculative_tokens(self, default: int | None = None) -> int:
        """The number of draft tokens.

        Raises:
            ConfigError: It is missing and has no default, or out of range.
        """
        if default is None and "num_speculative_tokens" not in self.values:
            raise ConfigError(
                "speculative_config: num_speculative_tokens is missing. Set the number of draft tokens, for instance 4."
            )
        return self.integer("num_speculative_tokens", default or 1, 1, MAX_SPECULATIVE_TOKENS)


class DraftMethod(ABC):
    """One method. Created without arguments whenever it is needed, so it keeps no state. Its module needs no torch.

    Its entry point has the name of the method. Where the method drafts with a model, another entry point may have the
    name of an architecture: a `model` whose config.json has it is drafted with by this method if none is named.

    Attributes:
        name: The method's name, where an entry point has that of an architecture.
        keys: Its keys of `speculative_config` besides COMMON_KEYS.
        summary: What it proposes, for messages: a phrase that follows "which".
    """

    name: ClassVar[str] = ""
    keys: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]

    @abstractmethod
    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        """Checks the settings.

        Raises:
            ConfigError: A setting is missing or out of range, or the method does not fit the served model.
            ModelError: A draft model cannot be found or is not usable.
        """
