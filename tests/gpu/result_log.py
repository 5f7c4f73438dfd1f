"""ResultLog: the rows that a run has found so far, written to disk one by one.

    OUT/rows.jsonl     a row per line, append-only, written by the parent and by its children
    OUT/items.txt      a line per item that is done: part and name
    OUT/PART.json      the rows of one part
    OUT/table.md       all of them as one table, rewritten with each row

So a run that is killed keeps its results.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.clock import SYSTEM, Clock
from tests.gpu.compiler_cache import ARCHIVE
from tests.gpu.settings import Item

OK, FAILED, MEASURED, NOT_RUN = "ok", "failed", "measured", "not run"
ROWS = "rows.jsonl"
DONE = "items.txt"
Value = float | int | str | bool | None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: For instance `parity`.
        item: The item whose run made it.
        name: What was looked at.
        status: OK, FAILED, MEASURED or NOT_RUN.
        figures: What was found; units are in the names.
        note: One line: why it failed, or what a figure means.
        at: Seconds since the epoch.
    """

    part: str
    item: str
    name: str
    status: str
    figures: Mapping[str, Value] = field(default_factory=dict)
    note: str = ""
    at: float = 0.0


class ResultLog:
    """The rows of one run.

    Args:
        folder: Where the files are; made if need be.
        clock: Says when a row was added.
    """

    def __init__(self, folder: Path, clock: Clock = SYSTEM) -> None:
        self.folder, self._clock = folder, clock
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / ROWS

    def add(self, row: Row) -> None:
        """Keeps a row, prints it, and writes the files anew."""
        row = Row(row.part, row.item, row.name, row.status, dict(row.figures), one_line(row.note), self._clock.wall())
        with (self.folder / "lock").open("a") as lock:  # children may run side by side
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._add(row)

    def _add(self, row: Row) -> None:
        with self._file.open("a+b") as file:
            if file.tell() and self._file.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # the line before was not written to its end
            file.write(json.dumps(asdict(row)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{row.part:<12} {row.name:<40} {row.status:<9} {shown(row.figures)} {row.note}".rstrip(), flush=True)
        self.write()

    def start_anew(self) -> None:
        """Puts the rows of an earlier run aside."""
        if self._file.exists():
            self._file.replace(self.folder / "rows-before.jsonl")
        for file in (*self.folder.glob("*.json"), self.folder / DONE):
            file.unlink(missing_ok=True)

    def continue_from(self, folder: Path, compiled: Path | None = None) -> None:
        """Takes over the rows, done items, reports and compiled kernels of an earlier run's folder.

        Args:
            folder: Of the earlier run.
            compiled: Where compiled kernels go; None for this run's folder.
        """
        places = dict.fromkeys((folder / ROWS, folder / DONE, *folder.glob("*-report.json")), self.folder)
        for path, place in (places | {folder / ARCHIVE: compiled or self.folder}).items():
            if path.is_file() and path.resolve() != (place / path.name).resolve():
                shutil.copyfile(path, place / path.name)

    def mark_done(self, part: str, item: str) -> None:
        """An item has been run to its end, with or without failures."""
        with (self.folder / DONE).open("a") as file:  # one write: children side by side append to it
            file.write(f"{part}\t{item}\n")

    def is_done(self, part: str, item: Item) -> bool:
        """Whether an item was run to its end, none of its rows failed, and the last one is not "not run"."""
        done = self.folder / DONE
        statuses = [row.status for row in self.rows() if (row.part, row.item) == (part, item.name)]
        failed = FAILED in statuses or statuses[-1:] == [NOT_RUN]
        return not failed and done.is_file() and f"{part}\t{item.name}" in done.read_text().splitlines()

    def rows(self) -> list[Row]:
        """All of them, in the order in which they came."""
        if not self._file.exists():
            return []
        found = []
        for line in self._file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that was not written to its end
                found.append(Row(**json.loads(line)))
        return found

    def figures(self, part: str, name: str) -> Mapping[str, Value]:
        """The newest of one name; empty where there are none."""
        found = [row.figures for row in self.rows() if (row.part, row.name) == (part, name)]
        return found[-1] if found else {}

    def write(self) -> None:
        """The files that people read."""
        rows = self.rows()
        for part in {row.part for row in rows}:
            content = [asdict(row) for row in rows if row.part == part]
            _replace(self.folder / f"{part}.json", json.dumps(content, indent=1) + "\n")
        _replace(self.folder / "table.md", table(rows))


def table(rows: list[Row]) -> str:
    """Markdown: a row per finding."""
    lines = ["| part | what | result | figures | note |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = (row.part, row.name, row.status, shown(row.figures), row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    counts = {status: sum(row.status == status for row in rows) for status in (OK, MEASURED, FAILED, NOT_RUN)}
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items()) + "."]
    return "\n".join(lines) + "\n"


def shown(figures: Mapping[str, Value]) -> str:
    """Figures as people read them."""
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items())


def one_line(text: str, most: int = 400) -> str:
    """A text's words in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _number(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _replace(path: Path, text: str) -> None:
    """A reader, and a kill, finds the old file or the new one."""
    spare = path.with_name(path.name + ".new")
    spare.write_text(text, encoding="utf-8")
    spare.replace(path)
