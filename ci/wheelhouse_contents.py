"""What is in a wheelhouse: its requirements files and wheels, and whether they are consistent; see ci/wheelhouse.py."""

from __future__ import annotations

import hashlib
import re
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from environments import StepFailed

MANIFEST, PAGE, COMPONENTS = "SHA256SUMS", "index.html", "sbom.cdx.json"
SOURCE, TORCH = "source", "torch"


@dataclass(frozen=True)
class Target:
    """One requirements file.

    Attributes:
        name: Of the file, without `.txt`: the platform.
        device: What it is for, in words.
        projects: Folders of the distributions that users ask for; their requirements are added.
        torch: `cpu`: the build for processors, from PyTorch's index. `index`: the build of the package index. `first`:
            not in the file; users install the build of their device before.
        backend: What `uv pip install --torch-backend` and the last part of the address of PyTorch's index are called.
        constraints: Names of the files with the versions that are tested.
        further: Requirements that no distribution of the project declares.
        parts: Whether it has all parts of mvllm.
    """

    name: str
    device: str
    projects: tuple[str, ...]
    torch: str = "cpu"
    backend: str = "cpu"
    constraints: tuple[str, ...] = ("cpu",)
    further: tuple[str, ...] = ()
    parts: bool = True

    @property
    def file(self) -> str:
        """The name of the requirements file."""
        return f"{self.name}.txt"


TARGETS = (
    Target("cpu", "processors", ("platforms/cpu",)),
    Target("cuda", "NVIDIA GPUs", ("platforms/cuda",), torch="index"),
    Target("rocm", "AMD GPUs", ("platforms/rocm",), torch="first", backend="rocm7.2"),
    Target("xpu", "Intel GPUs", ("platforms/xpu",), torch="first", backend="xpu"),
    Target(
        "tpu",
        "TPUs",
        ("platforms/tpu",),
        torch="first",
        constraints=("tpu",),
        further=("torch_xla[tpu]>=2.9,<2.10",),
    ),
    Target("openvino", "processors, through OpenVINO", ("platforms/openvino",), constraints=("cpu", "runtimes")),
    Target("mlx", "Apple silicon and processors, through MLX", ("platforms/mlx",), constraints=("cpu", "runtimes")),
    Target("ray", "the executor for Ray, beside a platform", ("plugins/ray-executor",), torch="first", parts=False),
)


@dataclass(frozen=True)
class Wheel:
    """A wheel of the project.

    Attributes:
        path: The file.
        name, version, summary: Of its distribution.
        requires: Requirements of the distribution, without those of extras.
        sha256: Of the file, in hexadecimal.
    """

    path: Path
    name: str
    version: str
    summary: str
    requires: tuple[str, ...]
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """A wheel from its file."""
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            metadata = Parser().parsestr(archive.read(name).decode())
        requires = tuple(text for text in metadata.get_all("Requires-Dist") or () if "extra ==" not in text)
        summary = metadata.get("Summary", "")
        return cls(path, metadata["Name"], metadata["Version"], summary, requires, digest(path))


def own_wheels(folder: Path) -> list[Wheel]:
    """The project's wheels in a folder, by name."""
    return [Wheel.read(path) for path in sorted(folder.glob("mvllm*.whl"))]


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def requirements(file: Path) -> list[str]:
    """The requirements in a file, each on one line with its hashes, without options and comments."""
    text = re.sub(r"\\\n\s*", "", file.read_text(encoding="utf-8"))
    return [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "--"))]


def pins_of(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """For each requirements file: names and versions of what it installs from the package index."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(folder.glob("*.txt")):
        matches = [re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in requirements(file)]
        found[file.stem] = [(match[1], match[2]) for match in matches if match and not is_own(match[1])]
    return found


def is_own(name: str) -> bool:
    """Whether a distribution has a name of the project."""
    return re.match(r"mvllm(?![a-z0-9])", name, re.IGNORECASE) is not None


def manifest(folder: Path) -> list[tuple[str, str]]:
    """Hashes and names of the files that a wheelhouse lists.

    Raises:
        StepFailed: It has no list, or one that is not made of lines `HASH  NAME` with names inside the folder.
    """
    try:
        lines = (folder / MANIFEST).read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise StepFailed(
            f"error: {folder} is no wheelhouse: {MANIFEST}: {e.strerror}\n"
            "  remedy: name the folder that `python3 ci/dev.py build` made"
        ) from None
    found = []
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/]+(?:/[^/]+)*)", line)
        if match is None or ".." in match[2].split("/"):
            raise StepFailed(f"error: {folder / MANIFEST} has the line {line!r}")
        found.append((match[1], match[2]))
    return found


def check(folder: Path) -> None:
    """Checks that a wheelhouse is consistent.

    Raises:
        StepFailed: A file is missing or has another hash, versions differ, a requirement has no hash, or one of the
            project has a hash that no wheel has.
    """
    faults: list[str] = []
    for expected, name in manifest(folder):
        if not (folder / name).is_file():
            faults.append(f"{name} is in {MANIFEST} and not in the folder")
        elif digest(folder / name) != expected:
            faults.append(f"{name} has another hash than in {MANIFEST}")
    wheels = {digest(path): path.name for path in folder.glob("mvllm*.whl")}
    versions = {name.split("-")[1] for name in wheels.values()}
    if len(versions) != 1:
        faults.append(f"the wheels have different versions: {', '.join(sorted(versions)) or 'there is none'}")
    files = sorted(folder.glob("*.txt"))
    if not files:
        faults.append("there is no requirements file")
    for file in files:
        if "--find-links .\n" not in file.read_text(encoding="utf-8"):
            faults.append(f"{file.name} has no line `--find-links .`")
        for line in requirements(file):
            pin, *hashes = re.split(r"\s*--hash=sha256:", line)
            match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", pin)
            if match is None or not hashes:
                faults.append(f"{file.name}: {pin!r} has no version or no hash")
            elif is_own(match[1]):
                names = [wheels.get(each.strip(), "") for each in hashes]
                start = f"{match[1].replace('-', '_')}-{match[2]}-"
                faults += [f"{file.name}: no wheel has a hash of {pin}" for name in names if not name.startswith(start)]
    if faults:
        raise StepFailed("error: the wheelhouse is not consistent\n" + "\n".join(f"  {fault}" for fault in faults))
