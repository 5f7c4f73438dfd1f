"""The start of a front end: what LLMEngine and AsyncLLM have in common until an engine core answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

from mvllm.config.engine_config import EngineConfig
from mvllm.config.tokenizer_check import check_tokenizer
from mvllm.engine.frontend.tokenizer import Tokenizer, load_tokenizer
from mvllm.engine.metrics.startup_timer import StartupTimer
from mvllm.engine.metrics.stat_loggers import StatLoggerManager
from mvllm.errors import ConfigError
from mvllm.executor.process.process_utils import gc_paused
from mvllm.logging import get_logger
from mvllm.models.checkpoint_support import check_architecture, check_quantization
from mvllm.ops.provider_plugins import check_providers
from mvllm.platform.choose import ChosenPlatform, choose_platform
from mvllm.sampling.logits_processor import processor_classes

logger = get_logger(__name__)

Client = TypeVar("Client")
MakeClient = Callable[[EngineConfig, ChosenPlatform, Callable[[EngineConfig], None]], Client]


def check_config(config: EngineConfig) -> None:
    """Refuses what no platform could run.

    Raises:
        ConfigError, ModelError: Says what is not offered.
    """
    check_architecture(config.model)
    check_quantization(config.model, config.load.load_format)
    check_providers(config.op_providers)
    processor_classes(config.logits_processors)


class FrontendStartup(Generic[Client]):
    """Loads what the front end needs, beside an engine core that starts.

    Args:
        config: What was asked for.
        make_client: Starts the engine core; is given what this process has to do meanwhile.
        client: The engine core to use in place of one that is started.

    Attributes:
        phases: Seconds per phase of the start.
        tokenizer: The model's, or None where there is to be none.
        stat_loggers: Those that the configuration names.
        client: The engine core's.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked. Nothing stays behind.
    """

    def __init__(self, config: EngineConfig, make_client: MakeClient[Client], client: Client | None = None) -> None:
        # The cheapest reasons to fail come first, and the weights last.
        self.phases = phases = StartupTimer()
        self.tokenizer: Tokenizer | None = None
        if client is None:
            check_config(config)
        with phases.phase("platform"):
            chosen = choose_platform(config.platform) if client is None else None
        if chosen is not None:
            logger.info("Platform %s: %s.", chosen, chosen.reason)
        self.stat_loggers = StatLoggerManager(config)
        try:
            with gc_paused():
                if client is not None:
                    self._load_tokenizer(config)
                    self.client = client
                else:
                    self.client = make_client(config, cast(ChosenPlatform, chosen), self._load_tokenizer)
        except BaseException:
            self.stat_loggers.close()
            raise
        phases.finish(getattr(self.client, "start_seconds", {}))

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: There is to be none.
        """
        if self.tokenizer is None:
            raise ConfigError("There is no tokenizer: the engine was started with skip_tokenizer_init=True.")
        return self.tokenizer

    def _load_tokenizer(self, config: EngineConfig) -> None:
        """While the engine core starts, if that has a process of its own."""
        with self.phases.phase("tokenizer"):
            self.tokenizer = load_tokenizer(config.model)
            if self.tokenizer is not None:
                name = f"The tokenizer of {config.model.tokenizer}"
                check_tokenizer(config.model.vocab_size, self.tokenizer.length, tokenizer=name)
