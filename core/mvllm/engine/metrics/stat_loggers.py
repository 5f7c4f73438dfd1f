"""Stat loggers: plugins that receive the engine's statistics after every step.

An entry point of the group `mvllm.stat_loggers` names a StatLogger class, or a function that returns one. It is called
with the engine's configuration if the setting `stat_loggers` names it. Stat loggers run in the front end between two
steps, so a slow one should use a separate thread. If a stat logger raises, the error is logged and it is not called
again; the engine continues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mvllm import plugin_groups
from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.requests import SchedulerStats
from mvllm.plugin_groups import PluginSource

logger = get_logger(__name__)


class StatLogger(ABC):
    """Receives the statistics of one engine. Used from the thread that runs the engine's steps.

    Args:
        config: The requested configuration, before the platform may have changed it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, stats: SchedulerStats, num_new_tokens: int) -> None:
        """Records one step.

        Args:
            stats: The scheduler's state after the step; counters since the start.
            num_new_tokens: Tokens generated in the step, over all requests.
        """

    def close(self) -> None:
        """Releases resources; called once."""


class StatLoggerManager:
    """Creates, calls and closes the stat loggers that the setting `stat_loggers` names.

    Raises:
        ConfigError: One is not installed, not allowed, or raises in its constructor; the message names its package.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._loggers: list[tuple[PluginSource, StatLogger]] = []
        try:
            for name in config.stat_loggers:
                self._loggers.append(_make(name, config))
        except BaseException:
            self.close()
            raise

    def record(self, stats: SchedulerStats, num_new_tokens: int) -> None:
        """Passes the statistics of one step to every stat logger."""
        for entry in list(self._loggers):
            source, stat_logger = entry
            try:
                stat_logger.record(stats, num_new_tokens)
            except Exception as e:
                self._loggers.remove(entry)
                logger.error("The stat logger %s failed and is not called again.", source, exc_info=e)
                _close(source, stat_logger)

    def close(self) -> None:
        """Closes all stat loggers. Idempotent."""
        while self._loggers:
            _close(*self._loggers.pop())


def _make(name: str, config: EngineConfig) -> tuple[PluginSource, StatLogger]:
    source, factory = plugin_groups.load_plugin_by_name(plugin_groups.STAT_LOGGERS, name)
    try:
        stat_logger = factory(config)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(f"The constructor of the stat logger {source} raised {type(e).__name__}: {e}") from e
    if not isinstance(stat_logger, StatLogger):
        raise ConfigError(f"{source} must return a mvllm.extension_api.StatLogger, not {stat_logger!r}.")
    return source, stat_logger


def _close(source: PluginSource, stat_logger: StatLogger) -> None:
    try:
        stat_logger.close()
    except Exception as e:
        logger.error("The stat logger %s raised an error in close().", source, exc_info=e)
