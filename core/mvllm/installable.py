"""Packages that mvllm lists in its extras, read from its metadata.

The extra `executors` lists packages with an executor, the extra `parts` those with a part of mvllm, as a command; every
other package `mvllm-*` of an extra has a platform.
"""

from __future__ import annotations

import re

_REQUIREMENT = re.compile(r"(mvllm-[a-z0-9-]+)[^;]*;.*extra == ['\"]([^'\"]+)['\"]")
_EXECUTORS = "executors"
_PARTS = "parts"


def installable_platforms() -> list[str]:
    """Packages with a platform, installed or not, sorted."""
    return sorted(_packages() - _packages(_EXECUTORS) - _packages(_PARTS))


def installable_executors() -> dict[str, str]:
    """Names of executors of other packages, installed or not, and the command that installs each."""
    names = sorted(package.removeprefix("mvllm-") for package in _packages(_EXECUTORS))
    return {name: f'pip install "mvllm[{name}]"' for name in names}


def installable_parts() -> dict[str, str]:
    """Names of parts of mvllm that are packages of their own, installed or not, and the package of each."""
    return {package.removeprefix("mvllm-"): package for package in sorted(_packages(_PARTS))}


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
    return f'{installed or "none"}; not installed: {", ".join(missing)} (pip install "mvllm[{",".join(missing)}]")'


def missing_part(name: str, what: str) -> str | None:
    """An error's text for something that a part provides whose package is missing; None if no part has this name.

    Args:
        name: The part's: `bench`.
        what: What was asked for: "`mvllm bench`".
    """
    package = installable_parts().get(name)
    if package is None:
        return None
    return f'{what} needs the package {package}, which is not installed: pip install "mvllm[{name}]"'


def _installed_version(package: str) -> str | None:
    import importlib.metadata  # by commands that list parts

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(extra: str | None = None) -> set[str]:
    """Packages `mvllm-*` that one extra requires, or any extra."""
    import importlib.metadata  # for errors and listings

    try:
        requirements = importlib.metadata.requires("mvllm") or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    found = [match.groups() for text in requirements if (match := _REQUIREMENT.match(text))]
    return {package for package, of_extra in found if extra in (None, of_extra)}
