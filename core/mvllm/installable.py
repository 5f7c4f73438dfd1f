"""Packages that mvllm lists in its extras, read from its metadata.

The extra `executors` lists packages with an executor, the extra `parts` those with a part of mvllm, as a command; every
other package `mvllm-*` of an extra has a platform.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mvllm.installation import EXECUTORS, PARTS, find_distribution, install_command, listed_packages
from mvllm.installation import installable_platforms as installable_platforms


def unknown_platform(name: str, installed: Iterable[str]) -> str:
    """An error's text for a platform that is not installed: what is, and how the one that is meant is installed.

    The name is one that a user has typed, so it never becomes part of a command: only packages that mvllm lists do.

    Args:
        name: The platform's.
        installed: Names of platforms whose packages are installed.
    """
    packages = {package.removeprefix("mvllm-"): package for package in installable_platforms()}
    here = sorted(set(installed))
    listed = ", ".join(here) or "none"
    if name in packages:
        return (
            f"The platform {name!r} is not installed (installed: {listed}). Its package is {packages[name]}. "
            f"Run: {install_command(packages[name])}"
        )
    near = difflib.get_close_matches(
        name.lower(), sorted({*packages, *here}), n=1, cutoff=0.7
    )  # short names differ by a letter
    meant = ""
    if near and near[0] in here:
        meant = f" Did you mean {near[0]!r}?"
    elif near:
        meant = f" Did you mean {near[0]!r}? Run: {install_command(packages[near[0]])}"
    elif packages:
        meant = f" mvllm has packages for {', '.join(packages)}; others are those of vendors."
    return f"No platform is called {name!r}; installed: {listed}.{meant}"


def installable_executors() -> dict[str, str]:
    """Names of executors of other packages, installed or not, and the command that installs each."""
    return {name: install_command(package) for name, package in executor_packages().items()}


def executor_packages() -> dict[str, str]:
    """Names of executors of other packages, installed or not, and the package of each."""
    return {package.removeprefix("mvllm-"): package for package in sorted(listed_packages(EXECUTORS))}


def installable_parts() -> dict[str, str]:
    """Names of parts of mvllm that are packages of their own, installed or not, and the package of each."""
    return {package.removeprefix("mvllm-"): package for package in sorted(listed_packages(PARTS))}


def part_versions() -> dict[str, str | None]:
    """Names of parts of mvllm, each with the version of its package; None where it is not installed."""
    return {name: _installed_version(package) for name, package in installable_parts().items()}


def describe_parts() -> str:
    """The installed parts of mvllm with their versions, and the command that installs the others, in one line."""
    versions = part_versions()
    if not versions:
        return "unknown, since mvllm is run from a folder and not installed"
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return installed
    command = install_command(*(installable_parts()[name] for name in missing))
    return f"{installed or 'none'}; not installed: {', '.join(missing)}. To install: {command}"


def missing_part(name: str, what: str) -> str | None:
    """An error's text for something that a part provides whose package is missing; None if no part has this name.

    Args:
        name: The part's: `bench`.
        what: What was asked for: "`mvllm bench`".
    """
    package = installable_parts().get(name)
    if package is None:
        return None
    return f"{what} needs the package {package}, which is not installed. Run: {install_command(package)}"


def _installed_version(package: str) -> str | None:
    found = find_distribution(package)
    return None if found is None else found.version
