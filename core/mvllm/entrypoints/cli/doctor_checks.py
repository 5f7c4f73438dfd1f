"""The checks of `mvllm doctor`. Each has a stable id; an error in one check does not affect the others.

Operations that may crash run in a forked process: importing torch, the platforms' own checks, and loading device
libraries without a device. They share one process, so torch is imported once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform as host
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mvllm import plugin_groups
from mvllm.config.engine_config import ParallelConfig
from mvllm.config.env import unknown_variables
from mvllm.entrypoints.cli.fork_runner import ForkResult, run_in_fork
from mvllm.entrypoints.cli.option_words import engine_options, in_options
from mvllm.entrypoints.cli.platforms import installed_plugins
from mvllm.errors import MvllmError, PlatformError
from mvllm.installable import (
    describe_parts,
    installable_parts,
    installable_platforms,
    part_versions,
    unknown_platform,
)
from mvllm.installation import (
    INSTALL_PAGE,
    conflicting_distribution,
    describe_installation,
    find_distribution,
    install_command,
    is_own,
)
from mvllm.platform.choose import ENVIRONMENT_VARIABLE, choose_candidate
from mvllm.platform.discovery import (
    SLOW_PROBE_SECONDS,
    Candidate,
    discover,
    dotted,
    find_sources,
    load_attribute,
    needs_another_contract,
    reaches,
)
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.spec import CONTRACT, Check, CheckStatus
from mvllm.plugin_groups import PluginSource
from mvllm.version import __version__

_MIN_PYTHON = (3, 11)
_MIN_SHARED_MEMORY = 256 * 2**20
_MIN_OPEN_FILES = 1024
_TIMEOUT_SECONDS = 120
_TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

Checks = Iterable[Check]
_ByName = dict[str, ForkResult]


def run_checks(*, platform: str | None = None, model: str | None = None) -> list[Check]:
    """Runs all checks: interpreter, packages, platforms, environment, machine, model.

    Args:
        platform: Check this platform only; None for all.
        model: Folder, GGUF file or name of a model to check.
    """
    candidates = discover(only=platform)
    torch, made, own, hiding = _run_forked(candidates)
    checks = _run_guarded("python.version", _python)
    checks += _run_guarded("core.version", _core)
    checks += _run_guarded("core.distribution", _distribution)
    checks += _run_guarded("core.dependencies", _dependencies)
    checks += _run_guarded("core.parts", _parts)
    checks += _run_guarded("torch.import", lambda: _torch(candidates, torch))
    checks += _run_guarded("platform.entry_points", lambda: _entry_points(candidates, platform))
    for candidate in candidates:
        prefix = f"platform.{candidate.name}"
        checks += _run_guarded(f"{prefix}.plugin", lambda c=candidate: _plugin(c))  # type: ignore[misc]
        factory = list(_factory(candidate, made.get(candidate.name)))
        checks += factory
        if not factory:
            checks += _run_guarded(f"{prefix}.doctor", partial(_platform_checks, candidate, own.get(candidate.name)))
        checks += _run_guarded(
            f"{prefix}.visible_devices", partial(_hidden_device_checks, candidate, hiding.get(candidate.name))
        )
    checks += _run_guarded("torch.backends", lambda: _torch_backends(candidates))
    checks += _run_guarded("platform.choice", lambda: _choice(candidates, platform))
    checks += _run_guarded("extensions.installed", _extensions)
    checks += _run_guarded("environment.visible_devices", _visible_devices)
    checks += _run_guarded("environment.unknown", _unknown_variables)
    checks += _run_guarded("system.shared_memory", _shared_memory)
    checks += _run_guarded("system.open_files", _open_files)
    checks += _run_guarded("system.memory", _memory)
    if model is not None:
        checks += _run_guarded("model.folder", lambda: _model(model))
    return checks


def _run_forked(candidates: Sequence[Candidate]) -> tuple[ForkResult, _ByName, _ByName, _ByName]:
    """Runs the checks that may crash.

    Returns:
        The import of torch; of each available platform, by its name, whether it can be built, and its own checks; and
        for each unavailable platform the variable that hides devices from it, by its name.
    """
    factories = {c.name: c.spec.factory for c in candidates if c.failure is None and c.spec is not None}
    available = [c.name for c in candidates if c.available and c.name in factories]
    unavailable = [c.name for c in candidates if not c.available and c.name in factories]
    functions: list[Callable[[], Any]] = [
        _import_torch,
        *(partial(_build, factories[c.name], c.source) for c in candidates if c.name in available),
        *(partial(_platform_doctor, factories[name]) for name in available),
        *(partial(_device_variable, factories[name]) for name in unavailable),
    ]
    torch, *results = run_in_fork(functions, _TIMEOUT_SECONDS)
    count = len(available)
    made, own_checks, variables = results[:count], results[count : 2 * count], results[2 * count :]
    return (
        torch,
        dict(zip(available, made, strict=True)),
        dict(zip(available, own_checks, strict=True)),
        dict(zip(unavailable, variables, strict=True)),
    )


def _import_torch() -> None:
    torch = importlib.import_module("torch")
    (torch.ones(2) + 1).sum().item()


def _build(factory: str, source: PluginSource) -> str:
    """Builds the platform and reads its capabilities; returns the ContractError that an engine's start would raise."""
    with enter_phase(Phase.FRONTEND):
        try:
            _ = load_attribute(factory)().capabilities
        except Exception as e:
            if (contract_error := needs_another_contract(e, source)) is not None:
                return str(contract_error)
            raise
    return ""


