#!/usr/bin/env python3
"""Creates stub libraries for shared libraries that torch is linked with but does not call.

    python3 ci/stub_libraries.py .venv-tpu/lib/python3.11/site-packages/torch/lib

torch_xla's last release requires a torch that was built for NVIDIA devices. Importing it loads a dozen of their
libraries, 2.6 GB of wheels, although nothing of them runs on XLA's devices. The loader only needs libraries that define
the symbols. The stubs take a few hundred kilobytes: every function returns 100, CUDA's code for "no device", and
functions that describe errors return a text.

The stubs are stored next to torch's libraries, which is the last place of the search path, so installed real libraries
take precedence. They are for test environments only.

Requires gcc, and objdump and nm from binutils.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("gcc", "objdump", "nm")
ROOT_LIBRARY = "libtorch_python.so"  # what `import torch` loads, with all its dependencies
MADE = "made-as-stubs.txt"
SYSTEM = re.compile(r"lib(?:c|m|dl|rt|pthread|util|stdc\+\+|gcc_s)\.so[.0-9]*|ld-linux.*")

WORDS = re.compile(r"String|ErrorName")  # in the names of functions that return a text


class NoStubs(Exception):
    """The stubs cannot be created; the message has the reason."""


@dataclass
class Library:
    """The dependencies and symbols of a shared library.

    Attributes:
        needed: Names of libraries that it loads.
        versions: Library of each symbol version that it requires.
        undefined: Required symbols: (name, version or "").
        defined: Names of defined symbols.
    """

    needed: list[str]
    versions: dict[str, str]
    undefined: set[tuple[str, str]] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def missing_tools() -> list[str]:
    """The TOOLS that this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def make_stubs(folder: Path) -> dict[str, int]:
    """Creates stubs in `folder` for libraries that torch's libraries in `folder` load but that are missing there.

    Replaces the stubs of an earlier call.

    Returns:
        Number of symbols by library.

    Raises:
        NoStubs: A tool is missing or failed, or `folder` is not torch's.
    """
    if absent := missing_tools():
        raise NoStubs(f"this machine has no {' and no '.join(absent)} (Debian, Ubuntu: apt install gcc binutils)")
    if not (folder / ROOT_LIBRARY).is_file():
        raise NoStubs(f"there is no {ROOT_LIBRARY} in {folder}: expected the folder torch/lib of an environment")
    made = folder / MADE
    for name in made.read_text().split() if made.is_file() else []:
        (folder / name).unlink(missing_ok=True)
    wanted = wanted_stubs(read_loaded(folder))
    made.write_text("".join(f"{name}\n" for name in wanted))
    with tempfile.TemporaryDirectory() as scratch:
        for name, symbols in wanted.items():
            build(name, symbols, Path(scratch), folder)
    return {name: len(symbols) for name, symbols in wanted.items()}


def read_loaded(folder: Path) -> dict[str, Library]:
    """The libraries of `folder` that loading ROOT_LIBRARY loads, by name."""
    found: dict[str, Library] = {}
    waiting = [ROOT_LIBRARY]
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found[name] = read_library(folder / name)
            waiting += found[name].needed
    return found


def read_library(path: Path) -> Library:
    """Reads the dynamic section and the symbols of a library."""
    headers = output_of(["objdump", "-p", str(path)])
    library = Library(re.findall(r"^\s+NEEDED\s+(\S+)", headers, re.MULTILINE), {})
    source = ""
    # required from libacme.so.3:
    #   0x0cb5a0ec 0x00 07 ACME_3
    for line in headers.partition("Version References:")[2].splitlines():
        if match := re.match(r"\s+required from (\S+):", line):
            source = match[1]
        elif match := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line):
            library.versions[match[1]] = source
    for line in output_of(["nm", "-D", str(path)]).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        if kind == "U":
            library.undefined.add((name, version.lstrip("@")))
        elif kind not in "wv":  # a weak one may stay undefined
            library.defined.add(name)
    return library


def wanted_stubs(loaded: Mapping[str, Library]) -> dict[str, set[tuple[str, str]]]:
    """The libraries that are missing in `loaded`, each with the symbols that it must define.

    The version of a symbol identifies its library. A symbol without a version belongs to the library whose name begins
    it (`curandCreateGenerator`: libcurand); other symbols belong to the interpreter or the C++ library.
    """
    absent = {n for library in loaded.values() for n in library.needed if n not in loaded and not SYSTEM.fullmatch(n)}
    wanted: dict[str, set[tuple[str, str]]] = {name: set() for name in sorted(absent)}
    defined = set().union(*(library.defined for library in loaded.values()))
    prefixes = {name: name.removeprefix("lib").partition(".so")[0].lower() for name in wanted}
    for library in loaded.values():
        for name, version in library.undefined:
            if name in defined:
                continue
            if version:
                source = library.versions.get(version, "")
            else:
                matching = [each for each, prefix in prefixes.items() if name.lower().startswith(prefix)]
                source = max(matching, key=lambda each: len(prefixes[each]), default="")
            if source in wanted:
                wanted[source].add((name, version))
    return wanted


def build(name: str, symbols: Iterable[tuple[str, str]], scratch: Path, folder: Path) -> None:
    """Compiles one library that defines `symbols`."""
    ordered = sorted(symbols)
    source, script = scratch / f"{name}.c", scratch / f"{name}.map"
    bodies = ('return (long)"a stub"' if WORDS.search(symbol) else "return 100" for symbol, _ in ordered)
    lines = (f"long {symbol}(void) {{ {body}; }}\n" for (symbol, _), body in zip(ordered, bodies, strict=True))
    source.write_text("".join(lines))
    versions: dict[str, list[str]] = {}
    for symbol, version in ordered:
        versions.setdefault(version, []).append(symbol)
    blocks = [f"{version} {{ global: {'; '.join(each)}; }};\n" for version, each in versions.items() if version]
    script.write_text("".join(blocks))
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    output_of([*command, str(source), *([f"-Wl,--version-script={script}"] if blocks else [])])


def output_of(command: list[str]) -> str:
    """Runs a tool; returns its output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoStubs(f"{command[0]} failed with exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main(argv: list[str]) -> int:
    """Runs the command line."""
    if len(argv) != 1:
        print(f"error: one folder is expected, torch/lib of an environment; found {argv}", file=sys.stderr)
        return 2
    try:
        made = make_stubs(Path(argv[0]))
    except NoStubs as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{len(made)} libraries with {sum(made.values())} symbols")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
