"""Chooses the platform: the one that the user names, else the only available one, a device before the host.

Otherwise an error lists all:

    available, without those chosen by name only        chosen
    one                                                 it
    one with a device, and others that are the host     the one with the device
    several with devices; or several that are the host  none: the user has to name one
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mvllm.errors import PlatformError
from mvllm.installable import installable_platforms, unknown_platform
from mvllm.installation import INSTALL_PAGE, conflicting_distribution, install_command
from mvllm.logging import get_logger
from mvllm.platform.discovery import (
    SLOW_PROBE_SECONDS,
    Candidate,
    discover,
    find_sources,
    load_attribute,
    needs_another_contract,
)
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_groups import PluginSource

logger = get_logger(__name__)

ENVIRONMENT_VARIABLE = "MVLLM_PLATFORM"


@dataclass(frozen=True)
class ChosenPlatform:
    """A platform, the plugin it came from, and why it was chosen."""

    platform: Platform
    source: PluginSource
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source.name}, from {self.source}"


def choose_platform(name: str | None = None, *, available_only: bool = True, isolated: bool = True) -> ChosenPlatform:
    """The platform to run on.

    Args:
        name: Name from the user; the default is the environment variable `MVLLM_PLATFORM`. With a name, only that
            plugin is imported.
        available_only: Whether a named platform must be available. An unavailable one can return plans, but nothing
            can run on it.
        isolated: As for `discover`.

    Raises:
        PlatformError: No platform is available, or several devices are; the named one is not installed or not usable;
            or, without a name, an installed plugin is broken: skipping it could select the wrong device unnoticed.
            Only a plugin whose probe crashed is left out, with a warning. Or another project's package is installed
            under the name mvllm.
        ContractError: The named plugin has an incompatible contract version.
    """
    if isolated and (conflict := conflicting_distribution()) is not None:  # a front end has looked before its engine
        raise PlatformError(conflict)
    candidates = discover(only=name or os.environ.get(ENVIRONMENT_VARIABLE) or None, isolated=isolated)
    chosen, reason = choose_candidate(candidates, name, available_only=available_only)
    if chosen.probe_seconds > SLOW_PROBE_SECONDS:
        logger.warning(
            "The probe of the platform %r took %.1f s; probes take under a second (PRB-01). Report this to the "
            "maintainers of %s.",
            chosen.name,
            chosen.probe_seconds,
            chosen.source.distribution,
        )
    for left_out in (each for each in candidates if _has_crashed(each)):
        logger.warning(
            "The platform %r is left out, because %s. Remedy: %s.",
            left_out.name,
            left_out.failure.message,  # type: ignore[union-attr]
            left_out.failure.remedy,  # type: ignore[union-attr]
        )
    return ChosenPlatform(_build(chosen), chosen.source, reason)


def choose_candidate(
    candidates: Sequence[Candidate], name: str | None = None, *, available_only: bool = True
) -> tuple[Candidate, str]:
    """The candidate that `choose_platform` builds, and why.

    Args:
        candidates: What was discovered.
        name, available_only: As for `choose_platform`.

    Raises:
        PlatformError, ContractError: As `choose_platform`.
    """
    wanted = name or os.environ.get(ENVIRONMENT_VARIABLE) or None
    if wanted is not None:
        found = _named(wanted, [each for each in candidates if each.name == wanted], available_only)
        return found, "named by the settings" if name else f"named by {ENVIRONMENT_VARIABLE}"
    chosen = _single(candidates)
    if len(candidates) == 1:
        return chosen, "the only platform that is installed"
    reason = f"the only available one of {', '.join(each.name for each in candidates)}"
    if hosts := [each.name for each in candidates if each is not chosen and _is_eligible(each)]:
        reason = _before_hosts(chosen.name, hosts)
    by_name = [each.name for each in candidates if each.available and _is_by_name_only(each)]
    if by_name:
        reason += f"; {', '.join(by_name)} would have to be named"
    if crashed := [each.name for each in candidates if _has_crashed(each)]:
        reason += f"; the probe of {', '.join(crashed)} crashed"
    return chosen, reason


def describe(candidate: Candidate) -> str:
    """A few lines about one candidate: its source, and why it is not usable or what its probe found."""
    lines = [f"  {candidate.source}"]
    if candidate.failure:
        lines.append(f"    broken at {candidate.failure.stage}: {candidate.failure.message}")
        lines.append(f"    remedy: {candidate.failure.remedy}")
    elif candidate.probe:
        lines.append(f"    {'available' if candidate.available else 'not available'}: {candidate.probe.reason}")
        if candidate.probe.remedy and not candidate.available:
            lines.append(f"    remedy: {candidate.probe.remedy}")
    return "\n".join(lines)


def _named(name: str, candidates: Sequence[Candidate], available_only: bool) -> Candidate:
    if not candidates:
        raise PlatformError(unknown_platform(name, (source.name for source in find_sources())))
    candidate = candidates[0]
    if candidate.failure or (available_only and not candidate.available):
        error = candidate.failure.error if candidate.failure else None
        message = f"The platform {name!r} was asked for, but it cannot be used:\n{describe(candidate)}"
        raise (type(error) if isinstance(error, PlatformError) else PlatformError)(message) from error
    return candidate


def _single(candidates: Sequence[Candidate]) -> Candidate:
    """The one that needs no name; an error with all of them if there is none, or one is broken."""
    if not candidates:
        raise PlatformError(nothing_installed())
    listing = "\n".join(map(describe, candidates))
    available = [each for each in candidates if _is_eligible(each)]
    best = [each for each in available if not _is_host(each)] or available
    if broken := [each for each in candidates if _is_broken(each)]:
        text = f"An installed platform plugin is broken:\n{listing}\n{_way_on(len(broken), best)}"
        raise PlatformError(text) from broken[0].failure.error  # type: ignore[union-attr]
    if not available:
        named = _options(each.name for each in candidates if each.available)
        way_on = f"\nOnly if you name it: {named}." if named else ""
        raise PlatformError(f"None of the installed platforms can be used on this machine:\n{listing}{way_on}")
    if len(best) > 1:
        options = _options(each.name for each in available)
        raise PlatformError(
            f"Several platforms are available; choose one with {options} (or {ENVIRONMENT_VARIABLE}):\n{listing}"
        )
    return best[0]


def _options(names: Iterable[str]) -> str:
    return " or ".join(f"--platform {name}" for name in names)


def _way_on(num_broken: int, available: Sequence[Candidate]) -> str:
    if not available:
        return "No other platform is available."
    others, name = "it" if num_broken == 1 else "them", available[0].name
    return f"To go on without {others}: --platform {name} or {ENVIRONMENT_VARIABLE}={name}."


def nothing_installed() -> str:
    """An error's text where there is no platform: which packages have one, and how one of them is installed."""
    known = installable_platforms()
    example = f"See {INSTALL_PAGE}."
    if known:
        example = f"Install one of {', '.join(known)}, for instance: {install_command(known[0])}"
    return f"No platform plugin is installed, so there is nothing to run on. {example}"


