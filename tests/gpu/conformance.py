"""The conformance suite on the platform, by clause family: a row for each, and one for each clause that failed.

    OUT/conformance-FAMILY-report.json   of one family
    OUT/conformance-report.json          of all that have run, with its table and badge

Each family is an item, so that a run that is cut keeps the families that were done. The last one adds the verdict about
the whole suite.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.result_log import FAILED, NOT_RUN, OK, ResultLog, Row
from tests.gpu.settings import ON_THE_HOST, Item, Settings

if TYPE_CHECKING:
    from mvllm.testing.report import Report

LARGE = ("ATT", "OPS", "E2E")
"""Families with hundreds of cases, which start first."""
SIDE_BY_SIDE = 8  # families at a time: they do not measure time, and most of it is that of compilers
PROCESSES = 4  # of each of the LARGE families, if pytest can distribute tests
QUICK_CLAUSES = {"OPS": "OPS-02", "LIF": "LIF-07"}
"""What quick runs have of a family, if not its first clause: that of OPS takes minutes in an interpreter, and that of
LIF needs two ranks, for whose collectives there must be a device."""
SPARE = 15  # seconds for rows and reports of a family that is stopped
_RESULT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


def items(settings: Settings) -> list[Item]:
    """One per clause family."""
    from mvllm.testing.clauses import FAMILIES

    families = sorted(FAMILIES, key=lambda family: family not in LARGE)
    if settings.quick:
        return [Item(family, SPARE + 5, 300, obstacle=_obstacle(family, settings)) for family in families]
    return [Item(family, SPARE + (30 if family in LARGE else 10), 420) for family in families]


def _obstacle(family: str, settings: Settings) -> str:
    """Families of what the platforms that have the host for a device only imitate."""
    if family in ("COM", "GRF") and settings.platform in ON_THE_HOST:
        return f"needs a device: platform {settings.platform} imitates collectives and graphs on the host"
    return ""


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """Runs a family; in quick runs, one clause of it."""
    from mvllm.testing.clauses import CLAUSES

    one = QUICK_CLAUSES.get(item) or next(clause for clause in CLAUSES if clause.startswith(item))
    run_suite("conformance", item, settings, result_log, only=one if settings.quick else item)
    with (settings.out / "lock-reports").open("a") as lock:  # families may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        _add_whole(item, settings, result_log)


def run_suite(part: str, item: str, settings: Settings, result_log: ResultLog, *, only: str | None) -> None:
    """Runs the suite, or the clauses of `only`, as long as the item may take, and adds its rows to `part`."""
    from mvllm.testing.run import Settings as Run
    from mvllm.testing.run import arguments

    name = f"{part}-{item}".replace(" ", "-")
    report, log = settings.out / f"{name}-report.json", settings.out / "logs" / f"{name}-suite.log"
    report.unlink(missing_ok=True)
    further = ["-v", *_distributed(item, settings)]
    command = [
        *(sys.executable, "-m", "pytest"),
        *arguments(Run(settings.platform, report, only=only, quick=settings.quick, pytest_arguments=further)),
    ]
    left = settings.seconds_left()
    limit = None if math.isinf(left) else max(1.0, left - SPARE)
    stopped = ""
    with log.open("wb") as output:
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit, cwd=settings.out)
        except subprocess.TimeoutExpired:
            stopped = f"stopped after {limit:.0f} s; see {log.name}"
    if report.exists():
        _add_rows(part, item, report, result_log)
    else:
        counts = counts_in(log)
        note = stopped or f"it wrote no report; see {log.name}"
        result_log.add(Row(part, item, item, NOT_RUN if stopped else FAILED, counts, note))


def counts_in(log: Path) -> dict[str, int]:
    """Tests by result in what pytest has printed so far."""
    found = Counter(match[1].lower() for match in _RESULT.finditer(log.read_text(errors="replace")))
    return dict(sorted(found.items()))


def merged(reports: list[Report], all_families: bool) -> Report:
    """One report of several, which ran on the same platform. Whole if each is, and all families are among them."""
    first = reports[0]
    return dataclasses.replace(
        first,
        outcomes=[outcome for report in reports for outcome in report.outcomes],
        only=() if all_families else tuple(part for report in reports for part in report.only),
        complete=all(report.complete for report in reports),
    )


def _distributed(item: str, settings: Settings) -> list[str]:
    """Options of pytest: several processes for families that take long."""
    several = item in LARGE or item not in {other.name for other in items(settings)}
    known = importlib.util.find_spec("xdist") is not None
    return ["-n", str(PROCESSES)] if several and known and not settings.quick and (os.cpu_count() or 1) >= 16 else []


def _add_whole(item: str, settings: Settings, result_log: ResultLog) -> None:
    """Writes the report of all families that have run; when it is whole, adds a row."""
    from mvllm.testing.report import from_json

    families = [other.name for other in items(settings)]
    paths = [settings.out / f"conformance-{family}-report.json" for family in families]
    found = [from_json(path) for path in paths if path.exists()]
    if not found:
        return
    report = merged(found, len(found) == len(families))
    whole = settings.out / "conformance-report.json"
    report.write(whole)
    whole.with_suffix(".md").write_text(report.markdown(), encoding="utf-8")
    if len(found) == len(families) and report.complete:
        verdict = "conformant" if report.conformant else report.verdict()
        tests = {"tests": len(report.outcomes)}
        result_log.add(Row("conformance", "suite", "suite", FAILED if report.failures else OK, tests, verdict))


def _add_rows(part: str, item: str, path: Path, result_log: ResultLog) -> None:
    """A row for the suite's report of an item, and one for each clause that failed."""
    from mvllm.testing.report import Status, from_json

    report = from_json(path)
    seen = set()
    for outcome in report.outcomes:
        for clause in outcome.clauses:
            if outcome.status is Status.FAILED and clause not in seen:
                seen.add(clause)
                note = f"{outcome.test}: {outcome.reason}"
                result_log.add(Row(part, item, clause, FAILED, {}, note))
    counts = Counter(outcome.status.value for outcome in report.outcomes)
    status = FAILED if report.failures else OK if report.complete else NOT_RUN
    note = "" if report.complete else "the run was cut: these are the tests that ended before"
    result_log.add(Row(part, item, item, status, dict(sorted(counts.items())), note))
