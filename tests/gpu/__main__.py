"""`python -m tests.gpu`: runs the parts in order, within a time limit, and prints one table."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.installed import EVERYTHING, install, missing
from tests.gpu.parts import PARTS, Part, load
from tests.gpu.result_log import FAILED, NOT_RUN, ResultLog, Row, table
from tests.gpu.runner import run_items
from tests.gpu.settings import Settings

BUDGET = 570.0  # what fits a call of ten minutes


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
    parser.add_argument("--wheels", type=Path, help="Folder with wheels of packages that the machine lacks.")
    parser.add_argument("--scratch", type=Path, help="Folder for checkpoints (default: where there is most room).")
    args = parser.parse_args(arguments)
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
    if not args.keep:
        result_log.start_anew()
    scratch = Path(tempfile.mkdtemp(prefix="mvllm-gpu-", dir=args.scratch or roomiest()))
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
        install(scratch / "installed", args.wheels, args.platform)
        obstacle = what_is_in_the_way(settings.platform)
        for name in args.parts or PARTS:
            if obstacle and name != "environment":
                result_log.add(Row(name, name, name, NOT_RUN, note=obstacle))
            else:
                part = load(name)
                run_items(name, part.items(settings), settings, result_log, side_by_side(part, settings))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        result_log.write()
        rows = result_log.rows()
        print("\n" + table(rows), flush=True)
    return int(any(row.status == FAILED and row.at >= begin for row in rows))


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
