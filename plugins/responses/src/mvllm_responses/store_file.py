"""The file of the store, held by one server at a time. What a server leaves unfinished is ended at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Collection, Iterator

from mvllm.extension_api import ConfigError, get_logger
from mvllm.extension_api.http import ServerSettings, key_digest
from mvllm_responses.database import ResponseDatabase, StoreLimits
from mvllm_responses.settings import ResponsesSettings

logger = get_logger("mvllm.responses.store_file")

INTERRUPTED = "The server ended before the response was complete. Send the request again."
"""The error of a background response whose server has ended."""


@contextlib.contextmanager
def hold_store_file(path: str | None, limits: StoreLimits) -> Iterator[None]:
    """Holds the file for the processes of one server, and ends the responses that an earlier server left running.

    Args:
        path: None has no effect.

    Raises:
        ConfigError: The file cannot be used, or another server holds it.
    """
    if path is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, lock)  # the lock is the descriptor's: it ends with this process, however it ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(
                f"Another server uses the store of responses {path!r}. Name another file (--responses-store), or end "
                "that server; the API servers of one server (--api-server-count) share a file."
            ) from e
        except OSError as e:
            raise ConfigError(
                f"The store of responses {path!r} cannot be used: {e}. Name a file that this server may create and "
                "write (--responses-store)."
            ) from e
        with contextlib.closing(ResponseDatabase(path, limits)) as database:
            num = database.fail_interrupted(INTERRUPTED)
            num_objects, num_bytes = database.totals()
        logger.info(
            "The store of responses %s has %d responses and conversations in %.1f MB; %d were interrupted.",
            path,
            num_objects,
            num_bytes / 1e6,
            num,
        )
        yield


def end_interrupted(path: str, limits: StoreLimits, models: Collection[str]) -> None:
    """Ends the responses that a process of a server that holds the file has left running.

    Args:
        models: The names of the model that the process had.
    """
    try:
        with contextlib.closing(ResponseDatabase(path, limits)) as database:
            num = database.fail_interrupted(INTERRUPTED, models)
    except (ConfigError, sqlite3.Error) as e:
        logger.error("Interrupted responses in the store %s cannot be ended: %s", path, e)
        return
    if num:
        logger.info("%d stored responses of the model %s were interrupted.", num, next(iter(models)))


def store_limits(server: ServerSettings, settings: ResponsesSettings) -> StoreLimits:
    """The limits of the store of a server."""
    return StoreLimits(
        settings.max_stored_responses,
        settings.max_stored_bytes,
        settings.max_stored_seconds,
        _owners(server),
    )


def _owners(settings: ServerSettings) -> frozenset[bytes | None]:
    """The owners that objects may have."""
    keys: set[bytes | None] = set(map(key_digest, (*settings.api_keys, *settings.admin_api_keys)))
    return frozenset(keys if settings.api_keys else keys | {None})
