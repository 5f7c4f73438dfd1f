"""How this installation of mvllm was made, and the commands that add to it or repair it.

On the public package index the name `mvllm` belongs to another project, and names like it to whoever takes them. So no
command here asks an index for a package of mvllm; it comes from where mvllm came from:

    a folder, such as a clone      its folder there            pip install /clone/plugins/compat
    a wheel, named by its path     the file beside the wheel   pip install --require-hashes -r /wheels/cpu.txt
    unknown, or no longer there    the same, in general form   pip install --require-hashes -r WHEELHOUSE/cpu.txt

Of a requirements file, such as a wheelhouse has, pip and uv record nothing: it is unknown then.

Libraries, and packages of vendors that are installed, have names of their own, which are given to the index.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import Distribution

CORE = "mvllm"
INSTALL_PAGE = "docs/how-to/install.md"

_MARK = ("console_scripts", "mvllm.entrypoints.cli.main:main")
"""The entry point by which the metadata of this project's `mvllm` is known; the other project's has another value."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^]]*)\])?")
_PART = re.compile(r"(mvllm-[a-z0-9-]+)[^;]*;.*extra == ['\"]([^'\"]+)['\"]")
_NO_PLATFORMS = ("parts", "executors")  # extras that list what is no platform


@dataclass(frozen=True)
class Origin:
    """Where an installed distribution came from, by its `direct_url.json`.

    Attributes:
        folder: The folder it was built from, or the folder of its wheel; None if it is not known or no longer exists.
        is_source: Whether it was built from the folder.
        is_editable: Whether it is imported from there.
    """

    folder: Path | None = None
    is_source: bool = False
    is_editable: bool = False


def install_command(
    *requirements: str, upgrade: bool = False, reinstall: bool = False, torch_backend: str | None = None
) -> str:
    """The command that installs packages into this environment, the way in which mvllm was installed.

    It is for error messages: run nothing of it without asking. Never pass a name that a user has typed.

    Args:
        requirements: Names of packages, with a version (`pillow>=11`) or extras (`mvllm[otel]`), or `-e FOLDER`. Of a
            package of mvllm the version is ignored, since what there is has one; an extra of an installed package
            stands for the libraries that it lists.
        upgrade: Another version is needed than the installed one.
        reinstall: Installs again what is installed, as it is damaged.
        torch_backend: Which build of torch to take, as `uv pip install --torch-backend` names it, if torch is among
            what is installed.

    Returns:
        One line for a shell, which may end in a note in parentheses.
    """
    tool, origin, wanted = _Tool.find(), _core_origin(), _Wanted()
    for text in requirements:
        wanted.add(text, upgrade=upgrade)
    own, others, folders, notes = wanted.own, wanted.others, wanted.folders, wanted.notes
    commands = []
    if own and (paths := _own_folders(own, origin, with_required=not tool.is_uv)):
        folders = [*paths, *folders]
        notes += [f"after an update of {origin.folder}"] * upgrade
    elif own:
        file, note = _requirements_file(own, None if upgrade else origin.folder)
        note += " of a newer release" * bool(note and upgrade)
        if reinstall:
            commands.append(tool.uninstall(own))
        commands.append(tool.install(["--require-hashes", "-r", file]))
        notes += [note] * bool(note)
    if folders or others:
        options = ["-U"] * bool(upgrade and others)
        if reinstall:
            options += ["--reinstall" if tool.is_uv else "--force-reinstall"] + ["--no-deps"] * (not others)
        backend = torch_backend or ("auto" if folders and _brings_torch(own) else None)
        if backend and tool.is_uv:
            options.append(f"--torch-backend={backend}")
        elif backend:
            first = "" if others else "after torch, "
            notes.append(f"{first}with the --index-url that PyTorch's installation page gives for {backend}")
        commands.append(tool.install([*options, *dict.fromkeys(others), *folders]))
    return " && ".join(commands) + (f" ({'; '.join(notes)})" if notes else "")


def uninstall_command(*distributions: str) -> str:
    """The command that removes installed packages from this environment."""
    return _Tool.find().uninstall(distributions)


def conflicting_distribution() -> str | None:
    """Why the installed metadata of `mvllm` is not this project's, and what to do; None if nothing is wrong.

    Two cases: another project's package is installed where this code would be found, or beside it in one folder. No
    metadata at all (a folder on the search path) is in order. Takes about a millisecond.
    """
    found = _core_distributions()
    # Another one in a folder that is searched later is never imported.
    reached = [each for each in found if _folder(each) == _folder(found[0])]
    foreign = next((each for each in reached if not _is_this_project(each)), None)
    if foreign is None:
        return None
    return (
        f"The package mvllm {foreign.version} in {_folder(foreign)} belongs to another project, which has the name "
        f"mvllm on the public package index; this is the inference engine mvllm {__version__}, and some of its files "
        "may have been replaced. The two cannot be in one environment. "
        f"Run: {_Tool.find().uninstall([CORE])}, until none is left, then {install_command(CORE)}"
    )