def _platform_doctor(factory: str) -> list[tuple[str, str, str, str | None]]:
    with enter_phase(Phase.FRONTEND):
        found = load_attribute(factory)().doctor()
        return [(check.id, CheckStatus(check.status).value, check.found, check.remedy) for check in found]


def _device_variable(factory: str) -> str | None:
    variable: str | None = load_attribute(factory)().topology(ParallelConfig()).device_variable
    return variable


def _run_guarded(check_id: str, make: Callable[[], Checks]) -> list[Check]:
    """The checks that `make` returns, or a broken check if it raises."""
    try:
        return list(make())
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001  (a plugin may raise anything, SystemExit too)
        return [Check(check_id, CheckStatus.BROKEN, f"the check failed: {type(e).__name__}: {e}", "report this")]


def _check(check_id: str, good: bool, found: str, remedy: str | None, bad: CheckStatus = CheckStatus.BROKEN) -> Check:
    return Check(check_id, CheckStatus.OK if good else bad, found, None if good else remedy)


# --- the installation


def _python() -> Checks:
    needed = ".".join(map(str, _MIN_PYTHON))
    yield _check(
        "python.version",
        sys.version_info >= _MIN_PYTHON,
        f"Python {host.python_version()} at {sys.executable}",
        f"use Python {needed} or newer",
    )


def _core() -> Checks:
    yield Check("core.version", CheckStatus.OK, f"mvllm {__version__}, platform contract {dotted(CONTRACT)}")


def _distribution() -> Checks:
    """Whether the metadata of `mvllm` is this project's, and where it came from."""
    if (conflict := conflicting_distribution()) is not None:
        found, _, remedy = conflict.rpartition(" Run: ")
        yield Check("core.distribution", CheckStatus.BROKEN, found, remedy)
        return
    yield Check("core.distribution", CheckStatus.OK, describe_installation())


def _dependencies() -> Checks:
    """Compares the requirements in core's metadata with the installed packages."""
    requirements = _requirements("mvllm")
    if requirements is None:
        remedy = f"install it: {install_command('mvllm')}"
        yield Check("core.dependencies", CheckStatus.WARNING, "mvllm is run from a folder, not installed", remedy)
        return
    problems = _requirement_problems(requirements)
    found = "; ".join(problems.values()) if problems else f"all {len(requirements)} required packages are installed"
    yield _check("core.dependencies", not problems, found, _repair(problems))


def _parts() -> Checks:
    """Which parts of mvllm are installed, and whether the packages that they require fit."""
    packages = [package for name, package in installable_parts().items() if part_versions()[name] is not None]
    problems = {package: _requirement_problems(_requirements(package) or ()) for package in packages}
    texts = [f"{package}: {problem}" for package, each in problems.items() for problem in each.values()]
    found = "; ".join([describe_parts(), *texts])
    remedy = _repair(requirement for each in problems.values() for requirement in each)
    yield _check("core.parts", not texts, found, remedy, CheckStatus.WARNING)


