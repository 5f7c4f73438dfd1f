"""The other doors: what may plug in beside platforms, each through an entry point, none of it by being installed.

The idea: a door opens only to a name that somebody asked for (an architecture in a checkpoint, an executor or a logger
in the settings, a subcommand on the command line). Looking who stands there reads metadata and imports nothing; whoever
is let in and stumbles is named, with the distribution, the version and the error. `MVLLM_PLUGINS` narrows all of them.

    installed ──MVLLM_PLUGINS──> allowed ──asked for by name──> imported ──> used, or an error that names it

Platforms have a door of their own (`mvllm.platform.discovery`): one is chosen, and no other matters.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from mvllm.errors import ConfigError
from mvllm.platform.discovery import PluginSource

ENVIRONMENT_VARIABLE = "MVLLM_PLUGINS"


@dataclass(frozen=True)
class PluginGroup:
    """A kind of thing that may plug in.

    Attributes:
        group: The group of entry points.
        noun: What one of them is called in messages.
    """

    group: str
    noun: str


MODELS = PluginGroup("mvllm.models", "model")
EXECUTORS = PluginGroup("mvllm.executors", "executor")
OP_PROVIDERS = PluginGroup("mvllm.op_providers", "set of op providers")
STAT_LOGGERS = PluginGroup("mvllm.stat_loggers", "stat logger")
COMMANDS = PluginGroup("mvllm.cli", "command")
QUANTIZATION = PluginGroup("mvllm.quantization", "quantization method")
TOOL_PARSERS = PluginGroup("mvllm.tool_parsers", "tool parser")
REASONING_PARSERS = PluginGroup("mvllm.reasoning_parsers", "reasoning parser")
HTTP = PluginGroup("mvllm.http", "HTTP plugin")
LOGITS_PROCESSORS = PluginGroup("mvllm.logits_processors", "logits processor")

ALL = (
    MODELS,
    QUANTIZATION,
    EXECUTORS,
    OP_PROVIDERS,
    LOGITS_PROCESSORS,
    STAT_LOGGERS,
    COMMANDS,
    TOOL_PARSERS,
    REASONING_PARSERS,
    HTTP,
)


def allow_list() -> frozenset[str] | None:
    """Distributions and names that `MVLLM_PLUGINS` lets in, lower case; None where it is not set and all may come."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if text is None else frozenset(part.strip().lower() for part in text.split(",") if part.strip())


def list_plugins(door: PluginGroup) -> list[PluginSource]:
    """Everything that stands at a door, allowed or not, by name. Imports nothing of it."""
    found = {
        PluginSource(
            name=ep.name,
            entry_point=ep.value,
            distribution=ep.dist.name if ep.dist else "unknown distribution",
            version=ep.dist.version if ep.dist else "unknown version",
        )
        for ep in importlib.metadata.entry_points(group=door.group)
    }
    return sorted(found, key=lambda s: (s.name, s.distribution, s.version))


def is_allowed(source: PluginSource) -> bool:
    """Whether `MVLLM_PLUGINS` lets it in, by its own name or its distribution's."""
    allowed = allow_list()
    return allowed is None or bool({source.name.lower(), source.distribution.lower()} & allowed)


def allowed_names(door: PluginGroup) -> tuple[str, ...]:
    """Names that may be asked for, sorted. Imports nothing."""
    return tuple(sorted({source.name for source in list_plugins(door) if is_allowed(source)}))


def find(door: PluginGroup, name: str) -> PluginSource | None:
    """Who offers `name`; None where nobody does. Imports nothing.

    Raises:
        ConfigError: Somebody does who is not let in, or several do.
    """
    owners = [source for source in list_plugins(door) if source.name == name]
    let_in = [source for source in owners if is_allowed(source)]
    if len(let_in) > 1:
        listed = "; ".join(map(str, let_in))
        raise ConfigError(
            f"The {door.noun} {name!r} is offered by {len(let_in)} installed packages: {listed}. Uninstall all but "
            f"one, or name the one that is meant in {ENVIRONMENT_VARIABLE}."
        )
    if owners and not let_in:
        listed = ", ".join(sorted(allow_list() or ())) or "nothing"
        raise ConfigError(
            f"The {door.noun} {name!r} is offered by {owners[0]}, which {ENVIRONMENT_VARIABLE} does not let in (it lets"
            f" in: {listed}). Add {owners[0].distribution} if you trust that package."
        )
    return let_in[0] if let_in else None


def load(door: PluginGroup, source: PluginSource) -> Any:
    """Imports what an entry point names.

    Raises:
        ConfigError: It cannot be imported; names the distribution, and keeps the cause.
    """
    try:
        return importlib.metadata.EntryPoint(source.name, source.entry_point, door.group).load()
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(
            f"The {door.noun} {source.name!r} is {source.entry_point} of {source.distribution} {source.version}, which "
            f"cannot be loaded: {type(e).__name__}: {e}. Run: pip install -U {source.distribution}"
        ) from e


def require(door: PluginGroup, name: str) -> PluginSource:
    """Who offers `name`. Imports nothing.

    Raises:
        ConfigError: Nobody does, or nobody who is let in.
    """
    source = find(door, name)
    if source is None:
        raise ConfigError(
            f"No installed package offers a {door.noun} {name!r} (entry points of {door.group}). "
            f"There are: {', '.join(allowed_names(door)) or 'none'}."
        )
    return source


def load_plugin_by_name(door: PluginGroup, name: str) -> tuple[PluginSource, Any]:
    """What is offered under a name, and by whom.

    Raises:
        ConfigError: Nobody offers it, it is not let in, or it cannot be imported.
    """
    source = require(door, name)
    return source, load(door, source)
