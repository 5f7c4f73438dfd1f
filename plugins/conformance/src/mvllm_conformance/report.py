"""Reports of conformance runs: a table, JSON, Markdown and a badge.

test outcomes ──add──> Report ──> table()      for the terminal
                              ──> as_json()    for machines; `from_json` reads it back
                              ──> markdown()   for a page
                              ──> badge()      a small SVG that says "mvllm 1.0 | conformant"
"""

from __future__ import annotations

import json
import os
import platform as host
import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mvllm.plugin_api import ConfigError
from mvllm_conformance.clauses import CLAUSES, FAMILIES, Clause
from mvllm_conformance.waivers import Waiver

SCHEMA = 1
"""Version of the JSON report's format."""

REFUSED = "refused, as it should be"
"""Reason of a passed refusal test, which runs because a capability is not claimed."""

WITHOUT_DEVICE = "without a device"
"""Entry of `Report.only` for runs that test only clauses which need no device."""


class Status(Enum):
    """The status of a test or a clause."""

    PASSED = "passed"
    FAILED = "failed"
    WAIVED = "waived"
    """It failed, and a waiver covers it."""
    NOT_CLAIMED = "not claimed"
    """The platform does not claim the capability, and the engine refuses its use or works without it."""
    NOT_APPLICABLE = "not applicable"
    """The clause is newer than the plugin's contract version."""
    NOT_RUN = "not run"
    """It could not run on this machine (for instance, too few devices) or was deselected."""


