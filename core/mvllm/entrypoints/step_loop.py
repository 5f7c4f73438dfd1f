"""The step loop of an engine in this process: steps until every request has finished, and handles Ctrl-C.

    for output in run_requests(engine, requests):             offline generation
    for output in run_prompts(engine, prompts):               benchmarks
    for output in stream_request(engine, prompt, params):     one request, with its new text after each step

Ctrl-C takes effect between two steps, never in the middle of one, so that the engine stays usable.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec

from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.engine.shared_steps import StepCaller
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_prompt_numbers = itertools.count()
_stream_numbers = itertools.count()


def run_requests(engine: LLMEngine, requests: Sequence[ProcessedRequest]) -> Generator[RequestOutput, None, None]:
    """Adds requests and yields their outputs, those of every step, until all have finished.

    Several threads may do so at once: their requests run in the same steps. Aborts the requests if the caller leaves
    the loop early, by an exception or Ctrl-C too; those of other threads continue.

    Args:
        requests: From one of the engine's input processors. If one cannot be added, none is.

    Raises:
        RequestError: A request id is in use, or a request was aborted by someone else.
        EngineSleepingError: The engine sleeps, or was put to sleep.
        KeyboardInterrupt: Ctrl-C was pressed; raised between two steps.
        EngineDeadError: The engine failed as a whole, or was closed.
    """
    caller: StepCaller | None = None

    def wake() -> None:
        if caller is not None:
            caller.wake()
        engine.wake()

    with interrupts_between_steps(wake) as raise_pending_interrupt:
        caller = engine.add_caller(requests)
        try:
            while caller.unfinished:
                yield from engine.next_outputs(caller, raise_pending_interrupt)
        finally:
            engine.remove_caller(caller)


def run_prompts(
    engine: LLMEngine, prompts: Sequence[tuple[PromptType, SamplingParams]]
) -> Generator[RequestOutput, None, None]:
    """Processes prompts, adds them all at once, and yields their outputs as `run_requests` does.

    Raises:
        RequestError: A prompt or a parameter is invalid. No request is added.
    """
    ids = [f"prompt-{next(_prompt_numbers)}" for _ in prompts]
    processor = engine.input_processor
    yield from run_requests(engine, processor.process_batch(ids, [p for p, _ in prompts], [s for _, s in prompts]))


def stream_request(
    engine: LLMEngine, prompt: PromptType, params: SamplingParams
) -> Generator[RequestOutput, None, None]:
    """Generates from one prompt and yields what is new after each step. Leaving the loop early aborts the request.

    Raises:
        RequestError: The prompt or a parameter is invalid.
    """
    request_id = f"stream-{next(_stream_numbers)}"
    streamed = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
    yield from run_requests(engine, [engine.input_processor.process(request_id, prompt, streamed)])


@contextmanager
def interrupts_between_steps(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Delays the first Ctrl-C until the yielded function is called, which then raises KeyboardInterrupt.

    A second Ctrl-C raises at once. Outside the main thread, and in programs with a SIGINT handler of their own, nothing
    changes.

    Args:
        wake: Called at the first Ctrl-C. It must end the wait for a step in another process.
    """
    pending = False

    def raise_pending_interrupt() -> None:
        if pending:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_pending_interrupt
        return

    def handle_sigint(signum: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True
        wake()

    signal.signal(signal.SIGINT, handle_sigint)
    try:
        yield raise_pending_interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
