"""State of the machine during a measurement: whether it is idle, and its current rates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.perf.cpu_bench.limits import Rates

HERE = Path(__file__).parent
BUFFER_MIB = 160  # larger than the caches of any two cores
REPEATS = 6
IDLE_SHARE = 0.10


def busy_share(seconds: float = 0.5) -> float:
    """Share of all cores' time that was busy, over `seconds`. 0 if the system does not report it."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return 0.0
    total = after[0] - before[0]
    return 1 - (after[1] - before[1]) / total if total else 0.0


def wait_until_idle(limit: float) -> bool:
    """Waits until less than a tenth of the cores' time is in use; False if that took longer than `limit` seconds."""
    deadline = time.monotonic() + limit
    while busy_share() > IDLE_SHARE:
        if time.monotonic() > deadline:
            return False
    return True


def busy_seconds() -> float:
    """Computing time of all programs on all cores since the machine started."""
    total, idle = _cpu_times()
    return (total - idle) / os.sysconf("SC_CLK_TCK")


def _cpu_times() -> tuple[int, int]:
    """(all, idle) in clock ticks since the machine started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


class Probe:
    """Measures the machine's rates. A context manager.

    Args:
        folder: Folder for the compiled program.
        threads: Threads to measure with.

    Attributes:
        note: Rates that could not be measured, and why; empty if all could.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._threads = threads
        self.note = ""
        self._reader = self._compile(folder)
        self._gemm = subprocess.Popen(
            [sys.executable, HERE / "runners" / "gemm_rate.py", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )

    def __enter__(self) -> Probe:
        assert self._gemm.stdout is not None
        self.torch = json.loads(self._gemm.stdout.readline())["torch"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gemm.terminate()
        self._gemm.communicate()

    def rates(self) -> Rates:
        """The machine's current rates; takes about a third of a second."""
        return Rates(self.read_bandwidth(), **self._gemm_rates())

    def read_bandwidth(self) -> float | None:
        """GB/s of all threads together."""
        if self._reader is None:
            return None
        command = [self._reader, str(BUFFER_MIB), str(self._threads), str(REPEATS)]
        return float(subprocess.check_output(command, text=True))

    def _gemm_rates(self) -> dict[str, float]:
        assert self._gemm.stdin is not None and self._gemm.stdout is not None
        self._gemm.stdin.write("\n")
        self._gemm.stdin.flush()
        return json.loads(self._gemm.stdout.readline())

    def _compile(self, folder: Path) -> Path | None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            self.note = "no C compiler: the read bandwidth is not measured (set CC, or install one)"
            return None
        program = folder / "read_bandwidth"
        source = HERE / "read_bandwidth.c"
        for flags in (["-O3", "-march=native"], ["-O3"]):  # not every compiler supports -march=native on this machine
            built = subprocess.run(
                [compiler, *flags, str(source), "-o", str(program), "-pthread"], capture_output=True, text=True
            )
            if built.returncode == 0:
                return program
        self.note = f"{compiler} does not compile {source.name}: {built.stderr.strip().splitlines()[-1:]}"
        return None


def describe() -> str:
    """Processor, cores and memory in one line."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB"
