"""run_to_end: awaits a coroutine that runs on if the caller is cancelled.

For changes of an engine's state in several steps. A client that leaves between two of them, or a timeout, would leave
the front end and the engine core with different states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from mvllm.logging import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")

_running: set[asyncio.Task[Any]] = set()  # the event loop itself keeps no task alive


async def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine. If the caller is cancelled it runs on, and an error of it is logged."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("A call whose caller was cancelled has failed: %s: %s", type(error).__name__, error)
