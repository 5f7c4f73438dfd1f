"""The step loop of an engine in this process: steps until every request has finished, and handles Ctrl-C.

    for output in step_until_finished(engine, request_ids):     offline generation, offline benchmarks
    for output in stream_request(engine, prompt, params):       one request, with its new text after each step

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

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_stream_numbers = itertools.count()


def step_until_finished(engine: LLMEngine, request_ids: Sequence[str]) -> Generator[RequestOutput, None, None]:
    """Steps the engine until it has no unfinished request; yields the outputs of every step.

    Aborts the requests if the caller leaves the loop early, by an exception or Ctrl-C too: the engine is idle then.

    Args:
        request_ids: The requests to abort. They have been added to the engine.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; raised between two steps.
        EngineDeadError: The engine failed as a whole.
    """
    try:
        with interrupts_between_steps(engine.wake) as raise_pending_interrupt:
            while engine.has_unfinished_requests():
                raise_pending_interrupt()
                yield from engine.step()
    except BaseException:  # GeneratorExit, too: the caller has left the loop
        engine.abort_request(request_ids)
        raise


def stream_request(
    engine: LLMEngine, prompt: PromptType, params: SamplingParams
) -> Generator[RequestOutput, None, None]:
    """Generates from one prompt and yields what is new after each step. Leaving the loop early aborts the request.

    Raises:
        RequestError: The prompt or a parameter is invalid.
    """
    request_id = f"stream-{next(_stream_numbers)}"
    engine.add_request(request_id, prompt, msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA))
    yield from step_until_finished(engine, [request_id])


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
