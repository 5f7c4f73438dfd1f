"""Waivers: known violations of clauses, each with a reason and a link.

    [[waiver]]
    clause = "ATT-07"
    cases = "*float16*"                       # optional pattern of test names; default all
    reason = "half precision sums overflow before driver 5.2"
    link = "https://example.com/acme/issues/17"
    expires = 2027-03-31                      # optional

Waivers are strict. An expired or invalid waiver prevents the run; a waiver that is no longer needed, because none of
the tests that it covers fails, makes the run fail.
"""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mvllm.plugin_api import ConfigError
from mvllm_conformance.clauses import CLAUSES

_KEYS = frozenset({"clause", "cases", "reason", "link", "expires"})


@dataclass(frozen=True)
class Waiver:
    """One waiver.

    Attributes:
        clause: The clause's id.
        reason: Why the platform violates the clause.
        link: URL of an issue, `https://...` or `http://...`.
        cases: Pattern of the names of covered tests, as in `test_x[float16-...]`.
        expires: Last day on which the waiver is valid.
    """

    clause: str
    reason: str
    link: str
    cases: str = "*"
    expires: datetime.date | None = None

    def covers(self, clause_ids: list[str], test: str) -> bool:
        """Whether the waiver covers a test of these clauses."""
        return self.clause in clause_ids and fnmatchcase(test, self.cases)

    def __str__(self) -> str:
        narrowed = "" if self.cases == "*" else f" ({self.cases})"
        return f"{self.clause}{narrowed}: {self.reason} {self.link}"


def read_waivers(path: Path, today: datetime.date) -> list[Waiver]:
    """The waivers of a file.

    Raises:
        ConfigError: The file cannot be read, or waivers are invalid; the message names all of them.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        where = " `mvllm plugin new` writes one into the package's folder." if isinstance(e, FileNotFoundError) else ""
        raise ConfigError(f"The file of waivers {path} cannot be read: {e.strerror}.{where}") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"The waivers in {path} cannot be read: {e}") from e
    entries = content.get("waiver", [])
    if set(content) - {"waiver"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{path} may hold [[waiver]] tables and nothing else, found {', '.join(sorted(content))}.")
    problems = [f"  waiver {i}: {problem}" for i, entry in enumerate(entries, 1) for problem in _problems(entry, today)]
    if problems:
        raise ConfigError(f"Waivers in {path} are invalid:\n" + "\n".join(problems))
    return [Waiver(**entry) for entry in entries]


def _problems(entry: dict[str, object], today: datetime.date) -> list[str]:
    found = [f"unknown key {key!r} (keys: {', '.join(sorted(_KEYS))})" for key in sorted(entry.keys() - _KEYS)]
    clause, expires = entry.get("clause"), entry.get("expires")
    if clause not in CLAUSES:
        found.append(f"unknown clause {clause!r}; `mvllm conformance --clauses` lists the clauses")
    for key in ("reason", "cases"):
        if (key == "reason" or key in entry) and not (isinstance(text := entry.get(key), str) and text.strip()):
            found.append(f"{clause} has no {key}")
    link = entry.get("link")
    if not isinstance(link, str) or not link.startswith(("https://", "http://")):
        found.append(f"{clause} has no link to where this is tracked (https://...), found {link!r}")
    if expires is not None and (not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime)):
        found.append(f"expires must be a date like 2027-03-31, found {expires!r}")
    elif expires is not None and expires < today:
        found.append(
            f"the waiver of {clause} expired on {expires}: fix the platform, or renew the waiver with a reason"
        )
    return found
