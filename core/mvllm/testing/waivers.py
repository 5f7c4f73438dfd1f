"""Waivers: what a platform is known not to keep, said in public, with a reason and a link.

    [[waiver]]
    clause = "ATT-07"
    cases = "*float16*"                       # optional: which of the clause's tests; default all
    reason = "half precision sums overflow before driver 5.2"
    link = "https://example.com/acme/issues/17"
    expires = 2027-03-31                      # optional

A waiver is strict. One that has expired, names no clause, or lacks its reason or link ends the run before it begins; one
that nothing needs any more (no test that it covers fails) fails the run at its end.
"""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mvllm.errors import ConfigError
from mvllm.testing.clauses import CLAUSES

_KEYS = frozenset({"clause", "cases", "reason", "link", "expires"})


@dataclass(frozen=True)
class Waiver:
    """One exception.

    Attributes:
        clause: The clause's id.
        reason: Why the platform does not keep it.
        link: Where that is tracked, `https://...` or `http://...`.
        cases: Pattern for the names of the tests it covers, as in `test_x[float16-...]`.
        expires: Last day on which it is accepted.
    """

    clause: str
    reason: str
    link: str
    cases: str = "*"
    expires: datetime.date | None = None

    def covers(self, clause_ids: list[str], test: str) -> bool:
        """Whether it excuses a test of that name."""
        return self.clause in clause_ids and fnmatchcase(test, self.cases)

    def __str__(self) -> str:
        narrowed = "" if self.cases == "*" else f" ({self.cases})"
        return f"{self.clause}{narrowed}: {self.reason} {self.link}"


def read_waivers(path: Path, today: datetime.date) -> list[Waiver]:
    """The waivers of a file.

    Raises:
        ConfigError: The file cannot be read, or a waiver is not acceptable; every one that is not is named.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"The waivers in {path} cannot be read: {e}") from e
    entries = content.get("waiver", [])
    if set(content) - {"waiver"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{path} may hold [[waiver]] tables and nothing else, found {', '.join(sorted(content))}.")
    problems = [
        f"  waiver {i}: {problem}" for i, entry in enumerate(entries, 1) for problem in _problems(entry, today)
    ]
    if problems:
        raise ConfigError(f"Waivers in {path} are not acceptable:\n" + "\n".join(problems))
    return [Waiver(**entry) for entry in entries]


def _problems(entry: dict[str, object], today: datetime.date) -> list[str]:
    found = [f"there is no key {key!r} (there are {', '.join(sorted(_KEYS))})" for key in sorted(entry.keys() - _KEYS)]
    clause, expires = entry.get("clause"), entry.get("expires")
    if clause not in CLAUSES:
        found.append(f"there is no clause {clause!r}; `mvllm conformance --clauses` lists them")
    for key in ("reason", "cases"):
        if (key == "reason" or key in entry) and not (isinstance(text := entry.get(key), str) and text.strip()):
            found.append(f"{clause} has no {key}")
    link = entry.get("link")
    if not isinstance(link, str) or not link.startswith(("https://", "http://")):
        found.append(f"{clause} has no link to where this is tracked (https://...), found {link!r}")
    if expires is not None and (not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime)):
        found.append(f"expires must be a date like 2027-03-31, found {expires!r}")
    elif expires is not None and expires < today:
        found.append(f"{clause} was waived until {expires}, which is over: mend the platform, or renew it with a reason")
    return found
