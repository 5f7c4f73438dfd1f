"""`mvllm conformance`: tests a platform against the clauses of the platform contract."""

from __future__ import annotations

import argparse
from pathlib import Path

from mvllm.extension_api.cli import positive_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--platform", metavar="NAME", help="The platform. Default: the only available one.")
    parser.add_argument(
        "--report",
        metavar="PATH",
        type=Path,
        help="Write a JSON report, and the table (.txt) and a badge (.svg) beside it, after each test.",
    )
    parser.add_argument("--waivers", metavar="PATH", type=Path, help="Known exceptions, with reasons and links (TOML).")
    parser.add_argument("--only", metavar="IDS", help="Families or clauses to test, for instance ATT,COM-03.")
    parser.add_argument("--quick", action="store_true", help="Run fewer cases of each grid. Proves no conformance.")
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="Test only clauses that need no device. Proves no conformance.",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive_seconds, help="How long a test may take. Default: 600."
    )
    parser.add_argument(
        "--start-timeout",
        metavar="SECONDS",
        type=positive_seconds,
        help="How long init_device, communicator and each phase of an engine's start may take. Default: 180.",
    )
    parser.add_argument("--clauses", action="store_true", help="Print the clauses and run no test.")
    parser.add_argument("--show", metavar="PATH", type=Path, help="Print an existing report as Markdown.")
    parser.add_argument("pytest_arguments", nargs="*", metavar="-- ARGUMENT", help="Arguments for pytest, after `--`.")


def run(args: argparse.Namespace) -> int:
    """Runs the suite; returns 0 if no test failed and no waiver is stale."""
    from mvllm_conformance import clauses, report
    from mvllm_conformance.run import Settings
    from mvllm_conformance.run import run as run_suite

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
            tuple(args.pytest_arguments),
            without_device=args.without_device,
            timeout=args.timeout,
            start_timeout=args.start_timeout,
        )
    )
