"""`mvllm doctor`: checks the installation and the machine, and prints remedies."""

from __future__ import annotations

import argparse
import json

from mvllm.entrypoints.cli.argument_parser import ModelAction, add_positional_model
from mvllm.platform.spec import CheckStatus

_MARKS = {CheckStatus.OK: "ok     ", CheckStatus.WARNING: "warning", CheckStatus.BROKEN: "BROKEN "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--platform", metavar="NAME", help="Check this platform only; no other plugin is imported.")
    parser.add_argument(
        "--model", action=ModelAction, default=argparse.SUPPRESS, metavar="TEXT", help="Also check this model."
    )
    add_positional_model(parser)


def run(args: argparse.Namespace) -> int:
    """Prints every check; returns 1 if a check is broken, else 0."""
    from mvllm.entrypoints.cli.doctor_checks import run_checks

    checks = run_checks(platform=args.platform, model=getattr(args, "model", None))
    broken = [check for check in checks if check.status is CheckStatus.BROKEN]
    if args.json:
        report = {
            "ok": not broken,
            "checks": [{"id": c.id, "status": c.status.value, "found": c.found, "remedy": c.remedy} for c in checks],
        }
        print(json.dumps(report, indent=2))
        return 1 if broken else 0
    width = max(len(check.id) for check in checks)
    for check in checks:
        print(f"{_MARKS[check.status]}  {check.id:<{width}}  {check.found}")
        if check.remedy and check.status is not CheckStatus.OK:
            print(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    warnings = sum(check.status is CheckStatus.WARNING for check in checks)
    print(f"\n{len(checks)} checks: {len(broken)} broken, {warnings} warnings.")
    return 1 if broken else 0
