"""Plugin groups: the entry points through which packages add models, executors, parsers and more, but not platforms.

A plugin is imported only when its name is requested (an architecture in a checkpoint, an executor or a logger in the
settings, a subcommand on the command line). Listing plugins reads metadata and imports nothing. The error of a plugin
that fails names its distribution and version. `MVLLM_PLUGINS` restricts the packages of others to an allow list.

    installed ──MVLLM_PLUGINS──> allowed ──requested by name──> imported ──> used, or an error that names it

`mvllm.platform.discovery` finds platforms, of which one is chosen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mvllm.errors import ConfigError
from mvllm.installable import installable_parts, missing_part
from mvllm.installation import install_command
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = get_logger(__name__)

_Base = TypeVar("_Base")

ENVIRONMENT_VARIABLE = "MVLLM_PLUGINS"


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin was found, known before anything of it is imported.

    Attributes:
        name: The entry point's name, which users type.
        entry_point: Its value, `package.module`.
        distribution, version: The installed distribution it belongs to.
    """

    name: str
    entry_point: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.name} = {self.entry_point})"


@dataclass(frozen=True)
class PluginGroup:
    """One kind of plugin.

    Attributes:
        group: The group of entry points.
        noun: Name of the kind in messages.
        part: The part of mvllm that brings plugins of this kind, for the error of one that no installed package has.
        wanted: What needs the part, in that error; by default a plugin of this kind.
    """

    group: str
    noun: str
    part: str | None = None
    wanted: str | None = None


MODELS = PluginGroup("mvllm.models", "model")
MODEL_TYPES = PluginGroup("mvllm.model_types", "model type")
MODEL_IMPLS = PluginGroup("mvllm.model_impls", "model implementation")
EXECUTORS = PluginGroup("mvllm.executors", "executor")
OP_PROVIDERS = PluginGroup("mvllm.op_providers", "set of op providers")
STAT_LOGGERS = PluginGroup("mvllm.stat_loggers", "stat logger")
COMMANDS = PluginGroup("mvllm.cli", "command")
SERVE = PluginGroup("mvllm.serve", "addition to `mvllm serve`")
QUANTIZATION = PluginGroup("mvllm.quantization", "quantization method")
TOOL_PARSERS = PluginGroup("mvllm.tool_parsers", "tool parser", part="parsers")
REASONING_PARSERS = PluginGroup("mvllm.reasoning_parsers", "reasoning parser", part="parsers")
PARSER_RULES = PluginGroup("mvllm.parser_rules", "set of parser rules", part="parsers")
HTTP = PluginGroup("mvllm.http", "HTTP plugin")
LOGITS_PROCESSORS = PluginGroup("mvllm.logits_processors", "logits processor")
REQUEST_PAIRS = PluginGroup("mvllm.request_pairs", "kind of request pairs")
LOGITS_COMBINERS = PluginGroup("mvllm.logits_combiners", "logits combiner")
KV_CONNECTORS = PluginGroup("mvllm.kv_connectors", "KV connector", part="kv-transfer")
FOREIGN_KEYWORDS = PluginGroup(
    "mvllm.foreign_keywords", "set of keywords of other engines", part="compat", wanted="A keyword of another engine"
)
CHECKPOINT_FORMATS = PluginGroup("mvllm.checkpoint_formats", "checkpoint format")
WORKERS = PluginGroup("mvllm.workers", "worker", part="graph")
PROPOSERS = PluginGroup("mvllm.proposers", "method of proposing draft tokens", part="drafts")
ALIASES = PluginGroup("mvllm.aliases", "module of mvllm")
ENGINE_METHODS = PluginGroup("mvllm.engine_methods", "method of LLM and AsyncLLM")

ALL = (
    MODELS,
    MODEL_TYPES,
    MODEL_IMPLS,
    CHECKPOINT_FORMATS,
    QUANTIZATION,
    EXECUTORS,
    WORKERS,
    OP_PROVIDERS,
    LOGITS_PROCESSORS,
    REQUEST_PAIRS,
    LOGITS_COMBINERS,
    PROPOSERS,
    KV_CONNECTORS,
    STAT_LOGGERS,
    COMMANDS,
    SERVE,
    TOOL_PARSERS,
    REASONING_PARSERS,
    PARSER_RULES,
    HTTP,
    FOREIGN_KEYWORDS,
    ALIASES,
    ENGINE_METHODS,
)


