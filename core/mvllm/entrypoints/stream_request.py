"""One request, answered piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.entrypoints.interrupts import interrupts_between_steps
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_serial = itertools.count()


def stream_request(engine: LLMEngine, prompt: PromptType, params: SamplingParams) -> Iterator[RequestOutput]:
    """Generates from one prompt and yields what is new after each step.

    Leaving the loop early, by Ctrl-C too, aborts the request and leaves the engine ready for the next.

    Raises:
        RequestError: The request is not acceptable.
    """
    request_id = f"stream-{next(_serial)}"
    engine.add_request(request_id, prompt, msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA))
    try:
        with interrupts_between_steps(engine.wake) as check:
            while engine.has_unfinished_requests():
                check()
                yield from engine.step()
    finally:
        engine.abort_request(request_id)