def describe_installation() -> str:
    """Where mvllm came from, and the installer of this environment, in one line."""
    origin, tool = _core_origin(), _Tool.find()
    core = next(filter(_is_this_project, _core_distributions()), None)
    made = "run from a folder, without an installation" if core is None else f"mvllm {core.version}"
    is_recorded = core is not None and core.read_text("direct_url.json")
    came = "from a source that is not on this machine" if is_recorded else "from a wheelhouse or an index"
    if origin.folder is not None:
        kind = "the folder" if origin.is_source else "a wheel in"
        came = f"from {kind} {origin.folder}" + ", editable" * origin.is_editable
    return f"{made}, {came}; the installer is `{tool.command}`" + f" (with{tool.suffix})" * bool(tool.suffix)


def is_own(distribution: str) -> bool:
    """Whether a package is one of mvllm's, installed or not: in its extras, required by those, or in its clone."""
    name = _normalized(distribution)
    if name == CORE or name in listed_packages():
        return True
    if not name.startswith(f"{CORE}-"):
        return False
    if name in _workspace(_core_origin()):
        return True
    required = {_split(text)[0] for package in listed_packages() for text in _requires(package)}
    return name in required


def listed_packages(extra: str | None = None) -> set[str]:
    """Packages `mvllm-*` that one extra of mvllm requires, or any extra; none where it is not installed."""
    found = [match.groups() for text in _requires(CORE) if (match := _PART.match(text))]
    return {package for package, of_extra in found if extra in (None, of_extra)}


@dataclass
class _Wanted:
    """Requirements by where their packages come from.

    Attributes:
        own: Names of mvllm's packages.
        others: Requirements for an index, quoted.
        folders: Arguments for packages that are built from a folder.
        notes: What the user has to do besides.
    """

    own: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, text: str, *, upgrade: bool) -> None:
        if text.startswith("-e "):
            self.folders.append(f"-e {shlex.quote(text[3:])}")
            return
        name, extras = _split(text)
        if extras and (libraries := _libraries(name, extras)):
            self.others += libraries
        elif is_own(name):
            self.own.append(name)
        elif (found := _origin(_distribution(name))).is_source and found.folder is not None:
            self.folders.append(("-e " if found.is_editable else "") + shlex.quote(str(found.folder)))
            self.notes += [f"after a change in {found.folder}"] * upgrade
        else:
            self.others.append(shlex.quote(text))


# --- where things came from


def _core_origin() -> Origin:
    origin = _origin(next(filter(_is_this_project, _core_distributions()), None))
    if origin.folder is not None and (not origin.is_source or _project(origin.folder) is not None):
        return origin
    clone = Path(__file__).resolve().parents[2]  # core/mvllm/installation.py
    return Origin(clone, is_source=True) if (_project(clone) or {}).get("name") == CORE else Origin()


def _origin(distribution: Distribution | None) -> Origin:
    from urllib.parse import unquote, urlsplit

    try:
        found = json.loads((distribution.read_text("direct_url.json") if distribution else None) or "{}")
        url = urlsplit(found.get("url", ""))
        path = Path(unquote(url.path))
        if url.scheme != "file" or not path.exists():
            return Origin()
        if "dir_info" in found:
            return Origin(path, is_source=True, is_editable=bool(found["dir_info"].get("editable")))
    except (OSError, ValueError, AttributeError):
        return Origin()
    return Origin(path.parent)


def _own_folders(names: Iterable[str], origin: Origin, *, with_required: bool) -> list[str]:
    """The folders of packages in the clone that mvllm was installed from, each with its option; empty without a clone.

    Args:
        names: The packages.
        origin: Where mvllm came from.
        with_required: Whether folders of packages of mvllm that they require, and that are not installed, come first.
    """
    workspace = _workspace(origin)
    found: dict[Path, None] = {}

    def add(name: str) -> None:
        for required in (_project(workspace[name]) or {}).get("dependencies", ()) if with_required else ():
            needed = _split(required)[0]
            if needed in workspace and workspace[needed] not in found and _distribution(needed) is None:
                add(needed)
        found[workspace[name]] = None

    for name in map(_normalized, names):
        if name not in workspace:
            return []
        add(name)
    quoted = [shlex.quote(str(folder)) for folder in found]
    return [f"-e {folder}" for folder in quoted] if origin.is_editable else quoted