def _requirements(distribution: str) -> list[str] | None:
    """What a distribution's metadata requires on this machine, extras left out; None where it is not installed."""
    if (found := find_distribution(distribution)) is None:
        return None
    return [requirement for requirement in found.requires or () if _applies(requirement)]


def _applies(requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "extra ==" not in requirement
    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})


def _requirement_problems(requirements: Iterable[str]) -> dict[str, str]:
    """The requirements that the installed packages do not meet, without their markers, and what is wrong with each."""
    problems = {each.partition(";")[0].strip(): _requirement_problem(each) for each in requirements}
    return {requirement: problem for requirement, problem in problems.items() if problem is not None}


def _repair(requirements: Iterable[str]) -> str:
    """The command for requirements that are not met. Of mvllm itself, which is there, another release is needed."""
    unmet = list(dict.fromkeys(requirements))
    return install_command(*unmet, upgrade="mvllm" in map(_required_name, unmet))


def _requirement_problem(requirement: str) -> str | None:
    name = _required_name(requirement)
    if (found := find_distribution(name)) is None:
        return f"{name} is missing"
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return None
    wanted = Requirement(requirement)
    fits = wanted.specifier.contains(found.version, prereleases=True)
    return None if fits else f"{name} is {found.version}, required is {wanted.specifier}"


def _required_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match.group(0) if match else requirement


def _torch(candidates: Sequence[Candidate], imported: ForkResult) -> Checks:
    """Whether torch can be imported, and satisfies the minimum version of each platform."""
    floors = {c.name: c.spec.torch_floor for c in candidates if c.spec is not None and c.spec.torch_floor}
    plugins = {c.name: c.source.distribution for c in candidates}
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        bad = CheckStatus.BROKEN if floors else CheckStatus.WARNING
        remedy = "reinstall the platform package, which brings the torch it needs"
        yield Check("torch.import", bad, "torch is not installed", remedy)
        return
    works = imported.failure is None
    found = f"torch {installed}" + ("" if works else f" cannot be imported: {imported.failure}")
    yield _check("torch.import", works, found, "reinstall torch together with the platform package")
    for name, floor in floors.items():
        good = reaches(installed, floor)
        command = "" if good else install_command(plugins[name], f"torch>={floor}", upgrade=True)
        yield _check(f"platform.{name}.torch", good, f"torch {installed}, required is {floor} or newer", command)


# --- platforms


def _entry_points(candidates: Sequence[Candidate], requested: str | None) -> Checks:
    names = sorted({source.name for source in find_sources()})
    found = f"{len(names)} platform plugin(s): {', '.join(names)}" if names else "no platform plugin is installed"
    if requested and not candidates:
        text, _, command = unknown_platform(requested, names).rpartition(" Run: ")
        yield Check("platform.entry_points", CheckStatus.BROKEN, text or command, command if text else "name another")
        return
    known = installable_platforms()
    remedy = install_command(known[0]) if known else f"install a platform: see {INSTALL_PAGE}"
    yield _check("platform.entry_points", bool(candidates), found, remedy)


def _plugin(candidate: Candidate) -> Checks:
    """Whether a plugin can be loaded, supports this contract version, and finds devices."""
    prefix = f"platform.{candidate.name}"
    yield _plugin_dependencies(candidate)
    if candidate.failure is not None and candidate.failure.stage != "torch":  # torch has its own check
        failure = candidate.failure
        part = "contract" if failure.stage == "contract" else "plugin"
        found = f"{candidate.source} is broken at {failure.stage}: {failure.message}"
        yield Check(f"{prefix}.{part}", CheckStatus.BROKEN, found, failure.remedy)
        return
    yield Check(f"{prefix}.plugin", CheckStatus.OK, str(candidate.source))
    if candidate.spec is not None:
        yield Check(f"{prefix}.contract", CheckStatus.OK, f"contract {dotted(candidate.spec.contract)}")
    probe = candidate.probe
    if probe is not None:
        devices = ", ".join(device.name for device in probe.devices)
        found = f"{probe.reason}" + (f" ({devices})" if devices and devices not in probe.reason else "")
        remedy = probe.remedy or f"see what {candidate.source.distribution} needs: a device, its driver, permissions"
        yield _check(f"{prefix}.devices", probe.available, found, remedy, CheckStatus.WARNING)
        yield _check(
            f"{prefix}.probe",
            candidate.probe_seconds <= SLOW_PROBE_SECONDS,
            f"the probe took {candidate.probe_seconds:.1f} s",
            f"probes take under a second, since each start waits for them; report it to the maintainers of "
            f"{candidate.source.distribution}",
            CheckStatus.WARNING,
        )


