"""The result table: medians of the runs, compared with the best peer and the machine's limits.

Each run's bound is computed from the rates measured around that run, since a shared machine's bandwidth varies. The
table shows the median over the runs of bound / seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.perf.cpu_bench.limits import ModelSize, Rates, WeightFormat, floor_seconds, phases
from tests.perf.cpu_bench.workloads import WORKLOADS

DISAGREE = 1.2  # bandwidths of one row, or of two rows of a workload, that differ by more are flagged


@dataclass(frozen=True)
class Record:
    """One run, or the reason why it did not happen.

    Attributes:
        workload, precision, engine: Key of the row.
        ours: Whether the engine is mvllm.
        version: Version of the engine.
        run: Number of the run.
        seconds: Duration; None if it did not run.
        before, after: The machine's rates before and after it.
        weights: The engine's weight format.
        idle: Whether the machine was idle before.
        note: Why it did not run.
        more: Additional measurements.
    """

    workload: str
    precision: str
    engine: str
    ours: bool
    version: str = ""
    run: int = 0
    seconds: float | None = None
    before: Rates | None = None
    after: Rates | None = None
    weights: WeightFormat | None = None
    idle: bool = True
    note: str = ""
    more: dict = field(default_factory=dict)

    def rates(self) -> Rates:
        """The mean of the rates before and after."""
        assert self.before is not None and self.after is not None
        read = None
        if self.before.read and self.after.read:
            read = (self.before.read + self.after.read) / 2
        return Rates(read, (self.before.bf16 + self.after.bf16) / 2, (self.before.int8 + self.after.int8) / 2)

    def to_json(self) -> dict:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict) -> Record:
        """The inverse of `to_json`."""
        rates = {key: Rates(**found[key]) if found[key] else None for key in ("before", "after")}
        weights = WeightFormat(**found["weights"]) if found["weights"] else None
        return cls(**{**found, **rates, "weights": weights})


@dataclass(frozen=True)
class Row:
    """Summary of the runs of one engine on one workload.

    Attributes:
        seconds: Median.
        of_peer: Seconds of the best peer over ours (above 1: faster than it); None without a peer, or for the peer.
        of_read, of_gemm, of_floor: Read time, compute time, and the larger of both in each phase, at the machine's
        rates, as shares of the seconds.
        read: Smallest and largest bandwidth measured around the runs, GB/s.
        flags: Reasons to doubt the row.
    """

    engine: str
    seconds: float | None
    runs: int
    of_peer: float | None = None
    of_read: float | None = None
    of_gemm: float | None = None
    of_floor: float | None = None
    read: tuple[float, float] | None = None
    flags: tuple[str, ...] = ()


def rows_of(records: Sequence[Record], size: ModelSize) -> list[Row]:
    """The rows of one workload at one precision, in the order in which the engines first appear."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.engine, []).append(record)
    measured = {name: [r for r in found if r.seconds is not None] for name, found in groups.items()}
    medians = {name: statistics.median(_seconds(r) for r in found) for name, found in measured.items() if found}
    peers = [medians[name] for name, found in measured.items() if found and not found[0].ours]
    best = min(peers, default=None)
    bandwidths = [bandwidth for found in measured.values() if (bandwidth := _bandwidth(found))]
    usual = statistics.median(bandwidths) if bandwidths else None
    rows = []
    for name, found in groups.items():
        if name not in medians:
            rows.append(Row(name, None, 0, flags=(found[0].note,)))
        else:
            rows.append(_row(name, measured[name], medians[name], best, usual, size))
    return rows


def _row(name: str, runs: list[Record], median: float, best: float | None, usual: float | None, size: ModelSize) -> Row:
    flags = []
    if not all(r.idle for r in runs):
        flags.append("machine not idle")
    reads = [rates.read for r in runs for rates in (r.before, r.after) if rates is not None and rates.read]
    bandwidth = _bandwidth(runs)
    if reads and max(reads) > DISAGREE * min(reads):
        flags.append("bandwidth moved")
    if bandwidth and usual and max(bandwidth, usual) > DISAGREE * min(bandwidth, usual):
        flags.append("other bandwidth than the rows beside it")
    shares: tuple[float | None, ...] = (None, None, None)
    if runs[0].workload in WORKLOADS:
        each = [_shares(r, size) for r in runs]
        shares = tuple(_median([e[i] for e in each]) for i in range(3))
    of_peer = best / median if best is not None and (runs[0].ours or median != best) else None
    return Row(name, median, len(runs), of_peer, *shares, (min(reads), max(reads)) if reads else None, tuple(flags))


def _shares(record: Record, size: ModelSize) -> tuple[float | None, float, float | None]:
    assert record.weights is not None
    workload, rates, seconds = WORKLOADS[record.workload], record.rates(), _seconds(record)
    prompts, tokens = phases(workload, size, record.weights)
    whole = prompts + tokens
    read = whole.read_seconds(rates) / seconds if rates.read else None
    floor = floor_seconds(workload, size, record.weights, rates) / seconds if rates.read else None
    return read, whole.compute_seconds(rates) / seconds, floor


def _seconds(record: Record) -> float:
    assert record.seconds is not None
    return record.seconds


def _bandwidth(runs: list[Record]) -> float | None:
    return _median([r.rates().read for r in runs])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


HEAD = (
    "| workload | precision | engine | seconds | best peer / this | bandwidth bound | GEMM bound | floor "
    "| read GB/s around | runs | |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def render(records: Sequence[Record], size: ModelSize) -> str:
    """The whole table, in Markdown."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.workload, record.precision), []).append(record)
    lines = [HEAD]
    for (workload, precision), found in groups.items():
        for row in rows_of(found, size):
            cells = [
                workload,
                precision,
                row.engine,
                "-" if row.seconds is None else f"{row.seconds:.3f}",
                "-" if row.of_peer is None else f"{row.of_peer:.2f}",
                *("-" if share is None else f"{share:.0%}" for share in (row.of_read, row.of_gemm, row.of_floor)),
                "-" if row.read is None else f"{row.read[0]:.0f}-{row.read[1]:.0f}",
                str(row.runs),
                "; ".join(row.flags),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    versions = {record.engine: record.version for record in records if record.version}
    lines += (
        ["", "Engines: " + ", ".join(f"{name} {version}" for name, version in versions.items())] if versions else []
    )
    return "\n".join(lines)
