"""The stored responses that the processes of one server share in a file, if its settings name one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

from mvllm.entrypoints.openai.responses.store_file import end_interrupted, hold_store_file, store_limits
from mvllm.entrypoints.openai.server.settings import ServerSettings


def hold_stored_responses(settings: ServerSettings) -> AbstractContextManager[None]:
    """Holds the file for the processes of one server, and ends the responses that an earlier server left running.

    Raises:
        ConfigError: The file cannot be used, or another server holds it.
    """
    return hold_store_file(settings.responses_store, store_limits(settings))


def end_interrupted_responses(settings: ServerSettings, models: Collection[str]) -> None:
    """Ends the responses that an ended process of the server has left running in the file.

    Args:
        models: The names of the model that the process had.
    """
    if settings.responses_store is not None:
        end_interrupted(settings.responses_store, store_limits(settings), models)
