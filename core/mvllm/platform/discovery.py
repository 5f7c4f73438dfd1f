"""Discovers platform plugins: loads, checks and probes each one and records its failure.

pluggy's loader is not used: it imports all plugins at once, stops at the first ImportError and drops a second
distribution of the same name. Here each plugin is loaded separately, and a failure is stored with the plugin's name, so
that it can be shown to the user.

    entry point ──import──> hook module ──hook──> PlatformSpec ──contract──> probe ──> ProbeResult ──torch──> usable
                 (light)                                        (checked before device code is imported)

Probes run in a child process (isolated_probes.py), unless the spec says that the probe cannot end its process.

A plugin for a very different contract version may fail before it states its version, because it imports a name or
passes a field that does not exist. That is reported as a ContractError too, not as Python's ImportError.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pluggy

from mvllm.errors import ContractError, PlatformError
from mvllm.installation import install_command, uninstall_command
from mvllm.platform import hookspecs
from mvllm.platform.isolated_probes import ProbeAnswer, run_isolated
from mvllm.platform.module_aliases import MissingPartError
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.spec import CONTRACT, ENTRY_POINT_GROUP, PlatformSpec, ProbeResult
from mvllm.plugin_groups import PluginGroup, PluginSource, list_plugins
from mvllm.version import __version__


@dataclass(frozen=True)
class PluginFailure:
    """The failure of a plugin.

    Attributes:
        stage: `import`, `contract`, `duplicate`, `probe`, `crash` (the probe ended its process, or hung) or `torch`.
        message: One or two lines for the user.
        error: The exception, with its cause, or None.
        remedy: Command or action that fixes it.
    """

    stage: str
    message: str
    error: BaseException | None
    remedy: str

    def details(self) -> str:
        """The traceback as text; empty without an exception."""
        return "" if self.error is None else "".join(traceback.format_exception(self.error))


@dataclass(frozen=True)
class Candidate:
    """A discovered plugin with its probe result or failure.

    Attributes:
        source: Where it comes from.
        spec: Its PlatformSpec, once loaded.
        probe: The result of its probe.
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


SLOW_PROBE_SECONDS = 2.0
"""A probe that takes longer is reported. It should take under a second, which a busy machine may double."""


def find_sources() -> list[PluginSource]:
    """Every entry point of the group, sorted by name. Imports no plugin."""
    return list_plugins(PluginGroup(ENTRY_POINT_GROUP, "platform"))


def discover(only: str | None = None, *, isolated: bool = True) -> list[Candidate]:
    """Loads and probes the installed plugins. A failing plugin does not raise.

    Args:
        only: Load only the plugin of this name; no other is imported.
        isolated: Probes that may end their process run in another. False in processes of an engine, whose front end
            has probed.
    """
    sources = find_sources()
    owners = Counter(source.name for source in sources)
    wanted = [source for source in sources if only is None or source.name == only]
    loaded = [
        _load(source, [s for s in sources if s.name == source.name] if owners[source.name] > 1 else [])
        for source in wanted
    ]
    answers: dict[str, ProbeAnswer] = {}
    if isolated:
        probes = {c.name: c.spec.probe for c in loaded if c.spec and not c.failure and not c.spec.probe_in_process}
        answers = run_isolated(probes, f"{__name__}:run_probe")
    return [_probed(candidate, answers.get(candidate.name)) for candidate in loaded]