_WORST_FIRST = (Status.FAILED, Status.WAIVED, Status.PASSED, Status.NOT_CLAIMED, Status.NOT_APPLICABLE, Status.NOT_RUN)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        test: Name of the test.
        clauses: Ids of the clauses that it covers.
        status: Its status; NOT_CLAIMED for a passed refusal test.
        seconds: Its duration.
        reason: Why it failed, was waived or was not run; one line.
    """

    test: str
    clauses: list[str]
    status: Status
    seconds: float
    reason: str = ""

    @property
    def sentence(self) -> str:
        """The reason without what pytest puts before it."""
        return re.sub(r"^(setup|call|teardown): ((AssertionError|Failed): )?", "", self.reason)


@dataclass(frozen=True)
class Subject:
    """The tested platform, plugin and devices, as text."""

    platform: str
    distribution: str = ""
    version: str = ""
    contract: str = ""
    vendor: str = ""
    devices: tuple[str, ...] = ()
    capabilities: dict[str, str] = field(default_factory=dict)


def draw_badge(label: str, verdict: str, colour: str) -> str:
    """An SVG badge.

    Args:
        label: Text of the left half.
        verdict: Text of the right half.
        colour: Its background, as SVG writes colours.
    """
    left, right = (7 * len(text) + 12 for text in (label, verdict))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {verdict}">'
        f'<rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{label}</text>'
        f'<text x="{left + right / 2}" y="14">{verdict}</text></g></svg>\n'
    )


@dataclass
class Report:
    """The result of a run.

    Attributes:
        subject: Platform, plugin and devices.
        core_version, core_contract: Versions of this mvllm and its contract.
        outcomes: The outcomes of all tests, in the order in which they ended.
        waivers: The waivers of the run.
        only: Families, clauses or other selections to which the run was limited; empty for all.
        quick: Whether the run left out cases of the grids.
        complete: Whether the run came to its end. A report that is written while it runs is not complete.
    """

    subject: Subject
    core_version: str
    core_contract: str
    outcomes: list[Outcome] = field(default_factory=list)
    waivers: list[Waiver] = field(default_factory=list)
    only: tuple[str, ...] = ()
    quick: bool = False
    complete: bool = True

    def status(self, clause: Clause) -> Status:
        """The status of a clause: the worst status of its tests."""
        found = {outcome.status for outcome in self.outcomes if clause.id in outcome.clauses}
        return next((status for status in _WORST_FIRST if status in found), Status.NOT_RUN)

    def unneeded_waivers(self) -> list[Waiver]:
        """Waivers without a failed test, although tests that they cover have run."""
        needed = []
        for waiver in self.waivers:
            covered = [o for o in self.outcomes if waiver.covers(o.clauses, o.test)]
            ran = [o for o in covered if o.status in (Status.PASSED, Status.WAIVED, Status.FAILED)]
            if any(o.status is Status.WAIVED for o in covered) or (not ran and self.only) or self.quick:
                needed.append(waiver)
        return [waiver for waiver in self.waivers if waiver not in needed]

    @property
    def conformant(self) -> bool:
        """Whether the run was whole, no test failed, and no waiver is unneeded. Waived clauses are allowed."""
        return self.complete and not (self.only or self.quick) and not self.failures and not self.unneeded_waivers()

    @property
    def failures(self) -> list[Outcome]:
        """The tests that failed."""
        return [outcome for outcome in self.outcomes if outcome.status is Status.FAILED]

    def counts(self) -> Counter[Status]:
        """Number of clauses by status."""
        return Counter(self.status(clause) for clause in CLAUSES.values())

    def verdict(self) -> str:
        """A summary of one line."""
        counts = self.counts()
        parts = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
        cut = "" if self.complete else "; the run was cut, or is not over"
        return f"platform {self.subject.platform}: {parts} (of {len(CLAUSES)} clauses){cut}"

    # --- formats

    def table(self) -> str:
        """The report for a terminal: a line per clause."""
        lines = []
        asked = {part for part in self.only if part in CLAUSES or part in FAMILIES}
        for family, title in FAMILIES.items():
            wanted = [c for c in _of(family) if not asked or {c.id, family} & asked]
            lines += [f"{family}  {title}"] if wanted else []
            for clause in wanted:
                tests, seconds = self._effort(clause)
                note = self._note(clause)
                lines.append(
                    f"  {clause.id}  {self.status(clause).value:<14} {tests:>4} tests {seconds:>7.1f} s"
                    + (f"  {note}" if note else "")
                )
                if failed := self._first_failure(clause):
                    lines.append(f"          {failed.sentence}")
        lines += [f"unneeded waiver  {waiver}" for waiver in self.unneeded_waivers()]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The report as Markdown: a row per clause, with its sentence."""
        subject, devices = self.subject, Counter(self.subject.devices)
        head = [
            f"Platform `{subject.platform}`: {subject.distribution} {subject.version}, contract {subject.contract}, "
            f"on mvllm {self.core_version} (contract {self.core_contract}).",
            "",
            *(f"- {count} of: {device}" if count > 1 else f"- {device}" for device, count in devices.items()),
            *([""] if subject.devices else []),
            "| clause | rule | result | tests |",
            "|---|---|---|---|",
        ]
        rows = []
        for clause in CLAUSES.values():
            note = self._note(clause)
            result = self.status(clause).value + (f": {note}" if note else "")
            sentence = clause.sentence.replace("|", "\\|")
            rows.append(f"| {clause.id} | {sentence} | {result} | {self._effort(clause)[0]} |".replace("\n", " "))
        waived = [f"- waived {waiver}" for waiver in self.waivers]
        return "\n".join([*head, *rows, "", self.verdict() + ".", *(["", *waived] if waived else [])]) + "\n"

    def as_json(self) -> str:
        """The JSON report that docs/how-to/conformance.md describes."""
        clauses = {}
        for clause in CLAUSES.values():
            tests, seconds = self._effort(clause)
            own = [outcome for outcome in self.outcomes if clause.id in outcome.clauses]
            clauses[clause.id] = {
                "status": self.status(clause).value,
                "tests": tests,
                "counts": {s.value: n for s in Status if (n := sum(o.status is s for o in own))},
                "seconds": round(seconds, 3),
                "since": ".".join(map(str, clause.since)),
                "needs": clause.needs,
            }
        content = {
            "schema": SCHEMA,
            "conformant": self.conformant,
            "platform": self.subject.platform,
            "plugin": {
                "distribution": self.subject.distribution,
                "version": self.subject.version,
                "contract": self.subject.contract,
                "vendor": self.subject.vendor,
            },
            "core": {"version": self.core_version, "contract": self.core_contract},
            "host": {"python": host.python_version(), "machine": host.machine(), "system": host.system()},
            "devices": list(self.subject.devices),
            "capabilities": self.subject.capabilities,
            "only": list(self.only),
            "quick": self.quick,
            "complete": self.complete,
            "clauses": clauses,
            "tests": [
                {
                    "test": o.test,
                    "clauses": o.clauses,
                    "status": o.status.value,
                    "seconds": round(o.seconds, 3),
                    "reason": o.reason,
                }
                for o in self.outcomes
            ],
            "waivers": [
                {
                    "clause": w.clause,
                    "cases": w.cases,
                    "reason": w.reason,
                    "link": w.link,
                    "expires": w.expires.isoformat() if w.expires else None,
                    "needed": w not in self.unneeded_waivers(),
                }
                for w in self.waivers
            ],
        }
        return json.dumps(content, indent=1) + "\n"

    def badge(self) -> str:
        """An SVG badge: the contract version on the left, the verdict on the right."""
        counts = self.counts()
        if self.failures or self.unneeded_waivers():
            verdict, colour = f"{max(1, counts[Status.FAILED])} failed", "#c0392b"
        elif self.conformant:
            verdict = "conformant" + (f", {counts[Status.WAIVED]} waived" if counts[Status.WAIVED] else "")
            colour = "#b7950b" if counts[Status.WAIVED] else "#1e8449"
        else:
            verdict, colour = "in part", "#7f8c8d"
        return draw_badge(f"mvllm contract {self.subject.contract or '?'}", verdict, colour)

    def write(self, path: Path) -> None:
        """Writes the JSON report to `path`, and table and badge to its name with the suffixes `.txt` and `.svg`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        table = f"{self.table()}\n{self.verdict()}\n"
        for suffix, text in ((".svg", self.badge()), (".txt", table), (path.suffix, self.as_json())):
            # Replaced as a whole, so that a run that is cut leaves no half of a file.
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path.with_suffix(suffix))

    def _effort(self, clause: Clause) -> tuple[int, float]:
        """Number and total seconds of the tests that ran for a clause."""
        ran = [
            o
            for o in self.outcomes
            if clause.id in o.clauses
            and (o.status in (Status.PASSED, Status.FAILED, Status.WAIVED) or o.reason == REFUSED)
        ]
        return len(ran), sum(outcome.seconds for outcome in ran)

    def _first_failure(self, clause: Clause) -> Outcome | None:
        """The failed test of a clause that ended first; None if none failed."""
        return next((o for o in self.outcomes if clause.id in o.clauses and o.status is Status.FAILED), None)

    def _note(self, clause: Clause) -> str:
        status = self.status(clause)
        if status is Status.PASSED:
            return ""
        own = [o for o in self.outcomes if clause.id in o.clauses and o.status is status]
        if (failed := self._first_failure(clause)) is not None:
            return f"{len(own)} failed, first {failed.test}"
        return next((outcome.reason for outcome in own if outcome.reason), "")


def from_json(path: Path) -> Report:
    """Reads a JSON report.

    Raises:
        ConfigError: The file cannot be read, or is not a report.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ConfigError(f"{path} is a report of schema {content['schema']}; this mvllm reads schema {SCHEMA}.")
        plugin = content["plugin"]
        return Report(
            subject=Subject(
                content["platform"],
                plugin["distribution"],
                plugin["version"],
                plugin["contract"],
                plugin["vendor"],
                tuple(content["devices"]),
                content["capabilities"],
            ),
            core_version=content["core"]["version"],
            core_contract=content["core"]["contract"],
            outcomes=[
                Outcome(t["test"], t["clauses"], Status(t["status"]), t["seconds"], t["reason"])
                for t in content["tests"]
            ],
            waivers=[Waiver(w["clause"], w["reason"], w["link"], w["cases"]) for w in content["waivers"]],
            only=tuple(content["only"]),
            quick=content["quick"],
            complete=content.get("complete", True),
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{path} is not a conformance report: {type(e).__name__}: {e}") from e


def _of(family: str) -> list[Clause]:
    return [clause for clause in CLAUSES.values() if clause.family == family]
