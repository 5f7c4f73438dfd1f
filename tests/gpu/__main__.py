"""`python -m tests.gpu`: runs the parts in order, within a time limit, and prints one table."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.compiler_cache import kept_compiler_cache
from tests.gpu.installed import EVERYTHING, install, missing
from tests.gpu.parts import PARTS, Part, load
from tests.gpu.result_log import FAILED, NOT_RUN, ROWS, ResultLog, Row, table
from tests.gpu.runner import run_items
from tests.gpu.settings import ROOT, Settings

BUDGET = 560.0
LARGEST_BUDGET = 580.0
"""What fits a call of ten minutes. Seconds."""
WHEEL_FOLDERS = ("wheels", ".whl", "build/wheels")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="What a machine with a device is needed for, in one table."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"Of: {', '.join(PARTS)}. Default: all, in order.")
    parser.add_argument("--platform", default="cuda", help="The platform's name (default: cuda).")
    parser.add_argument("--quick", action="store_true", help="Tiny models, seconds: whether it works, no figures.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="Folder for figures, reports and logs.")
    parser.add_argument("--budget", type=float, default=BUDGET, help="Seconds for all parts together.")
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
        metavar="FOLDER",
        help="The --out folder of an earlier run: continue its rows, skip what it has done, and use its compiled "
        "kernels.",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        help=f"Folder with wheels of packages that the machine lacks (default: {' or '.join(WHEEL_FOLDERS)}, if there "
        f"is one with wheels).",
    )
    parser.add_argument("--scratch", type=Path, help="Folder for checkpoints (default: where there is most room).")
    args = parser.parse_args(arguments)
    if not 0 < args.budget <= LARGEST_BUDGET:
        parser.error(f"--budget {args.budget:g}: a run takes at most {LARGEST_BUDGET:g} seconds")
    if args.resume is not None and not (args.resume / ROWS).is_file():
        parser.error(f"--resume {args.resume}: there is no {ROWS} of an earlier run")
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if wrong := [text for text in args.also if "=" not in text]:
        parser.error(f"--also {wrong[0]!r} is not NAME=VALUE")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for. 0 when nothing failed."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    begin = time.time()
    result_log = ResultLog(args.out.absolute())
    if not args.keep and not (args.resume and args.resume.absolute() == result_log.folder):
        result_log.start_anew()
    if args.resume:
        result_log.continue_from(args.resume.absolute())
    scratch = Path(tempfile.mkdtemp(prefix="gpu-run-", dir=args.scratch or roomiest()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = Settings(
        platform=args.platform,
        out=result_log.folder,
        scratch=scratch,
        deadline=begin + args.budget,
        quick=args.quick,
        only=tuple(args.only),
        also=tuple(args.also),
    )
    try:
        install(scratch / "installed", args.wheels or default_wheels(), args.platform)
        obstacle = what_is_in_the_way(settings.platform)
        with kept_compiler_cache(scratch / "compiled", result_log.folder):
            for name in args.parts or PARTS:
                if obstacle and name != "environment":
                    result_log.add(Row(name, name, name, NOT_RUN, note=obstacle))
                    continue
                part = load(name)
                items = [item for item in part.items(settings) if not (args.resume and result_log.is_done(name, item))]
                run_items(name, items, settings, result_log, side_by_side(part, settings))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        result_log.write()
        rows = result_log.rows()
        print("\n" + table(rows), flush=True)
    return int(any(row.status == FAILED and row.at >= begin for row in rows))


def default_wheels() -> Path | None:
    """The first of WHEEL_FOLDERS with wheels in it."""
    folders = (ROOT / name for name in WHEEL_FOLDERS)
    return next((folder for folder in folders if any(folder.glob("*.whl"))), None)


def side_by_side(part: Part, settings: Settings) -> int:
    """How many processes share a part's items: as many as it wants, with two processors for each."""
    wanted: int = getattr(part, "SIDE_BY_SIDE", 1)
    return 1 if settings.quick or (os.cpu_count() or 1) < 2 * wanted else wanted


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
    sys.exit(main())
