"""`mvllm platforms`: lists the installed platform plugins and their availability."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mvllm import plugin_groups
from mvllm.errors import PlatformError
from mvllm.installation import conflicting_distribution
from mvllm.platform.choose import choose_candidate, nothing_installed
from mvllm.platform.discovery import SLOW_PROBE_SECONDS, Candidate, discover, dotted, find_sources
from mvllm.platform.spec import CONTRACT
from mvllm.plugin_groups import PluginSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--platform", metavar="NAME", help="List this platform only; no other plugin is imported.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--verbose", action="store_true", help="Print the traceback of a broken plugin.")


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns 0 even if a plugin is broken or not available."""
    if (conflict := conflicting_distribution()) is not None:
        raise PlatformError(conflict)
    candidates = discover(only=args.platform)
    if args.json:
        print(json.dumps({"contract": dotted(CONTRACT), "platforms": [_as_json(c) for c in candidates]}, indent=2))
        return 0
    chosen = _chosen(candidates) if args.platform is None else None
    if not candidates:
        print(_nothing_found(args.platform))
    for candidate in candidates:
        print("\n".join(_lines(candidate, verbose=args.verbose)))
        if chosen is not None and chosen[0] is candidate:
            print(f"  chosen    {chosen[1]}")
    return 0


def _chosen(candidates: list[Candidate]) -> tuple[Candidate, str] | None:
    """The platform of which an engine would be made, and why; None if there is an error instead, or no other."""
    if len(candidates) < 2:
        return None
    try:
        return choose_candidate(candidates)
    except PlatformError:
        return None


def _nothing_found(name: str | None) -> str:
    from mvllm.installable import unknown_platform

    if name is not None:
        return unknown_platform(name, (source.name for source in find_sources()))
    return nothing_installed()


def _lines(candidate: Candidate, *, verbose: bool) -> list[str]:
    source, spec, probe, failure = candidate.source, candidate.spec, candidate.probe, candidate.failure
    lines = [
        f"{candidate.name}: {availability(candidate)}",
        f"  plugin    {source.distribution} {source.version} (entry point {source.name} = {source.entry_point})",
    ]
    if spec is not None:
        lines.append(f"  contract  {dotted(spec.contract)} (this core speaks {dotted(CONTRACT)})")
        lines.append(f"  vendor    {spec.vendor}" + (f", torch >= {spec.torch_floor}" if spec.torch_floor else ""))
    if failure is not None:
        lines.append(f"  {failure.stage:<9} {failure.message}")
        lines.append(f"  remedy    {failure.remedy}")
        if verbose and failure.details():
            lines += ["  " + line for line in failure.details().rstrip().splitlines()]
    elif probe is not None:
        slow = ", slow: a probe takes under a second" if candidate.probe_seconds > SLOW_PROBE_SECONDS else ""
        lines.append(f"  probe     {probe.reason} ({candidate.probe_seconds * 1000:.0f} ms{slow})")
        if probe.remedy and not probe.available:
            lines.append(f"  remedy    {probe.remedy}")
        for device in probe.devices:
            memory = f", {device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes is not None else ""
            lines.append(f"  device {device.index}  {device.name}{memory}")
    return lines


def _as_json(candidate: Candidate) -> dict[str, Any]:
    source, spec, probe, failure = candidate.source, candidate.spec, candidate.probe, candidate.failure
    return {
        "name": candidate.name,
        "available": candidate.available,
        "distribution": source.distribution,
        "version": source.version,
        "entry_point": source.entry_point,
        "contract": dotted(spec.contract) if spec else None,
        "vendor": spec.vendor if spec else None,
        "torch_floor": spec.torch_floor if spec else None,
        "is_host": spec.is_host if spec else None,
        "reason": availability_reason(candidate),
        "remedy": failure.remedy if failure else probe.remedy if probe else None,
        "failed_at": failure.stage if failure else None,
        "devices": [
            {"index": d.index, "name": d.name, "memory_bytes": d.memory_bytes} for d in (probe.devices if probe else ())
        ],
    }


def availability(candidate: Candidate) -> str:
    """`available`, `not available` or `broken`."""
    return "broken" if candidate.failure else "available" if candidate.available else "not available"


def availability_reason(candidate: Candidate) -> str | None:
    """Why a platform is available or not: the failure's message or the probe's reason; None where it was not probed."""
    failure, probe = candidate.failure, candidate.probe
    return failure.message if failure else probe.reason if probe else None


def installed_plugins() -> list[tuple[plugin_groups.PluginGroup, PluginSource]]:
    """Installed plugins other than platforms, each with its group. None is imported."""
    return [(group, source) for group in plugin_groups.ALL for source in plugin_groups.list_plugins(group)]