def _plugin_dependencies(candidate: Candidate) -> Check:
    """Compares the requirements in the plugin's metadata with the installed packages.

    A platform that is chosen by name only does not disturb others, so what it lacks is a warning.
    """
    name = candidate.source.distribution
    is_optional = candidate.spec is not None and candidate.spec.by_name_only
    problems = _requirement_problems(_requirements(name) or ())  # a bare entry point requires nothing
    return _check(
        f"platform.{candidate.name}.requirements",
        not problems,
        "; ".join(problems.values()) if problems else f"all packages that {name} requires are installed",
        _repair(problems),
        CheckStatus.WARNING if is_optional else CheckStatus.BROKEN,
    )


def _factory(candidate: Candidate, result: ForkResult | None) -> Checks:
    """What is wrong with an available platform when it is built; nothing if nothing is."""
    distribution = candidate.source.distribution
    if result is None or candidate.spec is None:
        return
    prefix, report = f"platform.{candidate.name}", f"report it to the maintainers of {distribution}"
    if result.failure is not None:
        found = f"{candidate.spec.factory} of {candidate.source} cannot be built: {result.failure}"
        remedy = f"{install_command(distribution, upgrade=True)}; if that does not help, {report}"
        yield Check(f"{prefix}.factory", CheckStatus.BROKEN, found, remedy)
    elif result.value:
        found, _, command = result.value.rpartition(" Run: ")
        yield Check(f"{prefix}.factory", CheckStatus.BROKEN, found, command)


def _platform_checks(candidate: Candidate, result: ForkResult | None) -> Checks:
    """The platform's own checks, if it is available."""
    if result is None:
        return
    if result.failure is not None:
        yield Check(
            f"platform.{candidate.name}.doctor",
            CheckStatus.BROKEN,
            f"the check failed: {result.failure}",
            f"report it to the maintainers of {candidate.source.distribution}",
        )
        return
    for check_id, status, found, remedy in result.value:
        yield Check(check_id, CheckStatus(status), found, remedy)


def _hidden_device_checks(candidate: Candidate, result: ForkResult | None) -> Checks:
    """Whether the device variable in the platform's topology is set while the platform finds no device."""
    if result is None or result.failure is not None:  # without a device, its library may fail to load
        return
    variable = result.value
    value = None if variable is None else os.environ.get(variable)
    if value is not None:
        found = f"{variable}={value!r}, and {candidate.name} finds no device"
        remedy = f"{variable} hides devices from {candidate.name}; unset it, or list the devices to use"
        yield Check(f"platform.{candidate.name}.visible_devices", CheckStatus.WARNING, found, remedy)


def _loaded_with_torch() -> set[str]:
    """The packages that `import torch` loads."""
    if os.environ.get(_TORCH_AUTOLOAD) == "0":
        return set()
    found = importlib.metadata.entry_points(group="torch.backends")
    return {ep.dist.name for ep in found if ep.dist is not None}


