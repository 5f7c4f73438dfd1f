"""Finds the fastest of several settings by successive halving, with a measured noise.

Every candidate is measured in short rounds. After each stage the slower half is dropped and the others are measured
again, with more rounds, so that most of the time is spent on settings that are hard to tell apart:

    stage 1   all candidates        1 round each
    stage 2   the faster half       1 more
    stage 3   its faster half       2 more
    ...
    last      the fastest           new rounds, in turn with the default settings

Only the rounds of the last stage decide whether the fastest beats the defaults: the earlier ones selected it, so they
show luck as well as speed. Sequential halving is from Karnin, Koren and Somekh, "Almost Optimal Exploration in
Multi-Armed Bandits" (2013).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvllm.extension_api import ConfigError, MvllmError

Settings = Mapping[str, Any]
"""Values by the name of an option of `mvllm serve`, or of an environment variable (in capitals)."""

FINAL_ROUNDS = 4
"""Rounds of the fastest candidate and of the defaults in the last stage."""

_FINAL_STARTS = 2  # starts among which these rounds are divided
_MOST_ROUNDS = 4  # of one candidate in one stage


@dataclass(frozen=True)
class Candidate:
    """Settings to measure; none for the defaults."""

    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The settings as text."""
        return ", ".join(f"{name} {value}" for name, value in self.settings) or "default settings"


DEFAULT = Candidate()


@dataclass(frozen=True)
class Round:
    """One measured run of the workload.

    Attributes:
        score: What is maximized, in tokens per second.
        metrics: Further figures by title, for the table.
    """

    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """One start of an engine or a server with a candidate's settings.

    Attributes:
        candidate: Its settings.
        stage: The stage, counted from 0.
        first_round: Number of its first round; equal numbers have equal requests.
        num_rounds: Rounds to measure.
    """

    candidate: Candidate
    stage: int
    first_round: int
    num_rounds: int

    @property
    def key(self) -> tuple[str, int, int]:
        """Identifies the start within a sweep."""
        return self.candidate.name, self.stage, self.first_round


@dataclass
class Measured:
    """What was measured of a candidate.

    Attributes:
        rounds: Rounds of the stages that select.
        final_rounds: Rounds of the last stage.
        error: Why it could not be measured; None if it could.
    """

    candidate: Candidate
    rounds: list[Round] = field(default_factory=list)
    final_rounds: list[Round] = field(default_factory=list)
    error: str | None = None

    @property
    def reported(self) -> list[Round]:
        """The rounds of the last stage if it took part, else all."""
        return self.final_rounds or self.rounds

    @property
    def score(self) -> float:
        """Mean score of the reported rounds; 0 without rounds."""
        return statistics.fmean(each.score for each in self.reported) if self.reported else 0.0


Measure = Callable[[Start], list[Round]]
"""Measures a start; raises MvllmError if the settings do not work."""


class Journal:
    """A file with every finished start, from which an interrupted sweep continues.

    Args:
        path: The file, one JSON object a line.
        header: What the results depend on: model, workload, objective.
        resume: Continue the file if it exists.

    Raises:
        ConfigError: The file exists and `resume` is not set, or its results are of another sweep.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self._done: dict[tuple[str, int, int], dict[str, Any]] = {}
        header = json.loads(json.dumps(header))
        if not path.exists():
            self._write(header, "x")
            return
        if not resume:
            raise ConfigError(
                f"{path} has results of an earlier sweep. Add --resume to continue it, or --overwrite to start anew."
            )
        found, *entries = self._read()
        if found != header:
            changed = sorted(name for name in {*found, *header} if found.get(name) != header.get(name))
            raise ConfigError(
                f"{path} has results of a sweep with other values of {', '.join(changed)}. Sweep with the "
                "same options, or add --overwrite in place of --resume."
            )
        self._write(found, "w")  # without a last line that was cut off
        for entry in entries:
            self._write(entry, "a")
            self._done[entry["candidate"], entry["stage"], entry["first_round"]] = entry

    def __len__(self) -> int:
        return len(self._done)

    def measure(self, start: Start, measure: Measure) -> list[Round]:
        """The rounds of a start: recorded ones, or measured and recorded now.

        Raises:
            MvllmError: The settings do not work; this is recorded, too.
        """
        entry = self._done.get(start.key)
        if entry is None:
            entry = {"candidate": start.candidate.name, "stage": start.stage, "first_round": start.first_round}
            try:
                entry["rounds"] = [{"score": each.score, "metrics": dict(each.metrics)} for each in measure(start)]
            except MvllmError as e:
                entry["error"] = str(e)
            self._write(entry, "a")
            self._done[start.key] = entry
        if "error" in entry:
            raise MvllmError(entry["error"])
        return [Round(each["score"], each["metrics"]) for each in entry["rounds"]]

    def is_done(self, start: Start) -> bool:
        """Whether the file has this start."""
        return start.key in self._done

    def _read(self) -> list[dict[str, Any]]:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        entries = []
        for i, line in enumerate(lines):
            try:
                entries.append(json.loads(line))
            except ValueError as e:
                if i < len(lines) - 1 or not entries:  # the last line may be cut off
                    raise ConfigError(
                        f"{self._path}, line {i + 1}, is not JSON. Remove the file and sweep again."
                    ) from e
        if not entries:
            raise ConfigError(f"{self._path} is empty. Remove the file and sweep again.")
        return entries

    def _write(self, entry: Mapping[str, Any], mode: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as e:
            raise ConfigError(f"Results cannot be written to {self._path}: {e.strerror}.") from e


@dataclass
class SweepResult:
    """Results of a sweep.

    Attributes:
        measured: Every candidate, the fastest first; candidates that went further come before others.
        default: The default settings.
        best: The fastest candidate; None if no candidate works.
        noise: Standard deviation of a round, as a fraction of its score; None if unknown.
    """

    measured: list[Measured]
    default: Measured
    best: Measured | None
    noise: float | None

    def error_of(self, measured: Measured) -> float | None:
        """Standard error of a candidate's score, in tokens per second; None if unknown."""
        if self.noise is None or not measured.reported:
            return None
        return self.noise * measured.score / math.sqrt(len(measured.reported))

    @property
    def gain(self) -> float | None:
        """How much faster the best is than the defaults, as a fraction; None without both."""
        if self.best is None or not self.best.score or not self.default.score:
            return None
        return self.best.score / self.default.score - 1

    @property
    def is_faster(self) -> bool:
        """Whether the best beats the defaults by more than twice the standard error of the difference."""
        if self.best is None or not self.best.score:
            return False
        if not self.default.score:
            return True  # the defaults do not work, or reach no limit
        errors = [self.error_of(self.best), self.error_of(self.default)]
        difference = self.best.score - self.default.score
        return None not in errors and difference > 2 * math.hypot(*(error or 0.0 for error in errors))

    @property
    def chosen(self) -> Candidate:
        """The settings to use: the best ones if they are faster than the defaults, else the defaults."""
        return self.best.candidate if self.best is not None and self.is_faster else DEFAULT


