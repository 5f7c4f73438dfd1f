"""What the commands that generate text have in common: showing it as it comes, and the line about speed at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from mvllm.engine.frontend.outputs import CompletionOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.entrypoints.stream_request import stream_request
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams


class ThroughputCounter:
    """Counts output tokens and the time spent on them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0

    def summary(self, where: str) -> str:
        """`64 output tokens in 0.52 s, 123.1 tokens/s, ` and where."""
        rate = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
        return f"{self.num_tokens} output tokens in {self.seconds:.2f} s, {rate:,.1f} output tokens/s, {where}"


def print_stream(
    engine: LLMEngine, prompt: PromptType, params: SamplingParams, speed: ThroughputCounter
) -> tuple[str, str | None]:
    """Prints the answer to `prompt` as it comes.

    Returns:
        The text of the first sequence, and the error that ended it, if one did.
    """
    start = time.perf_counter()
    text, error = "", None
    try:
        for output in stream_request(engine, prompt, params):
            for sequence in output.outputs:
                speed.num_tokens += len(sequence.token_ids)
                error = error or sequence.error
                text += sequence.text
                print(sequence.text, end="", flush=True)
    finally:
        speed.seconds += time.perf_counter() - start
    print(flush=True)
    return text, error


def describe_end(sequence: CompletionOutput) -> str:
    """Why a sequence ended, where that is worth a word."""
    if sequence.error:
        return f" [error: {sequence.error}]"
    return ""


def read_lines(prompt: str) -> Iterator[str]:
    """Lines that the user types, or that come through a pipe, until the end of input. Ctrl-C is passed on."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)
    while True:
        try:
            line = input(prompt if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        yield line
