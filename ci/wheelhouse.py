"""Builds the wheelhouse: a folder with everything that an installation of mvllm takes from the project.

    python3 ci/dev.py build                       into dist/; options: ci/dev.py build --help
    python3 ci/wheelhouse.py check FOLDER         checks one: hashes, versions, requirements files; --tag v0.9.0: that
                                                  it is of this version
    python3 ci/wheelhouse.py wheels FOLDER        whether every Python and system has the wheels that the files name
    python3 ci/wheelhouse.py pack FOLDER OUT      what a release is made of: an archive, the notes, files for an index

    *.whl                the distributions of this repository that users install
    cpu.txt, cuda.txt …  one requirements file for each platform; ray.txt adds the executor for Ray
    index.html           what there is, and how it is installed; pip reads the hashes of the wheels from it
    SHA256SUMS           of all other files
    sbom.cdx.json        the components, as a CycloneDX document
    source/              source archives
    torch/               torch for processors, if it comes from this machine. Not beside the other wheels: the build
                         2.13.0+cpu would be taken for the version 2.13.0 that cuda.txt names

A requirements file pins every distribution by version and hash. Those of the project come from the folder of the file
(`--find-links .`), all others from the package index. An index may have other distributions under the project's names:
their hashes differ, so pip and uv refuse them. docs/decisions/0180-wheelhouse.md has the reasons.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernel_wheels
import wheelhouse_page
from environments import Environment, StepFailed, Steps, pinned
from source_address import absolute_links, check_address, with_address
from wheelhouse_contents import (
    COMPONENTS,
    MANIFEST,
    PAGE,
    SOURCE,
    TARGETS,
    TORCH,
    Target,
    Wheel,
    check,
    digest,
    is_own,
    manifest,
    own_wheels,
    pins_of,
    requirements,
)

ROOT = Path(__file__).resolve().parent.parent
RELEASE = Environment(ROOT, ROOT / ".venv-release")
CONSTRAINTS = ROOT / "ci" / "constraints"
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheelhouse"
SOURCE_URL = "MVLLM_SOURCE_URL"  # the variable with the address of the repository; empty: no file names one
TORCH_INDEX = "https://download.pytorch.org/whl"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACOS = "14.0"
SYSTEMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")
EXTRAS = "completion,images,mcp,multimodal,otel"
VALIDATION = """
import pathlib, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
sys.exit(str(fault) if fault else 0)
"""
LEFT_OUT = shutil.ignore_patterns("build", "dist", "*.egg-info", "tests", "__pycache__", ".*", "*.so")


@dataclass(frozen=True)
class Torch:
    """Where the requirements files take the torch for processors from.

    Attributes:
        version: With the build: `2.13.0+cpu`.
        find_links: A page that lists only torch, or the wheelhouse's folder TORCH; None if no torch was found.
        wheels: Wheels that are copied into that folder.
    """

    version: str
    find_links: str | None
    wheels: tuple[Path, ...] = ()


# --------------------------------------------------------------------------------------------------------------- steps


def setup() -> None:
    """Creates or updates .venv-release; returns at once if it is up to date.

    Raises:
        StepFailed: A command failed.
    """
    titles = ("virtual environment for the build", "build backends, uv, auditwheel (60 MB)")
    RELEASE.install_pins(CONSTRAINTS / "release.txt", ("auditwheel", "pyproject-build", "uv"), titles)


def build(projects: Sequence[Path], torch_index: str, *, out: Path = DIST, compiled: bool = True) -> int:
    """Builds the wheelhouse.

    Args:
        projects: Folders of the distributions.
        torch_index: PyTorch's index, without the name of the build, or a folder with torch's wheels for processors.
        out: The folder; files of an earlier build are removed, others stay.
        compiled: Whether mvllm-cpu's kernels are compiled, which takes minutes.

    Raises:
        StepFailed: A command failed, or the result is not consistent.
    """
    setup()
    os.environ.setdefault("SOURCE_DATE_EPOCH", last_change())
    staged, sources = WORK / "staged", WORK / "sources"
    for folder in (staged, sources):
        shutil.rmtree(folder, ignore_errors=True)
    (staged / SOURCE).mkdir(parents=True)
    copies = {name_of(project): copy_project(project, sources) for project in projects}
    versions = {name: version_of(folder) for name, folder in copies.items()}
    agree(versions)
    steps = Steps(RELEASE, total=2 * len(copies) + len(TARGETS) + 1)
    backend = [RELEASE.python, "-m", "build", "--no-isolation"]
    for name, folder in copies.items():
        steps.run(f"{name}, sources", [*backend, "--sdist", "--outdir", staged / SOURCE, folder])
        # Without sources of kernels: a wheel for systems that none of those with kernels is for.
        plain = shutil.copytree(folder, sources / f"{folder.name}-plain", ignore=shutil.ignore_patterns("csrc"))
        steps.run(name, [*backend, "--wheel", "--outdir", staged, plain])
    if compiled:
        for wheel in kernel_wheels.build(RELEASE, copies["mvllm-cpu"], WORK / "kernels"):
            shutil.copy(wheel, staged)
    assemble(staged, find_torch(torch_index, pinned("torch", CONSTRAINTS / "cpu.txt")), steps)
    replace(staged, out)
    for path in sorted(out.glob("*")):
        print(f"  {path.name}{'/' if path.is_dir() else f'  {path.stat().st_size / 1e6:.2f} MB'}")
    return 0


def assemble(folder: Path, torch: Torch, steps: Steps) -> None:
    """Adds everything else to a folder with the project's wheels.

    Raises:
        StepFailed: A command failed, or the result is not consistent.
    """
    own = own_wheels(folder)
    for wheel in torch.wheels:
        (folder / TORCH).mkdir(exist_ok=True)
        shutil.copy(wheel, folder / TORCH)
    for target in TARGETS:
        with steps.timed(target.file):
            write_requirements(target, own, torch, folder)
    (folder / COMPONENTS).write_text(wheelhouse_page.components(own, pins_of(folder)), encoding="utf-8")
    steps.run("components against CycloneDX's schema", [RELEASE.python, "-c", VALIDATION, folder / COMPONENTS])
    page = wheelhouse_page.page(own, torch.version, torch.find_links is not None, source_url())
    (folder / PAGE).write_text(page, encoding="utf-8")
    write_manifest(folder)
    check(folder)
    if torch.find_links is None:
        lacking = ", ".join(target.file for target in TARGETS if target.torch == "cpu")
        print(f"note: {lacking} have no torch, since no torch {torch.version} was found: see --torch-index")


def last_change() -> str:
    """The time of the last commit in seconds, which wheels carry as the time of their files."""
    # In a container the files belong to another user, whose repositories git refuses to read without being told.
    command = ["git", "-c", f"safe.directory={RELEASE.root}", "log", "-1", "--format=%ct"]
    output, status = RELEASE.capture(command)
    return output.strip() if status == 0 and output.strip().isdigit() else "315532800"  # 1980, the oldest in a zip


def source_url() -> str:
    """The address of the repository, or an empty string.

    Raises:
        StepFailed: The variable has something else.
    """
    try:
        return check_address(os.environ.get(SOURCE_URL, ""))
    except ValueError as e:
        raise StepFailed(f"error: {e}") from None


def copy_project(project: Path, folder: Path) -> Path:
    """Copies a project without what earlier builds left there, which setuptools would put into the wheel.

    The copy's metadata and README.md name the repository if MVLLM_SOURCE_URL is set.
    """
    copy = folder / (project.name if project != ROOT else "mvllm")
    if project == ROOT:
        copy.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        shutil.copytree(ROOT / "core", copy / "core", ignore=LEFT_OUT)
        readme = copy / "README.md"
        filled = with_address(readme.read_text(encoding="utf-8"), source_url(), version_of(ROOT))
        readme.write_text(filled, encoding="utf-8")
    else:
        shutil.copytree(project, copy, ignore=LEFT_OUT)
    if source_url():
        declared = copy / "pyproject.toml"
        text = declared.read_text(encoding="utf-8")
        declared.write_text(f'{text}\n[project.urls]\nSource = "{source_url()}"\n', encoding="utf-8")
    return copy


def name_of(project: Path) -> str:
    """The name of the project's distribution."""
    return str(tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])


