"""Stat loggers: plugins that receive the engine's statistics after every step.

An entry point of the group `mvllm.stat_loggers` names a StatLogger class, or a function that returns one. It is called
with the engine's configuration if the setting `stat_loggers` names it. Stat loggers run in the front end between two
steps, so slow work belongs in a thread of their own. A stat logger that raises is reported in the log and not called
again; the engine continues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.requests import SchedulerStats
from mvllm.platform import plugin_groups
from mvllm.platform.discovery import PluginSource

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
    """The stat loggers that a configuration names.

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
        """Tells every logger of one step."""
        for entry in list(self._loggers):
            source, one = entry
            try:
                one.record(stats, num_new_tokens)
            except Exception as e:
                self._loggers.remove(entry)
                logger.error("The stat logger %s failed and is not called again.", source, exc_info=e)
                _close(source, one)

    def close(self) -> None:
        """Closes all of them. Idempotent."""
        while self._loggers:
            _close(*self._loggers.pop())


def _make(name: str, config: EngineConfig) -> tuple[PluginSource, StatLogger]:
    source, factory = plugin_groups.load_plugin_by_name(plugin_groups.STAT_LOGGERS, name)
    try:
        made = factory(config)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(f"The stat logger {source} cannot be made: {type(e).__name__}: {e}") from e
    if not isinstance(made, StatLogger):
        raise ConfigError(f"{source} must give a mvllm.extension_api.StatLogger, got {made!r}.")
    return source, made


def _close(source: PluginSource, one: StatLogger) -> None:
    try:
        one.close()
    except Exception as e:
        logger.error("The stat logger %s failed as it was closed.", source, exc_info=e)
