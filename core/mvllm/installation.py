"""How this installation of mvllm was made, and the commands that add to it or repair it.

On the public package index the name `mvllm` belongs to another project, and names like it to whoever takes them. So no
command here asks an index for a package of mvllm; it comes from where mvllm came from:

    a folder, such as a clone      its folder there            pip install /clone/plugins/compat
    a wheel, named by its path     the file beside the wheel   pip install --require-hashes --no-deps -r /wheels/cpu.txt
    unknown, or no longer there    the same, in general form   pip install … -r WHEELHOUSE/cpu.txt

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
from collections.abc import Iterable, Iterator
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
PARTS, EXECUTORS = "parts", "executors"
"""Extras of mvllm that list what is no platform: packages with a part of mvllm, such as a command, or an executor."""


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
    tool, wanted = _Tool.find(), _Wanted()
    for text in requirements:
        wanted.add(text, upgrade=upgrade)
    commands = []
    if wanted.own and not wanted.take_from_clone(upgrade=upgrade):
        if reinstall:
            commands.append(tool.uninstall(wanted.own))
        # Files for some devices leave torch out, so that without --no-deps they are refused.
        file = wanted.requirements_file(upgrade=upgrade)
        commands.append(tool.install(["--require-hashes", "--no-deps", "-r", file]))
    if wanted.folders or wanted.others:
        options = ["-U"] if upgrade and wanted.others else []
        if reinstall:
            options += ["--reinstall" if tool.is_uv else "--force-reinstall"]
            options += [] if wanted.others else ["--no-deps"]
        backend = torch_backend or wanted.torch_backend()
        if backend and tool.is_uv:
            options.append(f"--torch-backend={backend}")
        elif backend:
            first, device = "" if wanted.others else "torch first, ", backend.replace("auto", "your device")
            wanted.notes.append(f"{first}with the --index-url that PyTorch's installation page gives for {device}")
        commands.append(tool.install([*options, *dict.fromkeys(wanted.others), *wanted.folders]))
    return " && ".join(commands) + (f" ({'; '.join(wanted.notes)})" if wanted.notes else "")


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
    core = _core()
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


def installable_platforms() -> list[str]:
    """Packages with a platform, installed or not, sorted."""
    return sorted(listed_packages() - listed_packages(PARTS) - listed_packages(EXECUTORS))


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
        elif (found := _origin(find_distribution(name))).is_source and found.folder is not None:
            self.folders.append(("-e " if found.is_editable else "") + shlex.quote(str(found.folder)))
            self.notes += [f"after a change in {found.folder}"] if upgrade else []
        else:
            self.others.append(shlex.quote(text))

    def take_from_clone(self, *, upgrade: bool) -> bool:
        """Adds the folders of mvllm's packages in the clone that it came from; False without one."""
        origin = _core_origin()
        workspace = _workspace(origin)
        if not workspace.keys() >= {*self.own}:
            return False
        folders = dict.fromkeys(shlex.quote(str(workspace[name])) for name in _with_required(self.own, workspace))
        self.folders = [*(f"-e {folder}" if origin.is_editable else folder for folder in folders), *self.folders]
        self.notes += [f"after an update of {origin.folder}"] if upgrade else []
        return True

    def requirements_file(self, *, upgrade: bool) -> str:
        """The file of the wheelhouse that has mvllm's packages, quoted. Adds a note if the wheelhouse is not known.

        Files are named after platforms and executors, and each has all parts.
        """
        platforms = installable_platforms()
        wanted = [name for name in self.own if name in {*platforms, *listed_packages(EXECUTORS)}]
        wanted += [name for name in platforms if find_distribution(name) is not None]
        file = f"{wanted[0].removeprefix(f'{CORE}-') if wanted else 'PLATFORM'}.txt"
        folder = None if upgrade else _core_origin().folder
        if folder is not None and (folder / file).is_file():
            return shlex.quote(str(folder / file))
        release = " of a newer release" if upgrade else ""
        self.notes.append(f"{INSTALL_PAGE} says what WHEELHOUSE is: the folder with the packages of mvllm{release}")
        return f"WHEELHOUSE/{file}"

    def torch_backend(self) -> str | None:
        """`auto` if torch is installed with the packages; None if it is there, or none of them needs it."""
        with_folders = self.folders and not _has_torch() and {*self.own} & {*installable_platforms()}
        return "auto" if with_folders or any(re.match(r"'?torch\b(?!-)", text) for text in self.others) else None