def allow_list() -> frozenset[str] | None:
    """Distributions and names that `MVLLM_PLUGINS` allows, in lower case; None if it is not set, which allows all."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if text is None else frozenset(part.strip().lower() for part in text.split(",") if part.strip())


def list_plugins(group: PluginGroup) -> list[PluginSource]:
    """All installed plugins of a group, allowed or not, sorted by name. Imports none of them."""
    import importlib.metadata  # by processes that list plugins

    folders = tuple((folder, _modified(folder)) for folder in sys.path)
    return list(_plugins(group.group, importlib.metadata.entry_points, folders))


@functools.lru_cache(maxsize=64)
def _plugins(
    group: str, entry_points: Callable[..., Iterable[EntryPoint]], folders: tuple[tuple[str, int], ...]
) -> tuple[PluginSource, ...]:
    """The plugins of a group. Reading the metadata of all packages takes milliseconds, so it is kept.

    Args:
        group: The group of entry points.
        entry_points: Lists those of a group.
        folders: The search path, with the modification time of each folder: installing a package changes one.
    """
    found = set()
    for ep in entry_points(group=group):
        # An interrupted installation leaves a folder without metadata, whose own name is that of the distribution.
        folder = getattr(ep.dist, "_normalized_name", "unknown distribution").replace("_", "-")
        name, version = (ep.dist.name, ep.dist.version) if ep.dist else (None, None)
        found.add(PluginSource(ep.name, ep.value, name or folder, version or "unknown version"))
    return tuple(sorted(found, key=lambda s: (s.name, s.distribution, s.version)))


def _modified(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def is_allowed(source: PluginSource) -> bool:
    """Whether `MVLLM_PLUGINS` allows a plugin, by its name or its distribution's. Parts of mvllm are always allowed."""
    allowed = allow_list()
    if allowed is None or {source.name.lower(), source.distribution.lower()} & allowed:
        return True
    return source.distribution.lower() in installable_parts().values()


def allowed_names(group: PluginGroup) -> tuple[str, ...]:
    """Names of the allowed plugins of a group, sorted. Imports nothing."""
    return tuple(sorted({source.name for source in list_plugins(group) if is_allowed(source)}))


def find(group: PluginGroup, name: str) -> PluginSource | None:
    """The plugin of that name; None if there is none. Imports nothing.

    Of several, it is that of the package that `MVLLM_PLUGINS` lists, or else that of a part of mvllm, with a warning.

    Raises:
        ConfigError: The plugin is not allowed, or several have the name.
    """
    owners = [source for source in list_plugins(group) if source.name == name]
    let_in = [source for source in owners if is_allowed(source)]
    if len(let_in) > 1:
        if (chosen := preferred(let_in)) is not None:
            if chosen.distribution.lower() not in (allow_list() or ()):
                others = "; ".join(str(source) for source in let_in if source != chosen)
                logger.warning("The %s %r is that of %s, and not of %s.", group.noun, name, chosen, others)
            return chosen
        listed = "; ".join(map(str, let_in))
        raise ConfigError(
            f"The {group.noun} {name!r} is offered by {len(let_in)} installed packages: {listed}. Uninstall all but "
            f"one, or name the one that is meant in {ENVIRONMENT_VARIABLE}."
        )
    if owners and not let_in:
        listed = ", ".join(sorted(allow_list() or ())) or "nothing"
        raise ConfigError(
            f"The {group.noun} {name!r} is offered by {owners[0]}, which {ENVIRONMENT_VARIABLE} does not let in (it "
            f"lets in: {listed}). Add {owners[0].distribution} if you trust that package."
        )
    return let_in[0] if let_in else None


def preferred(sources: Sequence[PluginSource]) -> PluginSource | None:
    """Which of several allowed plugins of one name is meant: see `find`. None if that is not clear."""
    if len(sources) == 1:
        return sources[0]
    for packages in (allow_list() or (), installable_parts().values()):
        chosen = [source for source in sources if source.distribution.lower() in packages]
        if len(chosen) == 1:
            return chosen[0]
    return None


def load(group: PluginGroup, source: PluginSource) -> Any:
    """Imports the object of an entry point.

    Raises:
        ConfigError: It cannot be imported; names the distribution, and keeps the cause.
    """
    import importlib.metadata

    try:
        return importlib.metadata.EntryPoint(source.name, source.entry_point, group.group).load()
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(
            f"The {group.noun} {source.name!r} is {source.entry_point} of {source.distribution} {source.version}, "
            f"which cannot be loaded: {type(e).__name__}: {e}. "
            f"Run: {install_command(source.distribution, upgrade=True)}"
        ) from e


def load_class(group: PluginGroup, source: PluginSource, base: type[_Base], published: str) -> type[_Base]:
    """Imports the class of an entry point.

    Args:
        base: The class that it must be derived from.
        published: The base class as plugins import it, below `mvllm.extension_api`.

    Raises:
        ConfigError: It cannot be imported, is no subclass of the base class, or lacks methods of it.
    """
    found = load(group, source)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{source} must name a subclass of mvllm.extension_api.{published}, found {found!r}.")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{source} lacks methods of {base.__name__}: {', '.join(missing)}.")
    return found


def require(group: PluginGroup, name: str) -> PluginSource:
    """The plugin of that name. Imports nothing.

    Raises:
        ConfigError: No installed plugin has the name, it is not allowed, or several have the name.
    """
    source = find(group, name)
    if source is None:
        raise ConfigError(
            f"No installed package offers a {group.noun} {name!r} (entry points of {group.group}). "
            f"There are: {', '.join(allowed_names(group)) or 'none'}.{missing_part_of(group)}"
        )
    return source


def missing_part_of(group: PluginGroup) -> str:
    """A space and a sentence with the package of the group's part; empty if that is installed, or there is none."""
    package = installable_parts().get(group.part or "")
    if package is None or package in {source.distribution for source in list_plugins(group)}:
        return ""
    return f" {missing_part(group.part or '', group.wanted or f'A {group.noun} of mvllm itself')}"


def load_plugin_by_name(group: PluginGroup, name: str) -> tuple[PluginSource, Any]:
    """The plugin of that name, and its imported object.

    Raises:
        ConfigError: As `require` and `load`.
    """
    source = require(group, name)
    return source, load(group, source)
