"""EngineArgs: the user's settings, and their conversion to an EngineConfig.

Each setting is declared once, with its help, group and permitted values. The command line is generated from these
declarations (`EngineArgs.options()`), and `create_engine_config` checks values against them before it reads any file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.engine_config import EngineConfig
from mvllm.config.engine_config_builder import build_engine_config
from mvllm.config.engine_settings import EngineSettings
from mvllm.config.foreign_keywords import engine_keywords, find_foreign
from mvllm.config.generation_config import find_generation_folder
from mvllm.config.hf_config import HFConfig
from mvllm.config.hub import find_model, find_tokenizer
from mvllm.config.keyword_arguments import accepts_every_name, class_path
from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import build_model_config
from mvllm.config.option import Option, options_of
from mvllm.config.option_arguments import add_foreign_options, add_option
from mvllm.config.setting_combinations import check_combinations
from mvllm.config.speculative import read_speculative_config
from mvllm.errors import ConfigError

P = TypeVar("P", bound=argparse.ArgumentParser | argparse._ArgumentGroup)


@accepts_every_name
@dataclass
class EngineArgs(EngineSettings):
    """Keyword arguments of the engine. Aliases and keywords of other engines (`foreign_keywords`) are accepted, too."""

    _given_names: ClassVar[Mapping[str, str]] = {}
    """The aliases among the keywords, by setting, for messages."""

    def __post_init__(self) -> None:
        if self.max_model_len == -1:
            self.max_model_len = "auto"
        for name in ("model", "tokenizer", "generation_config"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                setattr(self, name, os.fspath(value))
        processors: Any = self.logits_processors
        if isinstance(processors, list | tuple):
            self.logits_processors = ",".join(map(class_path, processors)) or None
        hosts: Any = self.allowed_media_domains
        if isinstance(hosts, list | tuple):
            self.allowed_media_domains = ",".join(map(str, hosts)) or None
        self.dtype = str(self.dtype).removeprefix("torch.")  # a torch.dtype is permitted

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Creates and checks the settings.

        Raises:
            ConfigError: A keyword does not exist (a similar one is named), is given under two names with different
                values, or has a value that is not permitted.
        """
        if kwargs.get("model") is None:
            raise ConfigError("model must be given: a folder, a GGUF file, a name from the hub, or 'demo'; found None.")
        args = cls(**kwargs)
        args.validate()
        return args

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Adds one option per setting to a parser or an argument group, with the settings' defaults; returns it.

        Keywords of other engines are added as hidden options. Use the parsed values as `EngineArgs.from_cli_args(args)`
        or `LLM(**vars(args))`.
        """
        for setting in cls.options():
            add_option(parser, setting, None if setting.default is dataclasses.MISSING else setting.default)
        add_foreign_options(parser, engine_keywords())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The settings among the parsed values of a command line. Others, such as the script's own, are left out.

        Raises:
            ConfigError: A value is not permitted, or no model is given.
        """
        names, foreign = {setting.name for setting in cls.options()}, engine_keywords()
        given = {name: value for name, value in vars(args).items() if name in names or find_foreign(name, foreign)}
        return cls.from_kwargs(**given)

    @classmethod
    @functools.cache
    def options(cls) -> tuple[Option, ...]:
        """Every setting, in the order of declaration."""
        return options_of(cls)

    def validate(self) -> None:
        """Converts and checks every value, and checks values that depend on each other.

        Raises:
            ConfigError: A value is not permitted; names the setting, the value and what is permitted.
        """
        for setting in self.options():
            name = self._given_names.get(setting.name, setting.name)
            setattr(self, setting.name, setting.checked(getattr(self, setting.name), name))
        check_combinations(self)

    def create_engine_config(self) -> EngineConfig:
        """Finds the model, reads its config and creates the configuration, except what depends on the device.

        Raises:
            ConfigError: A setting is not permitted, alone or together with the others or the model.
            ModelError: The model cannot be found or is not usable.
        """
        model = self.create_model_config()
        if self.language_model_only:
            model = dataclasses.replace(model, multimodal=None)
        return build_engine_config(self, model, self._speculative_config(model))

    def create_model_config(self) -> ModelConfig:
        """The model's part of the configuration.

        Raises:
            ConfigError, ModelError: As `create_engine_config`.
        """
        self.validate()
        folder = self._model_folder()
        return build_model_config(
            model=self.model,
            folder=folder,
            tokenizer=self._tokenizer_folder(folder),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            hf_overrides=self.hf_overrides,
            generation_config=find_generation_folder(self.generation_config, folder),
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,
            trust_remote_code=self.trust_remote_code,
            model_impl=self.model_impl,
            revision=self.revision,
            seed=self.seed,
            quantization=self.quantization,
            pooler_config=self.pooler_config,
        )

    def _model_folder(self) -> Path:
        return find_model(
            self.model,
            revision=self.revision,
            token=self.hf_token,
            trust_remote_code=self.trust_remote_code,
            with_weights=self.load_format != "dummy",
            with_tokenizer=self._has_models_tokenizer(),
            load_format=self.load_format,
        )

    def _speculative_config(self, target: ModelConfig) -> SpeculativeConfig | None:
        def other(name: str, revision: str | None) -> EngineArgs:
            return dataclasses.replace(
                self,
                model=name,
                revision=revision,
                quantization=None,
                skip_tokenizer_init=True,
                max_model_len=None,
                hf_overrides=None,
                generation_config="none",
                pooler_config=None,
                speculative_config=None,
                load_format="dummy" if self.load_format == "dummy" else "auto",  # the draft may have the other form
            )

        def build(
            name: str, revision: str | None, quantization: str | None, hf_overrides: Mapping[str, Any] | None = None
        ) -> ModelConfig:
            overrides = None if hf_overrides is None else dict(hf_overrides)
            changed = dataclasses.replace(other(name, revision), quantization=quantization, hf_overrides=overrides)
            return changed.create_model_config()

        def read(name: str, revision: str | None) -> HFConfig:
            return HFConfig.load(other(name, revision)._model_folder())

        return read_speculative_config(
            self.speculative_config, build, read, target, with_weights=self.load_format != "dummy"
        )

    def _has_models_tokenizer(self) -> bool:
        if self.skip_tokenizer_init:
            return False
        return self.tokenizer is None or (self.tokenizer == self.model and self.tokenizer_revision is None)

    def _tokenizer_folder(self, model_folder: Path) -> str | None:
        if self._has_models_tokenizer():
            return str(model_folder)
        if self.skip_tokenizer_init or self.tokenizer is None:
            return None
        # The model's revision applies to a tokenizer of the same repository.
        revision = self.tokenizer_revision or (self.revision if self.tokenizer == self.model else None)
        found = find_tokenizer(
            self.tokenizer, revision=revision, token=self.hf_token, trust_remote_code=self.trust_remote_code
        )
        return str(found)


AsyncEngineArgs = EngineArgs
"""EngineArgs under the name that programs with an asynchronous engine use."""
