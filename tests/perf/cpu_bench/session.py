"""A benchmark session: engines of one precision run alternately, with the machine's state checked before and after each
run."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from tests.perf.cpu_bench.engine_process import EngineFailed, EngineProcess
from tests.perf.cpu_bench.engines import Engine
from tests.perf.cpu_bench.limits import ModelSize
from tests.perf.cpu_bench.machine import Probe, wait_until_idle
from tests.perf.cpu_bench.models import MAX_POSITIONS, hf_model, model_for
from tests.perf.cpu_bench.table import Record
from tests.perf.cpu_bench.workloads import WARM_UP, Workload, in_turn, prompts_of


class Session:
    """Runs workloads on engines and records the results.

    Args:
        models: Folder of the models.
        model: Name of the model.
        probe: Measures the machine's rates.
        threads: Threads of every engine.
        logs: Folder for the engines' output.
        keep: Called with each new record.
        seed: Seed of the prompts.
        idle_limit: Seconds to wait for an idle machine before each run.
        turn: Context manager entered around each round of runs, to take turns with other users of the machine.
    """

    def __init__(
        self,
        models: Path,
        model: str,
        probe: Probe,
        *,
        threads: int,
        logs: Path,
        keep: Callable[[Record], None],
        seed: int = 0,
        idle_limit: float = 120.0,
        turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._models, self._model = models, model
        self._probe, self._threads, self._logs = probe, threads, logs
        self._keep, self._seed, self._idle_limit, self._turn = keep, seed, idle_limit, turn
        self.size = ModelSize.of(hf_model(models, model))

    def run(self, engines: Sequence[Engine], workloads: Sequence[Workload], runs: int) -> None:
        """Measures every workload on every engine; engines that do not start are recorded as such."""
        with self.started(engines, workloads) as alive:
            for workload in workloads:
                self.measure(alive, workload, runs)

    @contextlib.contextmanager
    def started(self, engines: Sequence[Engine], workloads: Sequence[Workload]) -> Iterator[dict[str, EngineProcess]]:
        """The engines that start, by name, until the block ends; warmed up with every workload."""
        with ExitStack() as stack:
            alive: dict[str, EngineProcess] = {}
            for engine in engines:  # one after the other: some compile while they load
                try:
                    model = model_for(engine, self._models, self._model)
                except subprocess.CalledProcessError as e:
                    tail = (e.stdout or "").strip().splitlines()[-1:]
                    self._not_run(engine, workloads, f"its model could not be made: {' '.join(tail)}")
                    continue
                log = self._logs / f"{engine.name}-{engine.precision}.log".replace(" ", "-")
                process = EngineProcess(engine, model, threads=self._threads, max_len=MAX_POSITIONS, log=log)
                stack.callback(process.stop)
                try:
                    why = process.start()
                    if why:
                        self._not_run(engine, workloads, f"not available: {why}")
                        continue
                    for workload in workloads:
                        process.run(self._prompts(workload, WARM_UP), min(workload.output, 8), workload.shared)
                except EngineFailed as e:
                    print(e, flush=True)
                    self._not_run(engine, workloads, str(e).splitlines()[0])
                    continue
                alive[engine.name] = process
                print(f"{engine.name} {process.version} ({engine.precision}): {process.says}", flush=True)
            yield alive

    def measure(self, alive: dict[str, EngineProcess], workload: Workload, runs: int) -> None:
        """Interleaved runs of one workload."""
        print(f"{workload}", flush=True)
        for run, order in itertools.groupby(in_turn(list(alive), runs), key=lambda pair: pair[0]):
            with self._turn():
                for _, name in order:
                    if name in alive and not self._measured(alive[name], workload, run):
                        del alive[name]

    def _measured(self, process: EngineProcess, workload: Workload, run: int) -> bool:
        """Measures and keeps one run; False if the engine is lost."""
        engine = process.engine
        idle = wait_until_idle(self._idle_limit)
        if not idle:
            print(f"  the machine was not idle within {self._idle_limit:.0f} s: measured anyway", flush=True)
        before = self._probe.rates()
        try:
            done = process.run(self._prompts(workload, run), workload.output, workload.shared)
        except EngineFailed as e:
            print(e, flush=True)
            self._not_run(engine, [workload], str(e).splitlines()[0])
            return False
        self._keep(
            Record(
                workload.name,
                engine.precision,
                engine.name,
                engine.ours,
                version=process.version,
                run=run,
                seconds=done.seconds,
                before=before,
                after=self._probe.rates(),
                weights=engine.weights,
                idle=idle,
                more={"first": done.first},
            )
        )
        return True

    def _prompts(self, workload: Workload, run: int) -> list[list[int]]:
        return prompts_of(workload, run, self.size.vocab, self._seed)

    def _not_run(self, engine: Engine, workloads: Sequence[Workload], note: str) -> None:
        for workload in workloads:
            self._keep(Record(workload.name, engine.precision, engine.name, engine.ours, note=note))