# --- where things came from


def _core_origin() -> Origin:
    origin = _origin(_core())
    if origin.folder is not None and (not origin.is_source or _is_clone(origin.folder)):
        return origin
    clone = Path(__file__).resolve().parents[2]  # core/mvllm/installation.py
    return Origin(clone, is_source=True) if _is_clone(clone) else Origin()


def _is_clone(folder: Path) -> bool:
    return (_project(folder) or {}).get("name") == CORE


def _origin(distribution: Distribution | None) -> Origin:
    from urllib.parse import unquote, urlsplit

    try:
        found = json.loads((distribution.read_text("direct_url.json") if distribution else None) or "{}")
        url = urlsplit(found.get("url", ""))
        path = Path(unquote(url.path))
        if url.scheme == "file" and path.exists():
            if "dir_info" in found:
                return Origin(path, is_source=True, is_editable=bool(found["dir_info"].get("editable")))
            if "archive_info" in found:  # else a repository of git: the package is a commit of it
                return Origin(path.parent)
    except (OSError, ValueError, AttributeError):  # whatever the file contains, an error's text can be made
        pass
    return Origin()


def _with_required(names: Iterable[str], workspace: dict[str, Path]) -> Iterator[str]:
    """Packages of a clone, each after those of the clone that it requires and lacks: pip does not look for them."""
    for name in names:
        required = (_split(text)[0] for text in (_project(workspace[name]) or {}).get("dependencies", ()))
        lacking = (each for each in required if each in workspace and find_distribution(each) is None)
        yield from _with_required(lacking, workspace)
        yield name


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


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


# --- metadata


def _core() -> Distribution | None:
    """This project's `mvllm`; None where it is not installed."""
    return next(filter(_is_this_project, _core_distributions()), None)


def _is_this_project(distribution: Distribution) -> bool:
    return any((each.group, each.value) == _MARK for each in distribution.entry_points)


def _folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file(""))).resolve()


def _core_distributions() -> list[Distribution]:
    """What is installed under the name mvllm, in the order of the search path, without what an uninstall has left."""
    from importlib.metadata import distributions

    return [each for each in distributions(name=CORE) if each.metadata["Name"]]


def find_distribution(name: str) -> Distribution | None:
    """An installed distribution; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, distribution  # by errors and listings

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _requires(name: str) -> list[str]:
    import importlib.metadata

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

        core = _core()
        used_uv = core is not None and (core.read_text("INSTALLER") or "").strip() == "uv"
        if importlib.util.find_spec("pip") is not None and not (used_uv and shutil.which("uv")):
            found = shutil.which("pip")
            is_here = found is not None and Path(found).parent == Path(sys.executable).parent
            # Outside a virtual environment the folder may have several Pythons, and the pip of another one.
            is_ours = is_here and sys.prefix != sys.base_prefix
            return cls("pip" if is_ours else f"{shlex.quote(sys.executable)} -m pip")
        # uv takes .venv of the current folder if no environment is active; one of conda may be active for it or not.
        found_by_uv = str(Path(".venv").absolute()) if "CONDA_PREFIX" not in os.environ else None
        is_found = sys.prefix == (os.environ.get("VIRTUAL_ENV") or found_by_uv)
        return cls("uv pip", "" if is_found else f" --python {shlex.quote(sys.executable)}", is_uv=True)

    def install(self, arguments: Iterable[str]) -> str:
        return f"{self.command} install {' '.join(arguments)}{self.suffix}"

    def uninstall(self, names: Iterable[str]) -> str:
        return f"{self.command} uninstall {shlex.join(names)}{self.suffix}"