def _workspace(origin: Origin) -> dict[str, Path]:
    """The folders of a clone by the names of the packages in them; empty if mvllm came from no clone."""
    if not origin.is_source or origin.folder is None:
        return {}
    folders = [origin.folder, *sorted(origin.folder.glob("p*/*"))]  # platforms, plugins
    return {project["name"]: folder for folder in folders if (project := _project(folder)) is not None}


@functools.cache
def _project(folder: Path) -> dict[str, Any] | None:
    """The table `project` of a folder's pyproject.toml; None without one."""
    import tomllib

    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        return project if isinstance(project["name"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _requirements_file(names: Iterable[str], folder: Path | None) -> tuple[str, str]:
    """The requirements file of the wheelhouse that has some packages, and a note that explains its name.

    Args:
        names: The packages. Files are named after platforms and executors, and each has all parts.
        folder: The wheelhouse; None if it is not known.
    """
    platforms = sorted(listed_packages().difference(*map(listed_packages, _NO_PLATFORMS)))
    wanted = [name for name in map(_normalized, names) if name in {*platforms, *listed_packages("executors")}]
    wanted += [name for name in platforms if _distribution(name) is not None]
    stem = wanted[0].removeprefix(f"{CORE}-") if wanted else "PLATFORM"
    if folder is not None and (file := folder / f"{stem}.txt").is_file():
        return shlex.quote(str(file)), ""
    return f"WHEELHOUSE/{stem}.txt", f"{INSTALL_PAGE} says what WHEELHOUSE is: the folder with the packages of mvllm"


def _libraries(name: str, extras: Iterable[str]) -> list[str]:
    """What the extras of a package require that is not mvllm's own, quoted; empty where it is not installed."""
    found: list[str] = []
    for text in _requires(name):
        requirement, _, marker = text.partition(";")
        if not any(re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker) for extra in extras):
            continue
        package, further = _split(requirement)
        if further and is_own(package):
            found += _libraries(package, further)
        elif not is_own(package):
            found.append(shlex.quote(requirement.strip()))
    return list(dict.fromkeys(found))


def _brings_torch(names: Iterable[str]) -> bool:
    not_platforms = set().union(*map(listed_packages, _NO_PLATFORMS))
    wanted = listed_packages().difference(not_platforms).intersection(map(_normalized, names))
    return bool(wanted) and not _has_torch()


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


# --- metadata


def _is_this_project(distribution: Distribution) -> bool:
    return any((each.group, each.value) == _MARK for each in distribution.entry_points)


def _folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file(""))).resolve()


def _core_distributions() -> list[Distribution]:
    """What is installed under the name mvllm, in the order of the search path."""
    from importlib.metadata import distributions

    return list(distributions(name=CORE))


def _distribution(name: str) -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _requires(name: str) -> list[str]:
    import importlib.metadata  # by errors and listings

    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _split(requirement: str) -> tuple[str, list[str]]:
    """Name and extras of a requirement."""
    match = _REQUIREMENT.match(requirement.strip())
    if match is None:
        raise ValueError(f"{requirement!r} is no requirement.")
    return _normalized(match[1]), [extra.strip() for extra in (match[2] or "").split(",") if extra.strip()]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- the installer


@dataclass(frozen=True)
class _Tool:
    """The installer of this environment: `pip`, or `uv pip`, since environments that uv has made have no pip.

    Attributes:
        command: What a shell finds: another Python's `pip` may come first in its search path.
        suffix: Names this environment where the installer would take another.
    """

    command: str
    suffix: str = ""
    is_uv: bool = False

    @classmethod
    def find(cls) -> _Tool:
        import shutil

        core = _distribution(CORE)
        used_uv = core is not None and (core.read_text("INSTALLER") or "").strip() == "uv"
        if importlib.util.find_spec("pip") is not None and not (used_uv and shutil.which("uv")):
            found = shutil.which("pip")
            is_here = found is not None and Path(found).parent == Path(sys.executable).parent
            return cls("pip" if is_here else f"{shlex.quote(sys.executable)} -m pip")
        active = (os.environ.get("VIRTUAL_ENV"), str(Path(".venv").absolute()))
        return cls("uv pip", "" if sys.prefix in active else f" --python {shlex.quote(sys.executable)}", is_uv=True)

    def install(self, arguments: Iterable[str]) -> str:
        return f"{self.command} install {' '.join(arguments)}{self.suffix}"

    def uninstall(self, names: Iterable[str]) -> str:
        return f"{self.command} uninstall {' '.join(names)}{self.suffix}"
