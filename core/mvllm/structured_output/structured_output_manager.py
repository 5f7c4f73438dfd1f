"""Compiles the grammars of requests in the background: the engine core submits requests and polls for grammars."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.requests import EngineCoreRequest
from mvllm.structured_output.grammar_compiler import (
    CompiledGrammar,
    GrammarCache,
    GrammarCompiler,
    TransientCompileError,
    make_compile_job,
)
from mvllm.structured_output.mask_worker import MaskTimeBudget, MaskWorker
from mvllm.structured_output.sandbox import GrammarSandbox
from mvllm.structured_output.sandbox_main import CompileJob
from mvllm.structured_output.sequence_grammar import SequenceGrammar
from mvllm.structured_output.vocabulary import Vocabulary

logger = get_logger(__name__)

NUM_THREADS = 2
"""Two, so that a slow grammar does not delay all others."""

MAX_WAIT_SECONDS = 120.0
"""A request whose grammar has not been compiled by then, because of a long queue, fails."""

_Result = CompiledGrammar | RequestError


@dataclass(frozen=True)
class GrammarResult:
    """A change of a request: its grammar is ready, it has none because of an error, or its sequence has failed.

    Attributes:
        grammar: To start with. With `error`, the grammar of a running request that has failed.
        error: Why the request fails.
        parameter: The request's parameter that caused the error; None if none did.
    """

    request_id: str
    grammar: SequenceGrammar | None
    error: str | None
    parameter: str | None = None


@dataclass(frozen=True)
class _Waiting:
    request: EngineCoreRequest
    since: float


class StructuredOutputManager:
    """Compiles the grammars of an engine core's requests on its own threads. Used from one thread.

    Args:
        load_vocabulary: Called once, on a compile thread, for the first request.
        deterministic_timing: Masks must not depend on time, because several engines have to make the same plans. Each
            mask is then computed at once, without a limit.
    """

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], *, deterministic_timing: bool = False) -> None:
        self._cache = GrammarCache()
        self._results_ready = threading.Event()
        self._mask_worker = None if deterministic_timing else MaskWorker(self._results_ready)
        self._budgets: weakref.WeakValueDictionary[str, MaskTimeBudget] = weakref.WeakValueDictionary()
        self._waiting: dict[CompileJob, list[_Waiting]] = {}
        self._results: list[GrammarResult] = []
        self._compile_pool = _CompilePool(load_vocabulary, self._results_ready)
        self._close = weakref.finalize(self, self._compile_pool.close)

    def submit(self, request: EngineCoreRequest) -> None:
        """Starts compiling a request's grammar; `pop_results` returns it."""
        params = request.sampling_params.structured_outputs
        assert params is not None
        job = make_compile_job(params)
        known = self._cache.get(job)
        if known is not None:
            self._results.append(self._make_result(request, known))
            return
        others = self._waiting.setdefault(job, [])
        others.append(_Waiting(request, time.monotonic()))
        if len(others) == 1:
            self._compile_pool.submit(job)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drops requests. A queued grammar that no other request waits for is not compiled."""
        if not self._waiting and not self._results:
            return
        gone = set(request_ids)
        self._results = [result for result in self._results if result.request_id not in gone]
        for job, waiting in list(self._waiting.items()):
            left = [each for each in waiting if each.request.request_id not in gone]
            if left:
                self._waiting[job] = left
            elif self._compile_pool.cancel(job):
                del self._waiting[job]
            else:
                self._waiting[job] = []  # it is being compiled: the result goes to the cache

    def begin_step(self) -> None:
        """Limits the time of masks on the caller's thread until the next call."""
        if self._mask_worker is not None:
            self._mask_worker.begin_step()

    def compute_deferred_masks(self) -> None:
        """Computes the masks that a step in flight waits for."""
        if self._mask_worker is not None:
            self._mask_worker.run_deferred()

    def pop_results(self) -> list[GrammarResult]:
        """Results since the last call."""
        self._results_ready.clear()
        if self._waiting:
            for job, result in self._compile_pool.pop_finished():
                if not isinstance(result, TransientCompileError):
                    self._cache.put(job, result)
                self._results += [self._make_result(each.request, result) for each in self._waiting.pop(job, ())]
            self._fail_late_requests()
        results, self._results = self._results, []
        for grammar in self._mask_worker.pop_failed() if self._mask_worker is not None else ():
            assert isinstance(grammar, SequenceGrammar)
            results.append(GrammarResult(grammar.request_id, grammar, grammar.error, "structured_outputs"))
        return results

    def wait(self, seconds: float) -> None:
        """Waits until `pop_results` may have results or a mask is ready, at most that many seconds."""
        if not self._results:
            if self._mask_worker is not None:
                self._mask_worker.disable_pauses()
            self._results_ready.wait(seconds)

    @property
    def sandbox_pids(self) -> list[int]:
        """Process ids of the sandboxes."""
        return self._compile_pool.sandbox_pids

    def shutdown(self) -> None:
        """Ends threads and processes. Idempotent."""
        self._close()
        if self._mask_worker is not None:
            self._mask_worker.close()

    def _make_result(self, request: EngineCoreRequest, result: _Result) -> GrammarResult:
        if isinstance(result, RequestError):
            return GrammarResult(request.request_id, None, str(result), result.parameter)
        worker = self._mask_worker
        grammar = result.start_sequence(request, worker, None if worker is None else self._budget(request))
        if grammar.error is not None:
            return GrammarResult(request.request_id, None, grammar.error, "structured_outputs")
        return GrammarResult(request.request_id, grammar, None)

    def _budget(self, request: EngineCoreRequest) -> MaskTimeBudget:
        """The mask budget of a request, shared by the sequences of one `n`."""
        group = request.sibling_group
        budget = None if group is None else self._budgets.get(group)
        if budget is None:
            budget = MaskTimeBudget()
            if group is not None:
                self._budgets[group] = budget
        return budget

    def _fail_late_requests(self) -> None:
        limit = time.monotonic() - MAX_WAIT_SECONDS
        for job, waiting in self._waiting.items():
            late = [each for each in waiting if each.since < limit]
            if late:
                self._waiting[job] = [each for each in waiting if each.since >= limit]
                error = f"structured_outputs: not compiled within {MAX_WAIT_SECONDS:g} s, the queue is long; try again."
                self._results += [GrammarResult(each.request.request_id, None, error) for each in late]


