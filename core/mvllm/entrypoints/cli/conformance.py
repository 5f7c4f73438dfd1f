"""`mvllm conformance`: whether a platform keeps the contract, clause by clause."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--platform", metavar="NAME", help="The platform. Default: the only available one.")
    parser.add_argument("--report", metavar="PATH", type=Path, help="Write a JSON report, and a badge (SVG) beside it.")
    parser.add_argument("--waivers", metavar="PATH", type=Path, help="Known exceptions, with reasons and links (TOML).")
    parser.add_argument("--only", metavar="IDS", help="Families or clauses to examine, for instance ATT,COM-03.")
    parser.add_argument("--quick", action="store_true", help="Thin out the grids. Proves no conformance.")
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="Examine only what opens no device, where there is none. Proves no conformance.",
    )
    parser.add_argument("--clauses", action="store_true", help="Print the clauses, and run nothing.")
    parser.add_argument(
        "--show", metavar="PATH", type=Path, help="Print a report that was written before, as Markdown."
    )
    parser.add_argument("further", nargs="*", metavar="-- ARGUMENT", help="Arguments for pytest, after `--`.")


def run(args: argparse.Namespace) -> int:
    """Examines the platform. 0 when nothing failed and no waiver is stale."""
    from mvllm.testing import clauses, report
    from mvllm.testing.run import Settings
    from mvllm.testing.run import run as run_suite

    if args.clauses:
        for family, title in clauses.FAMILIES.items():
            print(f"{family}  {title}")
            for clause in clauses.CLAUSES.values():
                if clause.family == family:
                    needs = f" [needs {clause.needs}]" if clause.needs else ""
                    print(f"  {clause.id}  since {clause.since[0]}.{clause.since[1]}{needs}  {clause.sentence}")
        return 0
    if args.show is not None:
        print(report.from_json(args.show).markdown(), end="")
        return 0
    return run_suite(
        Settings(
            args.platform,
            args.report,
            args.waivers,
            args.only,
            args.quick,
            tuple(args.further),
            without_device=args.without_device,
        )
    )
