"""The conformance suite on the platform: a row for the verdict, and one for each clause that failed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.gpu.result_log import FAILED, OK, ResultLog, Row
from tests.gpu.settings import Item, Settings

QUICK_ONLY = "PLG,PRB,DEV,KVL"
SIDE_BY_SIDE = 8  # pytest processes on one device
_RESULT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


def items(settings: Settings) -> list[Item]:
    """One: the suite is whole, or it proves nothing."""
    return [Item("suite", 30, 60 if settings.quick else 420)]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    only = QUICK_ONLY if settings.quick else None
    run_suite("conformance", item, settings, result_log, only=only, limit=items(settings)[0].limit)


def run_suite(
    part: str, item: str, settings: Settings, result_log: ResultLog, *, only: str | None, limit: float
) -> None:
    """Runs the suite, or the clauses of `only`, for at most `limit` seconds, and adds its rows to `part`."""
    from mvllm.testing.run import Settings as Run
    from mvllm.testing.run import arguments

    report, log = settings.out / f"{part}-report.json", settings.out / "logs" / f"{part}-suite.log"
    report.unlink(missing_ok=True)
    further = ["-v", *_side_by_side(settings)]
    command = [
        *(sys.executable, "-m", "pytest"),
        *arguments(Run(settings.platform, report, only=only, quick=settings.quick, pytest_arguments=further)),
    ]
    limit = max(1.0, min(settings.seconds_left(), limit) - 15)
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
        name = "stopped suite" if stopped else "suite"
        note = stopped or f"it wrote no report; see {log.name}"
        result_log.add(Row(part, item, name, FAILED, counts, note))


def counts_in(log: Path) -> dict[str, int]:
    """Tests by result in what pytest has printed so far."""
    found = Counter(match[1].lower() for match in _RESULT.finditer(log.read_text(errors="replace")))
    return dict(sorted(found.items()))


def _side_by_side(settings: Settings) -> list[str]:
    if settings.quick or importlib.util.find_spec("xdist") is None or (os.cpu_count() or 1) < 2 * SIDE_BY_SIDE:
        return []
    return ["-n", str(SIDE_BY_SIDE)]


def _add_rows(part: str, item: str, path: Path, result_log: ResultLog) -> None:
    from mvllm.testing.report import Status, from_json

    report = from_json(path)
    path.with_suffix(".md").write_text(report.markdown(), encoding="utf-8")
    counts = {status.value: count for status, count in report.counts().items()}
    verdict = "conformant" if report.conformant else report.verdict()
    status = FAILED if report.failures else OK
    tests = {"tests": len(report.outcomes)}
    result_log.add(Row(part, item, "suite", status, {**tests, **counts}, verdict))
    seen = set()
    for outcome in report.outcomes:
        for clause in outcome.clauses:
            if outcome.status is Status.FAILED and clause not in seen:
                seen.add(clause)
                note = f"{outcome.test}: {outcome.reason}"
                result_log.add(Row(part, item, clause, FAILED, {}, note))