def version_of(project: Path) -> str:
    """The version of the project's distribution."""
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    if "version" in declared["project"]:
        return str(declared["project"]["version"])
    text = (project / declared["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    match = re.search(r'^(?:__version__|VERSION)\b.*?"([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise StepFailed(f"error: {project} states no version")
    return match.group(1)


def agree(versions: Mapping[str, str]) -> None:
    """Raises StepFailed if two distributions have different versions."""
    wanted = versions["mvllm"]
    others = [f"{name} {version}" for name, version in versions.items() if version != wanted]
    if others:
        raise StepFailed(
            f"error: mvllm is {wanted}, but {', '.join(others)}\n  remedy: set one version in every pyproject.toml"
        )


# --------------------------------------------------------------------------------------------------------------- torch


def find_torch(index: str, version: str) -> Torch:
    """The torch for processors: in a folder, in PyTorch's index, or where pip's settings find it.

    The default torch of a package index is a build for one kind of accelerator, of gigabytes. The build for processors
    is another version, `+cpu`, which package indexes do not have; so the default one cannot be installed instead.
    """
    build = f"{version}+cpu"
    if Path(index).is_dir():
        wheels = tuple(sorted(Path(index).glob(f"torch-{build}-*.whl")))
        return Torch(build, TORCH if wheels else None, wheels)
    page = f"{index.rstrip('/')}/cpu/torch/"
    try:
        with urllib.request.urlopen(page, timeout=20) as answer:  # noqa: S310  what the release engineer has given
            text = answer.read().decode()
    except (OSError, ValueError) as e:  # ValueError: not an address
        print(f"note: {page} cannot be read ({e}); asking pip for torch {build}", flush=True)
        text = ""
    if f"torch-{quote_version(build)}-" in text or f"torch-{build}-" in text:
        return Torch(build, page)
    folder = WORK / "torch"
    command = [RELEASE.python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    _, status = RELEASE.capture([*command, "--dest", folder, f"torch=={build}"])
    wheels = tuple(sorted(folder.glob(f"torch-{build}-*.whl"))) if status == 0 else ()
    return Torch(build, TORCH if wheels else None, wheels)


def quote_version(version: str) -> str:
    """A version in the address of a file."""
    return version.replace("+", "%2B")


# -------------------------------------------------------------------------------------------------- requirements files


def write_requirements(target: Target, own: Sequence[Wheel], torch: Torch, folder: Path) -> None:
    """Writes the requirements file of one platform into `folder`.

    Raises:
        StepFailed: The versions cannot be resolved.
    """
    wheels: dict[str, list[Wheel]] = {}
    for wheel in own:
        wheels.setdefault(wheel.name, []).append(wheel)
    names = closure(target, {name: files[0].requires for name, files in wheels.items()})
    with_torch = target.torch == "index" or (target.torch == "cpu" and torch.find_links is not None)
    extras = {"mvllm": f"[{EXTRAS}]"} if target.parts else {}
    wanted = [f"{name}{extras.get(name, '')} @ {wheels[name][0].path.as_uri()}" for name in names]
    wanted += target.further
    find_links: list[str | Path] = []
    if with_torch and target.torch == "cpu":
        mac = "sys_platform == 'darwin'"  # the index has builds without an accelerator's libraries for macOS
        wanted += [f"torch=={torch.version}; sys_platform != 'darwin'", f"torch=={torch.version.split('+')[0]}; {mac}"]
        find_links = ["--find-links", folder / TORCH if torch.find_links == TORCH else str(torch.find_links)]
    pins = resolve(target, wanted, find_links, [*names, *([] if with_torch else ["torch"])], with_torch, folder)
    lines = header(target, torch, with_torch)
    if with_torch and target.torch == "cpu":
        lines.append(f"--find-links {torch.find_links}")
    for name in names:
        hashes = [f"    --hash=sha256:{wheel.sha256}" for wheel in wheels[name]]
        lines.append(" \\\n".join([f"{name}=={wheels[name][0].version}", *hashes]))
    (folder / target.file).write_text("\n".join(lines) + "\n" + pins, encoding="utf-8")


def header(target: Target, torch: Torch, with_torch: bool) -> list[str]:
    """The first lines of a requirements file."""
    command = f"install --require-hashes{'' if with_torch else ' --no-deps'} -r WHEELHOUSE/{target.file}"
    lines = [
        f"# mvllm for {target.device}: Python {PYTHONS[0]} to {PYTHONS[-1]}, Linux and macOS.",
        f"#   pip {command}",
        f"#   uv pip {command}",
        "# Each distribution of the project is the file beside this one that has the hash below.",
    ]
    if not with_torch and target.parts:
        lines.append(f"# torch is not in this file. Install the build of the device before: {PAGE} has the command.")
    if with_torch and target.torch == "cpu" and torch.find_links == TORCH:
        builds = ", ".join(wheel.name.split("-", 2)[2].removesuffix(".whl") for wheel in torch.wheels)
        lines.append(f"# On Linux, torch is the wheel in {TORCH}/ ({builds}); other Pythons and systems have none.")
    return [*lines, "--find-links ."]


def closure(target: Target, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the project's distributions for a platform: those that it requires, and all parts if it has them."""
    waiting = ["mvllm", *(name_of(ROOT / project) for project in target.projects)]
    if target.parts:
        waiting += [requirement.split(">")[0] for requirement in parts()]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [match.group() for text in known[name] if (match := re.match(r"mvllm(-[a-z0-9-]+)?", text))]
    return sorted(found)


def parts() -> list[str]:
    """The requirements of core's extra `parts`."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(declared["project"]["optional-dependencies"]["parts"])


def same_versions(target: Target, folder: Path) -> str:
    """Pins of the first requirements file, which others share: an environment may be made from two files."""
    first = folder / TARGETS[0].file
    if not first.exists() or target.constraints[0] != TARGETS[0].constraints[0]:
        return ""
    lines = (line.split(" --hash")[0].strip() for line in requirements(first))
    return "".join(f"{line}\n" for line in lines if not is_own(line) and not line.startswith("torch=="))


def resolve(
    target: Target,
    wanted: Sequence[str],
    find_links: Sequence[str | Path],
    left_out: Sequence[str],
    with_torch: bool,
    folder: Path,
) -> str:
    """Pins, with hashes, for every Python and system; those of `left_out` are not in the result.

    Raises:
        StepFailed: uv found no solution.
    """
    with tempfile.TemporaryDirectory() as place:
        (asked := Path(place) / "requirements.in").write_text("\n".join(wanted) + "\n", encoding="utf-8")
        (others := Path(place) / "overrides.txt").write_text("torch; sys_platform == 'never'\n", encoding="utf-8")
        (out := Path(place) / "pins.txt").touch()
        (same := Path(place) / "same.txt").write_text(same_versions(target, folder), encoding="utf-8")
        tested = [CONSTRAINTS / f"{name}.txt" for name in target.constraints]
        constraints = [text for file in (same, *tested) for text in ("--constraints", file)]
        command = [RELEASE.bin / "uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHONS[0]]
        command += ["--generate-hashes", "--no-annotate", "--no-header", "--no-build", *find_links, *constraints]
        command += [text for name in left_out for text in ("--no-emit-package", name)]
        command += [] if with_torch else ["--overrides", others]
        output, status = RELEASE.capture([*command, "--output-file", out, asked])
        if status != 0:
            raise StepFailed(f"error: no versions for {target.file}\n{output.strip()}")
        text = out.read_text(encoding="utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


# --------------------------------------------------------------------------------------------------- files and checking


def write_manifest(folder: Path) -> None:
    """Writes SHA256SUMS."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    lines = [f"{digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def replace(staged: Path, out: Path) -> None:
    """Moves the files of a build to `out`, in place of those of an earlier one."""
    out.mkdir(exist_ok=True)
    for name in (SOURCE, TORCH):
        shutil.rmtree(out / name, ignore_errors=True)
    for old in [*out.glob("mvllm*.whl"), *out.glob("mvllm*.tar.gz"), *(out / target.file for target in TARGETS)]:
        old.unlink(missing_ok=True)
    for path in staged.iterdir():
        shutil.move(path, out / path.name)


def check_wheels(folder: Path) -> int:
    """Prints, for every Python and system, whether all that cpu.txt names has a wheel; 1 if one is missing.

    torch is left out: which wheels PyTorch has is its own choice.
    """
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        wanted = [line for line in requirements(folder / "cpu.txt") if not line.startswith("torch==")]
        (file := Path(place) / "cpu.txt").write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        install = [RELEASE.bin / "uv", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--require-hashes"]
        install += ["--only-binary", ":all:", "--target", Path(place) / "none", "--find-links", folder.resolve()]
        for system in SYSTEMS:
            for python in PYTHONS:
                command = [*install, "--python-version", python, "--python-platform", system, "-r", file]
                output, status = RELEASE.capture(command, extra={"MACOSX_DEPLOYMENT_TARGET": MACOS})
                failed |= status != 0
                print(f"{system}, Python {python}: {'ok' if status == 0 else output.strip()}", flush=True)
    return int(failed)


def pack(folder: Path, out: Path) -> None:
    """Writes what a release is made of.

        OUT/mvllm-VERSION-wheelhouse.tar.gz    the wheelhouse
        OUT/notes.md                           the section of this version in CHANGELOG.md
        OUT/distributions/                     wheels and source archives, for an index that has the project's names

    Raises:
        StepFailed: CHANGELOG.md has no notes of this version.
    """
    version = own_wheels(folder)[0].version
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(version)}(?: .*?)?$\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None or not match[1].strip():
        raise StepFailed(f"error: CHANGELOG.md has no notes of {version}\n  remedy: write them below `## {version}`")
    distributions = out / "distributions"
    shutil.rmtree(distributions, ignore_errors=True)  # and nothing else: the user has named `out`
    for old in out.glob("mvllm-*-wheelhouse.tar.gz"):
        old.unlink()
    distributions.mkdir(parents=True)
    notes = absolute_links(match[1].strip(), source_url(), version)
    (out / "notes.md").write_text(f"{notes}\n", encoding="utf-8")
    name = f"mvllm-{version}-wheelhouse"
    listed = [file for _, file in manifest(folder)]
    with tarfile.open(out / f"{name}.tar.gz", "w:gz") as archive:
        for file in [MANIFEST, *listed]:
            archive.add(folder / file, f"{name}/{file}", filter=without_owner)
    for file in listed:
        if re.fullmatch(rf"mvllm[^/]*\.whl|{SOURCE}/mvllm[^/]*\.tar\.gz", file):
            shutil.copy(folder / file, distributions)


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member of an archive that says nothing about the account that built it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "wheels", "pack"])
    parser.add_argument("folder", type=Path, nargs="?", default=DIST)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build" / "release")
    parser.add_argument("--tag", default="", help="check, pack: the release, such as v0.9.0; empty for any")
    options = parser.parse_args(argv)
    try:
        if options.command == "wheels":
            setup()
            return check_wheels(options.folder)
        check(options.folder)
        version = own_wheels(options.folder)[0].version
        if options.tag and options.tag != f"v{version}":
            raise StepFailed(f"error: the tag of this wheelhouse is v{version}, not {options.tag}")
        if options.command == "pack":
            pack(options.folder, options.out)
        print(f"{options.folder} is consistent: mvllm {version}")
        return 0
    except StepFailed as failure:
        print(failure, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
