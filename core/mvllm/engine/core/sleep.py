"""Sleep levels, and the tags of the memory that they release.

level 1   kv_cache            unfinished requests and the prefix cache are lost
          weights             host memory keeps them, with their version; on hosts with unified memory, and on platforms
                              without `Capabilities.weight_offloading`, they stay where they are
level 2   kv_cache, weights   the weights are read from the checkpoint again
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.errors import EngineSleepingError, RequestError

WEIGHTS, KV_CACHE = "weights", "kv_cache"

TAGS = (WEIGHTS, KV_CACHE)
"""All tags, in the order in which `wake_up` allocates them."""

SLEEP_LEVELS = (1, 2)


class ReleasedMemory:
    """What sleeps.

    Attributes:
        tags: The TAGS of the memory that is released.
    """

    def __init__(self) -> None:
        self.tags: tuple[str, ...] = ()

    def require_weights(self, purpose: str) -> None:
        """
        Args:
            purpose: What needs them: "calling decode_images".

        Raises:
            EngineSleepingError: The weights sleep.
        """
        if WEIGHTS in self.tags:
            raise EngineSleepingError(f"The weights sleep. Wake them up (wake_up) before {purpose}.")


def check_sleep_level(level: int) -> int:
    """Returns `level`.

    Raises:
        RequestError: `level` is neither 1 nor 2.
    """
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise RequestError(f"level must be 1 or 2, not {level!r:.40}.", parameter="level")
    return level


def check_wake_up_tags(tags: Sequence[str] | None) -> list[str]:
    """Returns `tags` as a list, empty for all.

    Raises:
        RequestError: `tags` is not a list of TAGS.
    """
    if tags is None:
        return []
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise RequestError(f"tags must be a list of {' and '.join(TAGS)}, not {tags!r:.60}.", parameter="tags")
    return list(tags)