def count_starts(num_candidates: int) -> int:
    """Starts of a sweep in which no candidate fails."""
    num_starts = 2 * _FINAL_STARTS if num_candidates else 0
    while num_candidates > 1:
        num_starts += num_candidates + 1  # and the defaults
        num_candidates = math.ceil(num_candidates / 2)
    return num_starts


def sweep(
    candidates: Sequence[Candidate],
    measure: Measure,
    *,
    on_start: Callable[[Start], None] = lambda start: None,
    on_done: Callable[[Start, Measured], None] = lambda start, measured: None,
) -> SweepResult:
    """Measures the candidates and the defaults.

    Args:
        candidates: Settings to compare with the defaults, which are always measured.
        measure: Measures a start.
        on_start: Called before each start.
        on_done: Called after each start, with all results of its candidate.
    """
    measured = {each: Measured(each) for each in (DEFAULT, *candidates)}

    def run(start: Start, rounds: list[Round]) -> None:
        on_start(start)
        entry = measured[start.candidate]
        try:
            rounds += measure(start)
        except MvllmError as e:
            entry.error = str(e)
        on_done(start, entry)

    stage = num_done = 0
    left = list(candidates)
    order: list[Candidate] = []  # in the order of elimination
    while len(left) > 1:
        num_rounds = min(max(1, 2 ** (stage - 1)), _MOST_ROUNDS)
        in_turn = [DEFAULT, *left]
        for candidate in in_turn if stage % 2 == 0 else reversed(in_turn):  # slow drifts of the machine cancel
            if measured[candidate].error is None:
                run(Start(candidate, stage, num_done, num_rounds), measured[candidate].rounds)
        num_done += num_rounds
        stage += 1
        ranked = sorted(left, key=lambda each: measured[each].error is None and measured[each].score, reverse=True)
        left = [each for each in ranked[: math.ceil(len(ranked) / 2)] if measured[each].error is None]
        order += reversed([each for each in ranked if each not in left])
    for _ in range(_FINAL_STARTS if left else 0):
        num_rounds = FINAL_ROUNDS // _FINAL_STARTS
        for candidate in (left[0], DEFAULT):
            if measured[candidate].error is None:
                run(Start(candidate, stage, num_done, num_rounds), measured[candidate].final_rounds)
        num_done += num_rounds
    best = next((measured[each] for each in left if measured[each].error is None), None)
    ranking = [*left, *reversed(order)]
    return SweepResult([measured[each] for each in ranking], measured[DEFAULT], best, _noise(measured.values()))


def _noise(measured: Iterable[Measured]) -> float | None:
    """Standard deviation of a round relative to its candidate's mean, over all candidates with several rounds."""
    squares, degrees = 0.0, 0
    for each in measured:
        for rounds in (each.rounds, each.final_rounds):
            mean = statistics.fmean(r.score for r in rounds) if rounds else 0.0
            if len(rounds) > 1 and mean > 0:
                squares += sum((r.score / mean - 1) ** 2 for r in rounds)
                degrees += len(rounds) - 1
    return math.sqrt(squares / degrees) if degrees else None
