"""`python -m tests.gpu`: runs the parts, or a preset, in order, within a time limit, and prints one table."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.gpu import archive
from tests.gpu.clock import SYSTEM, Clock, Repeated
from tests.gpu.compiler_cache import kept_compiler_cache
from tests.gpu.installed import EVERYTHING, install, missing
from tests.gpu.parts import PARTS
from tests.gpu.presets import PRESETS, Step, described, run_steps
from tests.gpu.result_log import FAILED, ROWS, ResultLog, table
from tests.gpu.runner import Runner
from tests.gpu.settings import ROOT, Settings

BUDGET = 560.0
LARGEST_BUDGET = 580.0
"""What fits a call of ten minutes. Seconds."""
WHEEL_FOLDERS = ("wheels", ".whl", "build/wheels")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description="What a machine with a device is needed for, in one table.",
        epilog=f"presets, the most valuable first:\n{described()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"Of: {', '.join(PARTS)}. Default: all, in order.")
    parser.add_argument("--preset", choices=PRESETS, help="Instead of parts: a selection for a short time, see below.")
    parser.add_argument("--platform", default="cuda", help="The platform's name (default: cuda).")
    parser.add_argument("--quick", action="store_true", help="Tiny models, seconds: whether it works, no figures.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="Folder for figures, reports and logs.")
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="FOLDER",
        help=f"Folder for {archive.ARCHIVE}, which has all results, and for the compiled kernels (default: --out).",
    )
    parser.add_argument(
        "--budget", type=float, help=f"Seconds for everything together (default: the preset's, or {BUDGET:g})."
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="Only items with TEXT in the name.")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=VALUE", help="graphs: one more way, with this variable."
    )
    parser.add_argument(
        "--keep", action="store_true", help="Add to the rows that the folder has, and use its ceilings."
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help=f"The --out folder of an earlier run, or its {archive.ARCHIVE}: continue its rows, skip what it has done, "
        f"and use its compiled kernels.",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        help=f"Folder with wheels of packages that the machine lacks, and of the project, for the part `wheels` "
        f"(default: {' or '.join(WHEEL_FOLDERS)}, if there is one with wheels).",
    )
    parser.add_argument("--scratch", type=Path, help="Folder for checkpoints (default: where there is most room).")
    args = parser.parse_args(arguments)
    if args.preset and args.parts:
        parser.error(f"--preset {args.preset} has its own parts: leave out {args.parts[0]!r}")
    if args.budget is None:
        args.budget = PRESETS[args.preset].seconds if args.preset else BUDGET
    if not 0 < args.budget <= LARGEST_BUDGET:
        parser.error(f"--budget {args.budget:g}: a run takes at most {LARGEST_BUDGET:g} seconds")
    if args.resume is not None and not (
        tarfile.is_tarfile(args.resume) if args.resume.is_file() else (args.resume / ROWS).is_file()
    ):
        parser.error(f"--resume {args.resume}: there is no {ROWS} of an earlier run, and it is no {archive.ARCHIVE}")
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if wrong := [text for text in args.also if "=" not in text]:
        parser.error(f"--also {wrong[0]!r} is not NAME=VALUE")
    return args


def main(arguments: list[str] | None = None, clock: Clock = SYSTEM) -> int:
    """Runs what was asked for. 0 when nothing failed."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    deadline = clock.monotonic() + args.budget
    result_log = ResultLog(args.out.absolute(), clock)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-run-", dir=args.scratch or roomiest()))
    kept = (args.archive or args.out).absolute()
    kept.mkdir(parents=True, exist_ok=True)
    try:
        if not args.keep and not (args.resume and args.resume.absolute() == result_log.folder):
            result_log.start_anew()
        if args.resume:
            result_log.continue_from(resumed(args.resume.absolute(), scratch / "resumed"), kept)
        num_earlier = len(result_log.rows())
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        wheels = args.wheels or default_wheels()
        settings = Settings(
            platform=args.platform,
            out=result_log.folder,
            scratch=scratch,
            deadline=deadline,
            quick=args.quick,
            only=tuple(args.only),
            also=tuple(args.also),
            wheels=wheels.absolute() if wheels else None,
        )
        renewed = Repeated(lambda: archive.pack(result_log.folder, kept / archive.ARCHIVE), archive.SECONDS, clock)
        with renewed.in_thread(), kept_compiler_cache(scratch / "compiled", kept, clock=clock):
            install(scratch / "installed", wheels, args.platform)
            steps = PRESETS[args.preset].steps if args.preset else [Step(part) for part in args.parts or PARTS]
            run_steps(
                steps,
                Runner(settings, result_log, clock),
                settings,
                result_log,
                budget=args.budget,
                obstacle=what_is_in_the_way(settings.platform),
                resumed=args.resume is not None,
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        rows = result_log.rows()
        print("\n" + table(rows), flush=True)
    return int(any(row.status == FAILED for row in rows[num_earlier:]))


def resumed(path: Path, scratch: Path) -> Path:
    """The folder of an earlier run; its archive is unpacked into `scratch`."""
    if path.is_dir():
        return path
    archive.unpack(path, scratch)
    return scratch


def stop_when_asked() -> None:
    """SIGTERM ends the run as an interrupt does: processes are ended, and the archive is written once more."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def default_wheels() -> Path | None:
    """The first of WHEEL_FOLDERS with wheels in it."""
    folders = (ROOT / name for name in WHEEL_FOLDERS)
    return next((folder for folder in folders if any(folder.glob("*.whl"))), None)


def what_is_in_the_way(platform: str) -> str:
    """Why no part but the first can be run: packages or the device are missing. Empty where nothing is."""
    lacking = [name for name, what in missing().items() if what == EVERYTHING]
    if lacking:
        return f"missing packages: {', '.join(lacking)}"
    from mvllm.platform.choose import describe
    from mvllm.platform.discovery import discover

    candidates = discover(only=platform)
    if not candidates:
        return f"no plugin is called {platform!r}"
    return "" if candidates[0].available else f"platform {platform}: {describe(candidates[0])}"


def roomiest() -> Path:
    """Of the folders for temporary files, the one with most room; large checkpoints do not fit everywhere."""
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    return max((folder for folder in folders if folder.is_dir()), key=lambda folder: shutil.disk_usage(folder).free)


if __name__ == "__main__":
    stop_when_asked()
    sys.exit(main())