class _CompilePool:
    """Compile threads, started with the first jobs, each with its own sandbox."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], results_ready: threading.Event) -> None:
        self._compiler = GrammarCompiler(load_vocabulary)
        self._jobs: SimpleQueue[CompileJob | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[CompileJob, _Result]] = SimpleQueue()
        self._results_ready = results_ready
        self._lock = threading.Lock()
        self._queued: set[CompileJob] = set()  # not started yet
        self._sandboxes: list[GrammarSandbox] = []
        self._num_threads = 0
        self._closed = False

    def submit(self, job: CompileJob) -> None:
        with self._lock:
            self._queued.add(job)
        self._jobs.put(job)
        if self._num_threads < NUM_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._work, name=f"grammar-{self._num_threads}", daemon=True).start()

    def cancel(self, job: CompileJob) -> bool:
        """Removes a job from the queue. False if it was started."""
        with self._lock:
            was_queued = job in self._queued
            self._queued.discard(job)
            return was_queued

    def pop_finished(self) -> list[tuple[CompileJob, _Result]]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    @property
    def sandbox_pids(self) -> list[int]:
        with self._lock:
            return [sandbox.pid for sandbox in self._sandboxes if sandbox.pid is not None]

    def close(self) -> None:
        self._closed = True
        for _ in range(self._num_threads):
            self._jobs.put(None)
        with self._lock:
            sandboxes = list(self._sandboxes)
        for sandbox in sandboxes:
            sandbox.close()

    def _work(self) -> None:
        sandbox: GrammarSandbox | None = None
        while (job := self._jobs.get()) is not None and not self._closed:
            with self._lock:
                if job not in self._queued:
                    continue
                self._queued.remove(job)
            result: _Result
            try:
                if sandbox is None:
                    sandbox = self._add_sandbox()
                result = self._compiler.compile(job, sandbox)
            except RequestError as e:
                result = e
            except Exception as e:  # noqa: BLE001  (it becomes the result)
                logger.warning("A grammar could not be compiled: %s: %s", type(e).__name__, e)
                result = TransientCompileError(
                    f"structured_outputs: it could not be compiled: {type(e).__name__}", parameter="structured_outputs"
                )
            self._done.put((job, result))
            self._results_ready.set()

    def _add_sandbox(self) -> GrammarSandbox:
        sandbox = GrammarSandbox(self._compiler.vocabulary())
        with self._lock:
            self._sandboxes.append(sandbox)
        if self._closed:
            sandbox.close()
        return sandbox
