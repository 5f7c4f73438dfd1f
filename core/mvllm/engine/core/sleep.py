"""What can be given back while an engine sleeps, and how callers name it.

level 1   kv_cache            the prompts and texts that were under way
level 2   kv_cache, weights   the model itself, which the checkpoint still has
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.errors import RequestError

WEIGHTS, KV_CACHE = "weights", "kv_cache"

LONG_RUNNING_METHODS = frozenset({"sleep", "wake_up"})
"""The core's methods that may take as long as its start: no step has to be over by then."""

TAGS = (WEIGHTS, KV_CACHE)
"""In the order in which they are claimed again."""

SLEEP_LEVELS = {1: (KV_CACHE,), 2: TAGS}
"""What each level gives back."""


def check_sleep_level(level: int) -> int:
    """Returns `level`.

    Raises:
        RequestError: There is no such level.
    """
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise RequestError(f"There are levels 1 and 2 of sleep; found {level!r:.40}.", parameter="level")
    return level


def check_wake_up_tags(tags: Sequence[str] | None) -> list[str]:
    """What is to be claimed again; empty for all.

    Raises:
        RequestError: There is no such tag.
    """
    if tags is None:
        return []
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise RequestError(f"tags is a list of {' and '.join(TAGS)}; found {tags!r:.60}.", parameter="tags")
    return list(tags)