def load_attribute(path: str) -> Any:
    """The object that `package.module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def check_contract(spec: PlatformSpec, source: PluginSource) -> None:
    """Checks that the plugin's contract version is compatible with this core: same major, minor not greater.

    Raises:
        ContractError: It is not; names both distributions, both versions and the command that fixes it.
    """
    if dotted(spec.contract) == repr(spec.contract):
        raise ContractError(
            f"{source.distribution} {source.version} says that it was built for platform contract {spec.contract!r}; "
            f"a contract is (major, minor), and mvllm {__version__} speaks {dotted(CONTRACT)}. "
            f"Run: {install_command(source.distribution, upgrade=True)}"
        )
    major, minor = spec.contract
    if major == CONTRACT[0] and minor <= CONTRACT[1]:
        return
    plugin_is_newer = (major, minor) > CONTRACT
    remedy = install_command("mvllm" if plugin_is_newer else source.distribution, upgrade=True)
    raise ContractError(
        f"{source.distribution} {source.version} was built for platform contract {major}.{minor}, but mvllm "
        f"{__version__} speaks {dotted(CONTRACT)}. Run: {remedy}"
    )


def check_torch(spec: PlatformSpec, source: PluginSource) -> None:
    """Checks that the installed torch is at least the plugin's floor. Reads metadata, imports nothing.

    Raises:
        PlatformError: It is not; names the plugin, both versions of torch and the command that fixes it.
    """
    if spec.torch_floor is None:
        return
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("torch") is not None:
            return  # installed without metadata: the version is unknown without importing it
        found = "torch is not installed"
    else:
        if reaches(installed, spec.torch_floor):
            return
        found = f"torch {installed} is installed"
    raise PlatformError(
        f"{source.distribution} {source.version} needs torch {spec.torch_floor} or newer, but {found}. "
        f"Run: {install_command(source.distribution, f'torch>={spec.torch_floor}', upgrade=True)}"
    )


def reaches(installed: str, floor: str) -> bool:
    """Whether a version is at least another. A pre-release counts as its release."""
    from packaging.version import Version

    return Version(installed).release >= Version(floor).release


def needs_another_contract(error: BaseException, source: PluginSource) -> PlatformError | None:
    """A ContractError for an exception of a plugin that uses something the contract lacks; a PlatformError for a part
    of the contract whose package is not installed; None for other exceptions.

    `error` becomes its cause.
    """
    text = str(error)
    if isinstance(error, MissingPartError):
        missing = PlatformError(f"{source.distribution} {source.version} cannot be loaded: {text}")
        missing.__cause__ = error
        return missing
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "mvllm":
        wanted = re.search(r"cannot import name '(\w+)'", text)
        lacking = f"{wanted[1]} in {error.name}" if wanted else f"the module {error.name}"
    elif isinstance(error, AttributeError) and (found := re.search(r"module 'mvllm\S*' has no attribute '\w+'", text)):
        lacking = f"it: {found[0]}"
    elif isinstance(error, TypeError) and _is_made_of_contract(text):
        lacking = f"it: {text}"
    else:
        return None
    contract_error = ContractError(
        f"{source.distribution} {source.version} was built for another platform contract: it asks for something that "
        f"contract {dotted(CONTRACT)} of mvllm {__version__} does not have ({lacking}). "
        f"Run: {install_command('mvllm', source.distribution, upgrade=True)}"
    )
    contract_error.__cause__ = error
    return contract_error


def _is_made_of_contract(text: str) -> bool:
    """Whether a TypeError's text is about the fields of a class that plugins create, such as Capabilities."""
    plugin_api = sys.modules.get("mvllm.plugin_api")  # the plugin has imported it
    found = re.match(r"(\w+)\.__init__\(\) (got an unexpected keyword|missing \d+ required)", text)
    return found is not None and plugin_api is not None and found[1] in plugin_api.__all__


def dotted(contract: object) -> str:
    """A contract version as text, such as `1.4`; one that is not (major, minor) as Python shows it."""
    is_version = isinstance(contract, tuple) and [type(part) for part in contract] == [int, int]
    return ".".join(map(str, contract)) if is_version else repr(contract)  # type: ignore[call-overload]


def _load(source: PluginSource, rivals: Sequence[PluginSource]) -> Candidate:
    """Everything before the probe."""
    if rivals:
        return Candidate(source, failure=_duplicate(source, rivals))
    loaded = _attempt("import", source, lambda: _load_spec(source))
    if isinstance(loaded, PluginFailure):
        return Candidate(source, failure=loaded)
    spec = loaded
    contract = _attempt("contract", source, lambda: check_contract(spec, source))
    return Candidate(source, spec, failure=contract)


