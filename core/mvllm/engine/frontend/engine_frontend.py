"""The base class of LLMEngine and AsyncLLM: their start, and the properties that both have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from mvllm.config.engine_config import EngineConfig, with_max_model_len
from mvllm.config.model import ModelConfig
from mvllm.config.tokenizer_check import check_tokenizer
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.engine_methods import AddedMethods
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.engine.frontend.pooling_input_processor import PoolingInputProcessor
from mvllm.engine.metrics.startup_timer import StartupTimer
from mvllm.engine.metrics.stat_loggers import StatLoggerManager
from mvllm.engine.metrics.stats import EngineMetrics
from mvllm.engine.process.core_client_properties import CoreClientProperties
from mvllm.engine.tokenizer.tokenizer import Tokenizer, load_tokenizer, require_tokenizer_files
from mvllm.errors import ConfigError
from mvllm.executor.process.process_utils import gc_paused
from mvllm.logging import get_logger
from mvllm.models.checkpoint_support import check_architecture, check_quantization
from mvllm.multimodal.early_checks import processor_problems
from mvllm.multimodal.processor_client import ProcessorClient
from mvllm.ops.provider_plugins import check_providers
from mvllm.platform.choose import ChosenPlatform, choose_platform
from mvllm.sampling.logits_processor import processor_classes
from mvllm.structured_output.output_validator import OutputValidator

logger = get_logger(__name__)


Client = TypeVar("Client", bound=CoreClientProperties)
MakeClient = Callable[[EngineConfig, ChosenPlatform, Callable[[EngineConfig], None]], Client]


class EngineFrontend(AddedMethods, Generic[Client]):
    """Starts an engine core and loads what the front end needs, at the same time if the core has its own process.

    Args:
        config: The requested configuration. The platform may change it; `config` afterwards is the one in use.
        make_client: Starts the engine core. Its third argument is called with the configuration in use while the core
            starts.
        client: An engine core to use instead of a new one.
        name: Prefix of this front end's request ids in the engine core.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started. No process or memory is left behind.
    """

    def __init__(
        self, config: EngineConfig, make_client: MakeClient[Client], client: Client | None = None, name: str = ""
    ) -> None:
        # Cheap checks come first, loading the weights last.
        self._startup_timer = StartupTimer()
        self._tokenizer: Tokenizer | None = None
        if client is None:
            check_config(config)
        with self._startup_timer.phase("platform"):
            chosen = choose_platform(config.platform) if client is None else None
        if chosen is not None:
            logger.info("Platform %s: %s.", chosen, chosen.reason)
        self._stat_loggers = StatLoggerManager(config)
        try:
            with gc_paused():
                if client is not None:
                    self._load_tokenizer(config)
                    self._client = client
                else:
                    self._client = make_client(config, cast(ChosenPlatform, chosen), self._load_tokenizer)
        except BaseException:
            self._stat_loggers.close()
            raise
        self._startup_timer.finish(getattr(self._client, "start_seconds", {}))
        self.config = self._client.config
        if self.config.model.max_model_len_is_auto:  # all replicas have room for at least this length
            self.config = with_max_model_len(self.config, self._client.cache_summary.max_model_len)
        runs_functions = getattr(self._client, "runs_functions", False)
        if self.config.multimodal.refusal is None:
            for problem in processor_problems(self.config.model):
                logger.warning("%s", problem)
        self.metrics = EngineMetrics(self.config.model.max_model_len)
        self.item_client = ProcessorClient(self.config.model, self.config.multimodal, self.metrics)
        self.input_processor = InputProcessor(
            self.config, self._tokenizer, runs_functions=runs_functions, item_client=self.item_client
        )
        self.pooling_input_processor = PoolingInputProcessor(self.config, self._tokenizer, item_client=self.item_client)
        self._lora_validator = LoRARequestValidator(self.config)
        self._output_processor = OutputProcessor(self._tokenizer, CoreRequestIds(name))
        self._output_validator = OutputValidator()

    def _close_frontend(self) -> None:
        """Ends the processes and files of the front end. Idempotent."""
        self._output_validator.close()
        self.item_client.close()
        self._stat_loggers.close()

    @property
    @abstractmethod
    def state(self) -> str:
        """`ready`, `asleep`, `stopped by an error` or `closed`."""

    def __repr__(self) -> str:
        platform = self.platform_summary.partition(",")[0]
        return f"{type(self).__name__}({self.config.model.model!r}, platform {platform}, {self.state})"

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds per start-up phase, and from the first request to its first token, as in the log."""
        return dict(self._startup_timer.seconds)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration in use."""
        return self.config.model

    @property
    def platform_summary(self) -> str:
        """The platform's name and the plugin that provides it."""
        return self._client.platform_summary

    @property
    def cache_summary(self) -> KVCacheSummary:
        """The size of the KV cache; with several replicas, of the smallest one."""
        return self._client.cache_summary

    @property
    def num_workers(self) -> int:
        """The number of workers, of all replicas. Each may drive several devices. A trainer's process group has one
        rank for each of them, and one for the trainer."""
        return self._client.num_workers

    @property
    def has_tokenizer(self) -> bool:
        """Whether outputs can have text."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer wrapper that the engine uses.

        Raises:
            ConfigError: The engine was started with `skip_tokenizer_init`.
        """
        if self._tokenizer is None:
            raise ConfigError("There is no tokenizer: the engine was started with skip_tokenizer_init=True.")
        return self._tokenizer

    def _load_tokenizer(self, config: EngineConfig) -> None:
        with self._startup_timer.phase("tokenizer"):
            self._tokenizer = load_tokenizer(config.model)
            if self._tokenizer is not None:
                name = f"The tokenizer of {config.model.tokenizer}"
                check_tokenizer(config.model.vocab_size, self._tokenizer.length, tokenizer=name)


def check_config(config: EngineConfig) -> None:
    """Checks what needs no platform: architecture, quantization, tokenizer, op providers and logits processors.

    Raises:
        ConfigError, ModelError: One of them is not supported or not installed.
    """
    check_architecture(config.model)
    check_quantization(config.model, config.load.load_format)
    require_tokenizer_files(config.model)
    check_providers(config.op_providers)
    processor_classes(config.logits_processors)
