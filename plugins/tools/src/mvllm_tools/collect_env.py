"""`mvllm collect-env`: prints information about the installation and the machine for bug reports.

Environment variables whose names look like secrets are masked. `mvllm doctor` checks the installation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform as host
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mvllm.extension_api import MvllmError
from mvllm.extension_api.installation import (
    ALLOW_LIST_VARIABLE,
    CONTRACT,
    __version__,
    availability,
    availability_reason,
    describe_parts,
    discover,
    dotted,
    executor_names,
    find_sources,
    installed_plugins,
    is_allowed,
)

MASK = "********"
_TORCH_TIMEOUT_SECONDS = 120
_TORCH_PROBE = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "git_version": torch.version.git_version,
    "debug": torch.version.debug,
    "threads": torch.get_num_threads(),
    "build": torch.__config__.show(),
}))
"""
_VARIABLE = re.compile(
    r"(MVLLM|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|OMP|GOMP|KMP|MKL|OPENBLAS|MALLOC|TORCH\w*|PYTORCH|GLOO|PYTHON\w*"
    r"|VIRTUAL|CONDA|LD|SLURM)_\w+|\w+_VISIBLE_DEVICES|\w+_proxy|\w+_PROXY|PYTHON\w+|(OPENAI_API_KEY|LANG|LC_ALL|PATH)"
)
"""Environment variables that affect an engine: those of mvllm, its dependencies and their libraries."""
_SECRET = re.compile(
    r"(^|_|API)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|COOKIE)S?(_|$)", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    report = collect()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def collect(environ: Mapping[str, str] | None = None) -> Report:
    """The report: information by section. A section that cannot be collected contains its error.

    Args:
        environ: Environment variables; those of this process by default.
    """
    environ = os.environ if environ is None else environ
    sections: dict[str, Callable[[], object]] = {
        "mvllm": _mvllm,
        "python": _python,
        "torch": _torch,
        "packages": _packages,
        "platforms": _platforms,
        "plugins": _plugins,
        "system": _system,
        "processor": _processor,
        "memory": _memory,
        "environment": lambda: variables(environ),
    }
    report: Report = {}
    for name, collect_section in sections.items():
        try:
            report[name] = collect_section()
        except (OSError, ValueError, MvllmError, subprocess.SubprocessError, LookupError) as e:
            report[name] = {"error": f"{type(e).__name__}: {e}"}
    return report


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The relevant environment variables, secrets masked. Includes variables prefixed with an executor's name."""

    executors = tuple(f"{name.upper()}_" for name in executor_names())
    return {
        name: MASK if _SECRET.search(name) and value else _USER_IN_URL.sub(f"{MASK}@", value)
        for name, value in sorted(environ.items())
        if _VARIABLE.fullmatch(name) or name.startswith(executors)
    }


def as_text(report: Report) -> str:
    """The report as indented text."""
    return "\n\n".join(f"{name}\n{_block(value, 2)}" for name, value in report.items())


def _block(value: object, indent: int) -> str:
    space = " " * indent
    if isinstance(value, Mapping):
        if not value:
            return f"{space}(none)"
        width = max((len(key) for key, each in value.items() if not isinstance(each, Mapping | list)), default=0)
        return "\n".join(
            f"{space}{key}\n{_block(each, indent + 2)}"
            if isinstance(each, Mapping | list)
            else f"{space}{key:<{width}}  {_line(each, indent + width + 2)}"
            for key, each in value.items()
        )
    if isinstance(value, list):
        return "\n".join(_block(each, indent) for each in value) if value else f"{space}(none)"
    return f"{space}{_line(value, indent)}"


def _line(value: object, indent: int) -> str:
    if value is None:
        return "-"
    lines = str(value).strip().splitlines() or [""]
    return ("\n" + " " * indent).join(line.strip() for line in lines)


# --- sections


def _mvllm() -> Report:

    return {
        "version": __version__,
        "contract": dotted(CONTRACT),
        "parts": describe_parts(),
        "location": _folder_of_mvllm(),
    }


def _folder_of_mvllm() -> str | None:
    found = importlib.util.find_spec("mvllm")
    return str(Path(found.origin).parent) if found is not None and found.origin is not None else None


def _python() -> Report:
    return {
        "version": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "virtual_environment": sys.prefix if sys.prefix != sys.base_prefix else None,
    }


def _torch() -> Report:
    """Imports torch in a separate process, since the import may crash."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return {"version": None}
    result = subprocess.run(
        [sys.executable, "-c", _TORCH_PROBE],
        capture_output=True,
        text=True,
        timeout=_TORCH_TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode != 0:
        last_line = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        return {"version": version, "error": f"cannot be imported: {last_line}"}
    found: Report = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def _packages() -> dict[str, str | None]:
    """Installed versions of the packages that mvllm and its plugins require, extras included."""
    from packaging.requirements import Requirement

    names: set[str] = set()
    sources = [*find_sources(), *(source for _, source in installed_plugins())]
    for distribution in {"mvllm", *(source.distribution for source in sources)}:
        try:
            required = importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        names |= {distribution, *(Requirement(text).name for text in required)}
    versions = {name: _version(name) for name in sorted(names, key=str.lower)}
    return {name: version for name, version in versions.items() if version is not None}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _platforms() -> Report:

    return {
        f"{candidate.name} ({candidate.source.distribution})": {
            "version": candidate.source.version,
            "contract": dotted(candidate.spec.contract) if candidate.spec is not None else None,
            "state": availability(candidate),
            "reason": availability_reason(candidate),
            "devices": ", ".join(device.name for device in candidate.probe.devices) if candidate.probe else None,
        }
        for candidate in discover()
    }


def _plugins() -> dict[str, str]:
    """Installed plugins other than platforms, from their metadata; none is imported."""

    return {
        f"{group.group}: {source.name}": f"{source.distribution} {source.version}"
        + ("" if is_allowed(source) else f" (not allowed by {ALLOW_LIST_VARIABLE})")
        for group, source in installed_plugins()
    }


def _system() -> Report:
    release = host.freedesktop_os_release() if sys.platform == "linux" else {}
    return {
        "system": release.get("PRETTY_NAME", host.system()),
        "kernel": f"{host.system()} {host.release()}",
        "machine": host.machine(),
        "libc": " ".join(host.libc_ver()) or None,
        "compiler": _first_line("c++", "--version"),
        "open_files": _open_files(),
        "container": _container(),
    }


def _processor() -> Report:
    import psutil  # type: ignore[import-untyped]

    cpuinfo = _proc_cpuinfo()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": cpuinfo.get("model name") or host.processor() or None,
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable,
        "cgroup_limit": _read("/sys/fs/cgroup/cpu.max"),
        "features": cpuinfo.get("flags") or cpuinfo.get("Features"),
    }


def _memory() -> Report:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    shared = Path("/dev/shm")  # noqa: S108  (read, not written)
    return {
        "total": _gib(memory.total),
        "available": _gib(memory.available),
        "swap": _gib(swap.total),
        "cgroup_limit": _read("/sys/fs/cgroup/memory.max"),
        "shared_memory": _usage(shared) if shared.is_dir() else None,
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


# --- helpers


def _proc_cpuinfo() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty on other systems than Linux."""
    text = (_read("/proc/cpuinfo") or "").partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _open_files() -> str | None:
    try:
        import resource
    except ImportError:
        return None
    return "{} (hard limit {})".format(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _container() -> str | None:
    markers = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/var/run/secrets/kubernetes.io": "kubernetes"}
    return next((name for path, name in markers.items() if Path(path).exists()), None)


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return next(iter(result.stdout.splitlines()), None)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _usage(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    return f"{_gib(usage.free)} of {_gib(usage.total)} free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