def _probed(candidate: Candidate, answer: ProbeAnswer | None) -> Candidate:
    """The candidate with the result of its probe, which runs here if there is no answer yet."""
    source, spec = candidate.source, candidate.spec
    if spec is None or candidate.failure is not None:
        return candidate
    start = time.perf_counter()
    if answer is not None and answer.failure:
        return replace(candidate, probe_seconds=answer.seconds, failure=_crash(spec, source, answer.failure))
    probe = _attempt("probe", source, lambda: run_probe(spec.probe) if answer is None else _answered(answer))
    seconds = time.perf_counter() - start if answer is None else answer.seconds
    if isinstance(probe, PluginFailure):
        return replace(candidate, probe_seconds=seconds, failure=probe)
    # Without a device the torch version does not matter, and must not keep another platform from being chosen.
    torch = _attempt("torch", source, lambda: check_torch(spec, source)) if probe.available else None
    return replace(candidate, probe=probe, probe_seconds=seconds, failure=torch)


def _answered(answer: ProbeAnswer) -> ProbeResult:
    """The result of an isolated probe.

    Raises:
        PlatformError, ImportError, AttributeError, TypeError, IsolatedProbeError: What it raised, as far as core
            tells these apart; the cause has the traceback.
    """
    if answer.error is None:
        assert answer.result is not None
        return answer.result
    kind, text, details = answer.error
    raised: BaseException = IsolatedProbeError(f"{kind}: {text}")
    if kind == "PlatformError":
        raised = PlatformError(text)
    elif kind in ("ImportError", "ModuleNotFoundError", "AttributeError", "TypeError"):
        raised = {"AttributeError": AttributeError, "TypeError": TypeError}.get(kind, ImportError)(text)
        if isinstance(raised, ImportError) and (module := re.search(r"'(mvllm[\w.]*)'", text)):
            raised.name = module[1]
    raise raised from IsolatedProbeError(details)


class IsolatedProbeError(Exception):
    """An exception in the process of a probe."""


def _crash(spec: PlatformSpec, source: PluginSource, how: str) -> PluginFailure:
    remedy = f"check the driver and its libraries, {_repair(source)}"
    return PluginFailure("crash", f"{how} (probe {spec.probe})", None, remedy)


def _load_spec(source: PluginSource) -> PlatformSpec:
    with enter_phase(Phase.PROBE):
        module = importlib.import_module(source.entry_point.partition(":")[0])
        # A manager per plugin, so that hooks of one plugin neither shadow nor validate against those of another.
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


def run_probe(probe: str) -> ProbeResult:
    """The result of a probe, `package.module:function`, in this process.

    Raises:
        PlatformError: It did not return a ProbeResult.
    """
    with enter_phase(Phase.PROBE):
        result = load_attribute(probe)()
    if not isinstance(result, ProbeResult):
        raise PlatformError(f"{probe} must return a ProbeResult, got {type(result).__name__}.")
    return result


def _attempt(stage: str, source: PluginSource, action: Callable[[], Any]) -> Any:
    """The action's result, or a PluginFailure. A plugin may raise anything, SystemExit included."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001  (stored; shown beside the plugin's name)
        error = needs_another_contract(e, source) or e
        message, _, command = str(error).rpartition(" Run: ")
        if isinstance(error, ContractError):
            return PluginFailure("contract", str(error), error, command)
        if isinstance(error, PlatformError) and message:
            return PluginFailure(stage, message, error, command)
        remedy = _repair(source)
        shown = str(error) if isinstance(error, IsolatedProbeError) else f"{type(error).__name__}: {error}"
        return PluginFailure(stage, shown, error, remedy)


def _duplicate(source: PluginSource, rivals: Sequence[PluginSource]) -> PluginFailure:
    others = sorted({f"{r.distribution} {r.version}" for r in rivals})
    return PluginFailure(
        "duplicate",
        f"the platform name {source.name!r} is claimed by {len(rivals)} entry points, of " + " and ".join(others),
        None,
        f"{uninstall_command(source.distribution)}, or the other one",
    )


def _repair(source: PluginSource) -> str:
    repair = install_command(source.distribution, upgrade=True)
    return f"{repair}, or {uninstall_command(source.distribution)} if it is not needed"
