"""The environment variables that core reads, and detection of misspelt ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

KNOWN_VARIABLES: dict[str, str] = {
    "MVLLM_PLATFORM": "Platform plugin to run on, where --platform or platform= does not say.",
    "MVLLM_PLUGINS": "Comma-separated packages or names that may plug in beside platforms and parts of mvllm; without "
    "it, all that are asked for may.",
    "MVLLM_API_KEY": "Key that requests to `mvllm serve` must carry; several, one per line.",
    "MVLLM_ADMIN_API_KEY": "Key for everything that `mvllm serve` offers, administration included.",
    "MVLLM_KV_TRANSFER_KEY": "Key that engines share which pass KV blocks to each other over TCP.",
    "MVLLM_CACHE_DIR": "Folder for what is derived from models and can be derived again, such as the configuration and "
    "tokenizer of GGUF files; by default `mvllm` in `$XDG_CACHE_HOME` or `~/.cache`.",
    "MVLLM_TORCH_PROFILER_DIR": "Folder of the traces that `LLM.start_profile` writes; by default "
    "`mvllm_profile` in the working directory.",
    "MVLLM_LOGGING_LEVEL": "Level of mvllm's log: DEBUG, INFO, WARNING or ERROR. Default: INFO; WARNING for chat, run, "
    "complete and generate.",
}
"""Description by name. Environment variables are for facts about a deployment; behaviour has settings."""


def unknown_variables(platforms: Iterable[str]) -> dict[str, str | None]:
    """Variables that begin with `MVLLM_` and are not known.

    Args:
        platforms: Names of installed platforms; variables beginning with `MVLLM_<NAME>_` belong to them.

    Returns:
        The nearest known name of each, or None.
    """
    owned = tuple(f"MVLLM_{name.upper().replace('-', '_')}_" for name in platforms)
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith("MVLLM_") and name not in KNOWN_VARIABLES and not (owned and name.startswith(owned))
    )
    return {name: next(iter(difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)), None) for name in unknown}


def describe_unknown(name: str, nearest: str | None) -> str:
    """One sentence about an unknown variable."""
    meant = f" Did you mean {nearest}?" if nearest else f" mvllm reads {', '.join(KNOWN_VARIABLES)}."
    return f"The environment variable {name} is not known and has no effect.{meant}"
