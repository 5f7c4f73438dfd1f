"""Finds platform plugins without letting one of them hide another, or itself.

The loop is our own: pluggy's loader imports everything at once, stops at the first ImportError and drops a second
distribution that uses a taken name. Here each plugin is loaded on its own, and whatever goes wrong is kept beside its
name, so that it can be shown to the user.

    entry point ──import──> hook module ──hook──> PlatformSpec ──contract──> probe ──> ProbeResult
                 (light)                                        (checked before device code is imported)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from mvllm.errors import ContractError, PlatformError
from mvllm.platform import hookspecs
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.spec import CONTRACT, ENTRY_POINT_GROUP, PlatformSpec, ProbeResult
from mvllm.version import __version__


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin was found, known before anything of it is imported.

    Attributes:
        name: The entry point's name: what users type.
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
class PluginFailure:
    """What went wrong with a plugin.

    Attributes:
        stage: `import`, `hook`, `contract`, `duplicate`, `probe` or `factory`.
        message: One or two lines for the user.
        error: The exception, with its cause, or None.
        remedy: What to do.
    """

    stage: str
    message: str
    error: BaseException | None
    remedy: str

    def details(self) -> str:
        """The traceback as text, or nothing."""
        return "" if self.error is None else "".join(traceback.format_exception(self.error))


@dataclass(frozen=True)
class Candidate:
    """A plugin that was looked at.

    Attributes:
        source: Where it comes from.
        spec: Its identity card, once loaded and contract-checked.
        probe: What its probe said.
        probe_seconds: How long the probe took.
        failure: Why it cannot be used at all, or None.
    """

    source: PluginSource
    spec: PlatformSpec | None = None
    probe: ProbeResult | None = None
    probe_seconds: float = 0.0
    failure: PluginFailure | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def available(self) -> bool:
        return self.failure is None and self.probe is not None and self.probe.available


def find_sources() -> list[PluginSource]:
    """Every entry point of the group, by name; imports nothing of the plugins."""
    found = [
        PluginSource(
            name=ep.name,
            entry_point=ep.value,
            distribution=ep.dist.name if ep.dist else "unknown distribution",
            version=ep.dist.version if ep.dist else "unknown version",
        )
        for ep in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    return sorted(set(found), key=lambda s: (s.name, s.distribution, s.version))


def discover(only: str | None = None) -> list[Candidate]:
    """Loads and probes the plugins found; never raises because of one of them.

    Args:
        only: Look at the plugin of this name alone; no other is imported.
    """
    sources = find_sources()
    owners = Counter(source.name for source in sources)
    wanted = [source for source in sources if only is None or source.name == only]
    return [
        _examine(source, [s for s in sources if s.name == source.name] if owners[source.name] > 1 else [])
        for source in wanted
    ]


def load_attribute(path: str) -> Any:
    """The object that `package.module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def check_contract(spec: PlatformSpec, source: PluginSource) -> None:
    """Fails unless the plugin's contract version works with this core: same major, minor not greater.

    Raises:
        ContractError: Names both distributions, both versions and the command that mends it.
    """
    major, minor = spec.contract
    if major == CONTRACT[0] and minor <= CONTRACT[1]:
        return
    plugin_is_newer = (major, minor) > CONTRACT
    remedy = f"pip install -U {'mvllm' if plugin_is_newer else source.distribution}"
    raise ContractError(
        f"{source.distribution} {source.version} was built for platform contract {major}.{minor}, but mvllm "
        f"{__version__} speaks {CONTRACT[0]}.{CONTRACT[1]}. Run: {remedy}"
    )


def _examine(source: PluginSource, rivals: Sequence[PluginSource]) -> Candidate:
    if rivals:
        return Candidate(source, failure=_duplicate(source, rivals))
    loaded = _attempt("import", source, lambda: _load_spec(source))
    if isinstance(loaded, PluginFailure):
        return Candidate(source, failure=loaded)
    spec = loaded
    contract = _attempt("contract", source, lambda: check_contract(spec, source))
    if isinstance(contract, PluginFailure):
        return Candidate(source, spec, failure=contract)
    start = time.perf_counter()
    probe = _attempt("probe", source, lambda: _run_probe(spec))
    seconds = time.perf_counter() - start
    if isinstance(probe, PluginFailure):
        return Candidate(source, spec, probe_seconds=seconds, failure=probe)
    return Candidate(source, spec, probe, seconds)


def _load_spec(source: PluginSource) -> PlatformSpec:
    with enter_phase(Phase.PROBE):
        module = importlib.import_module(source.entry_point.partition(":")[0])
        # A manager per plugin: hooks of one can neither shadow nor validate against another's.
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(module, name=source.name)
        manager.check_pending()
        answers = manager.hook.mvllm_platform()
    if len(answers) != 1 or not isinstance(answers[0], PlatformSpec):
        raise PlatformError(
            f"{source.entry_point} must implement the hook mvllm_platform() and return one PlatformSpec, "
            f"got {answers!r}."
        )
    spec: PlatformSpec = answers[0]
    if spec.name != source.name:
        raise PlatformError(
            f"The entry point is called {source.name!r} but the plugin calls itself {spec.name!r}; "
            "the two must be equal."
        )
    return spec


def _run_probe(spec: PlatformSpec) -> ProbeResult:
    with enter_phase(Phase.PROBE):
        result = load_attribute(spec.probe)()
    if not isinstance(result, ProbeResult):
        raise PlatformError(f"{spec.probe} must return a ProbeResult, got {type(result).__name__}.")
    return result


def _attempt(stage: str, source: PluginSource, action: Callable[[], Any]) -> Any:
    """The action's result, or what it failed with. A plugin may raise anything, SystemExit included."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except ContractError as e:
        return PluginFailure("contract", str(e), e, str(e).rpartition("Run: ")[2])
    except BaseException as e:  # noqa: BLE001  (stored; shown beside the plugin's name)
        return PluginFailure(
            stage,
            f"{type(e).__name__}: {e}",
            e,
            f"pip install -U {source.distribution}, or pip uninstall {source.distribution} if it is not needed",
        )


def _duplicate(source: PluginSource, rivals: Sequence[PluginSource]) -> PluginFailure:
    others = sorted({f"{r.distribution} {r.version}" for r in rivals})
    return PluginFailure(
        "duplicate",
        f"the platform name {source.name!r} is claimed by {len(rivals)} entry points, of " + " and ".join(others),
        None,
        f"pip uninstall {source.distribution}, or the other one",
    )