def _is_eligible(candidate: Candidate) -> bool:
    """Whether a platform may be chosen without being named."""
    return candidate.available and not _is_by_name_only(candidate)


def _before_hosts(chosen: str, hosts: Sequence[str]) -> str:
    are = f"{hosts[0]} is" if len(hosts) == 1 else f"{', '.join(hosts[:-1])} and {hosts[-1]} are"
    return f"it has a device, {are} the host; to choose: {_options((chosen, *hosts))} (or {ENVIRONMENT_VARIABLE})"


def _has_crashed(candidate: Candidate) -> bool:
    return candidate.failure is not None and candidate.failure.stage == "crash"


def _is_broken(candidate: Candidate) -> bool:
    """Whether an error of a plugin, which is not skipped, keeps a platform from being chosen."""
    return candidate.failure is not None and not _is_by_name_only(candidate) and not _has_crashed(candidate)


def _is_host(candidate: Candidate) -> bool:
    return candidate.spec is not None and candidate.spec.is_host


def _is_by_name_only(candidate: Candidate) -> bool:
    return candidate.spec is not None and candidate.spec.by_name_only


def _build(candidate: Candidate) -> Platform:
    assert candidate.spec is not None
    with enter_phase(Phase.FRONTEND):
        try:
            platform = load_attribute(candidate.spec.factory)()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a plugin may raise anything, SystemExit included
            if (contract_error := needs_another_contract(e, candidate.source)) is not None:
                raise contract_error from e
            raise PlatformError(
                f"The platform {candidate.name!r} ({candidate.source}) failed while it was being built: "
                f"{type(e).__name__}: {e}"
            ) from e
    if not isinstance(platform, Platform):
        raise PlatformError(
            f"{candidate.spec.factory} of {candidate.source} must return a mvllm.plugin_api.Platform, "
            f"got {type(platform).__name__}."
        )
    return platform