def _torch_backends(candidates: Sequence[Candidate]) -> Checks:
    """Whether several installed packages register torch's PrivateUse1 backend, of which there can be only one."""
    claims = {c.source.distribution: c for c in candidates if c.spec is not None and c.spec.torch_backend}
    loaded_with_torch = _loaded_with_torch()
    # A package that a platform requires counts as part of that platform.
    libraries = {name: {name, *map(_required_name, _requirements(name) or ())} for name in claims}
    unclaimed = loaded_with_torch - {library for own in libraries.values() for library in own}
    texts = [f"{c.spec.torch_backend!r} of {c.source}" for c in claims.values() if c.spec is not None]
    texts += [f"{name}, which torch loads automatically" for name in sorted(unclaimed)]
    found_text = "; ".join(texts) if texts else "no package registers it"
    if len(claims) + len(unclaimed) < 2 or not claims:
        yield Check("torch.backends", CheckStatus.OK, f"torch's PrivateUse1 backend: {found_text}")
        return
    early = [name for name, own in libraries.items() if own & loaded_with_torch]
    found_text = f"several packages register torch's PrivateUse1 backend, which can be registered once: {found_text}"
    names = " or ".join(f"--platform {c.name}" for c in claims.values())
    remedy = f"choose one with {names}; or uninstall those that are not needed"
    if early or unclaimed:
        remedy = f"{_TORCH_AUTOLOAD}=0 keeps torch from loading them automatically; {remedy}"
    # A package that torch loads registers the backend before the chosen platform can.
    yield Check("torch.backends", CheckStatus.BROKEN if early else CheckStatus.WARNING, found_text, remedy)


def _choice(candidates: Sequence[Candidate], requested: str | None) -> Checks:
    """The platform that an engine would choose now."""
    try:
        chosen, reason = choose_candidate(candidates, requested)
    except PlatformError:
        yield _unavailable_platform_check(candidates, requested)
    else:
        yield Check("platform.choice", CheckStatus.OK, f"{chosen.name}, from {chosen.source}: {reason}")


def _unavailable_platform_check(candidates: Sequence[Candidate], requested: str | None) -> Check:
    """Why an engine would find no platform."""
    name = requested or os.environ.get(ENVIRONMENT_VARIABLE) or None
    automatic = [c for c in candidates if c.spec is None or not c.spec.by_name_only]
    usable = [c for c in (automatic if name is None else candidates) if c.available and name in (None, c.name)]
    devices = [c for c in usable if c.spec is not None and not c.spec.is_host]
    usable = devices if len(devices) == 1 else usable
    if len(usable) == 1:
        broken = [c.name for c in automatic if c.failure is not None]
        remedy = f"repair {', '.join(broken)}, or choose with --platform {usable[0].name}"
        return Check("platform.choice", CheckStatus.BROKEN, f"{usable[0].source}", remedy)
    if usable:
        names = " or ".join(f"--platform {c.name}" for c in usable)
        found = f"{len(usable)} platforms are available"
        return Check("platform.choice", CheckStatus.WARNING, found, f"choose with {names}, or {ENVIRONMENT_VARIABLE}")
    found = f"the platform {name!r} cannot be used" if name else "no platform can be used"
    return Check("platform.choice", CheckStatus.BROKEN, found, "see the checks of the platforms above")


def _extensions() -> Checks:
    """Installed plugins other than platforms, from metadata, and whether two of a kind have the same name."""
    installed = installed_plugins()
    allowed = [(group, source) for group, source in installed if plugin_groups.is_allowed(source)]
    own = {name for name in {source.distribution for _, source in allowed} if is_own(name)}
    counts = Counter(group.noun for group, source in allowed if source.distribution in own)
    listed = [f"{g.noun} {s.name} ({s.distribution} {s.version})" for g, s in allowed if s.distribution not in own]
    listed += [f"of mvllm's own packages: {', '.join(f'{noun} ({n})' for noun, n in counts.items())}"] * bool(counts)
    found = "; ".join(listed) or "none"
    if excluded := sorted({s.distribution for _, s in installed} - {s.distribution for _, s in allowed}):
        found += f"; {plugin_groups.ENVIRONMENT_VARIABLE} does not allow {', '.join(excluded)}"
    names = [f"{group.noun} {source.name}" for group, source in allowed]
    twice = sorted({name for name in names if names.count(name) > 1})
    remedy = f"two packages offer the {', '.join(twice)}: uninstall one, or name the other in MVLLM_PLUGINS"
    yield _check("extensions.installed", not twice, found, remedy, CheckStatus.WARNING)


# --- the environment and the machine


