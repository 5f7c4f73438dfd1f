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


def unknown_variables(platforms: Iterable[str]) -> list[str]:
    """A sentence for each variable that begins with `MVLLM_` and is not known, with the nearest known one.

    Args:
        platforms: Names of installed platforms; variables beginning with `MVLLM_<NAME>_` belong to them.
    """
    owned = tuple(f"MVLLM_{name.upper().replace('-', '_')}_" for name in platforms)
    sentences = []
    for name in sorted(each for each in os.environ if each.startswith("MVLLM_") and each not in KNOWN_VARIABLES):
        if not owned or not name.startswith(owned):
            nearest = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"mvllm reads {', '.join(KNOWN_VARIABLES)}."
            sentences.append(f"The environment variable {name} is not known and has no effect. {hint}")
    return sentences