def _visible_devices() -> Checks:
    """Variables that hide devices. Each vendor has its own variable; all end with `_VISIBLE_DEVICES`."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.endswith("_VISIBLE_DEVICES")}
    if not found:
        yield Check("environment.visible_devices", CheckStatus.OK, "no *_VISIBLE_DEVICES variable is set")
        return
    hiding = [name for name, value in found.items() if value.strip() in ("", "-1", "none", "void", "NoDevFiles")]
    yield _check(
        "environment.visible_devices",
        not hiding,
        ", ".join(f"{name}={value!r}" for name, value in found.items()),
        f"{', '.join(hiding)} hides every device; unset it, or list the devices to use",
        CheckStatus.WARNING,
    )


def _unknown_variables() -> Checks:
    if unknown := unknown_variables(source.name for source in find_sources()):
        yield Check("environment.unknown", CheckStatus.WARNING, " ".join(unknown), "unset or rename")
    else:
        yield Check("environment.unknown", CheckStatus.OK, "every MVLLM_* variable is known")


def _shared_memory() -> Checks:
    folder = Path("/dev/shm")  # noqa: S108  (read, not written)
    if not folder.is_dir():
        yield Check("system.shared_memory", CheckStatus.OK, f"{folder} does not exist on this system")
        return
    usage = shutil.disk_usage(folder)
    yield _check(
        "system.shared_memory",
        usage.free >= _MIN_SHARED_MEMORY,
        f"{folder}: {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free",
        "in a container, start it with --shm-size=1g or --ipc=host; several workers need it",
        CheckStatus.WARNING,
    )


def _open_files() -> Checks:
    try:
        import resource
    except ImportError:
        yield Check("system.open_files", CheckStatus.OK, "this system has no limit of open files")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    yield _check(
        "system.open_files",
        unlimited or soft >= _MIN_OPEN_FILES,
        f"{'unlimited' if unlimited else soft} open files allowed (hard limit {hard})",
        f"ulimit -n {_MIN_OPEN_FILES}",
        CheckStatus.WARNING,
    )


def _memory() -> Checks:
    import psutil  # type: ignore[import-untyped]

    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of host memory available"
    yield Check("system.memory", CheckStatus.OK, found)


# --- the model


def _model(model: str) -> Checks:
    """Checks a model folder: config, architecture, weights and tokenizer, without loading the weights."""
    from mvllm.config.engine_args import EngineArgs
    from mvllm.config.model_implementations import implementation_name
    from mvllm.config.tokenizer_check import check_tokenizer
    from mvllm.engine.tokenizer.tokenizer import load_tokenizer
    from mvllm.models.checkpoint import read_checkpoint
    from mvllm.models.checkpoint_support import check_architecture, check_quantization, runs_natively

    try:
        config = EngineArgs.from_kwargs(model=model).create_model_config()
    except MvllmError as e:
        yield Check("model.folder", CheckStatus.BROKEN, in_options(str(e), engine_options()), "see the message")
        return
    found = f"{config.path}: {config.architecture}, {config.num_layers} layers, context {config.max_model_len:,}"
    yield Check("model.folder", CheckStatus.OK, found)

    def architecture() -> str:
        check_architecture(config)
        through = "" if runs_natively(config) else f", through {implementation_name(config.model_impl)}"
        return config.architecture + through

    def quantization() -> str:
        check_quantization(config)
        return config.quantization or "none"

    def weights() -> str:
        tensors = read_checkpoint(config.path)
        return f"{len(tensors)} tensors"

    def tokenizer() -> str:
        loaded = load_tokenizer(config)
        assert loaded is not None
        check_tokenizer(config.vocab_size, loaded.length)
        return f"{loaded.length} tokens, vocabulary {config.vocab_size}"

    for name, action in (
        ("architecture", architecture),
        ("quantization", quantization),
        ("weights", weights),
        ("tokenizer", tokenizer),
    ):
        try:
            yield Check(f"model.{name}", CheckStatus.OK, action())
        except MvllmError as e:
            found = in_options(str(e), engine_options())
            yield Check(f"model.{name}", CheckStatus.BROKEN, found, "see the message")
