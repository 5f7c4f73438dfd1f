"""Shared parts of the commands that generate text in a terminal: engine start, streamed output, speed."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mvllm.config.model import ModelConfig
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.llm_engine import LLMEngine
from mvllm.engine.tokenizer.tokenizer import load_tokenizer
from mvllm.entrypoints.chat_template import NO_CHAT_TEMPLATE, check_chat_template, read_chat_template
from mvllm.entrypoints.cli.arguments import engine_args, sampling_params
from mvllm.entrypoints.llm import LLM
from mvllm.entrypoints.step_loop import stream_request
from mvllm.entrypoints.thinking_defaults import with_thinking_tags
from mvllm.errors import ModelError
from mvllm.logging import configure_logging
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams
from mvllm.progress import show_status


@contextlib.contextmanager
def open_llm(
    args: argparse.Namespace, check_model: Callable[[ModelConfig], None] = lambda model: None
) -> Iterator[tuple[LLM, SamplingParams]]:
    """The model and the sampling parameters that a command line asks for. The engine ends with the context.

    Args:
        check_model: Raises a MvllmError if the model is not for the command. Called before it is loaded.

    Raises:
        MvllmError: An option is invalid, or the model cannot be loaded.
    """
    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # rejects invalid values before the model is loaded
    configure_logging()
    config = requested_config(settings)
    check_model(config.model)
    with show_status(f"Loading {settings.model}"):
        llm = LLM._from_config(config)
    with llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        yield llm, with_thinking_tags(params, llm.llm_engine.config.model)


def require_chat_template(model: ModelConfig, given: str | None = None) -> None:
    """Checks that a model has a chat template, and that it works. Loads its tokenizer only if no file has one.

    Args:
        given: The template of `--chat-template`, which replaces the model's.

    Raises:
        ModelError: It has none or one that cannot work, or no tokenizer.
    """
    folder = Path(str(model.tokenizer))
    if given is not None or read_chat_template(folder) is not None:
        check_chat_template(folder, given, render=True)
        return
    tokenizer = load_tokenizer(model)
    if tokenizer is None or getattr(tokenizer.template_renderer, "chat_template", None) is None:
        raise ModelError(
            f"{NO_CHAT_TEMPLATE} Give one with --chat-template, or continue a text with `mvllm complete` or "
            "`mvllm generate`."
        )


class ThroughputCounter:
    """Counts output tokens and the seconds of their generation."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0

    def summary(self, where: str) -> str:
        """`64 output tokens in 0.52 s, 123.1 output tokens/s, ` and `where`."""
        rate = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
        return f"{self.num_tokens} output tokens in {self.seconds:.2f} s, {rate:,.1f} output tokens/s, {where}"


def print_stream(
    engine: LLMEngine, prompt: PromptType, params: SamplingParams, speed: ThroughputCounter
) -> tuple[str, str | None]:
    """Generates from a prompt and prints the text as it is generated.

    Returns:
        The generated text, and the request's error or None.
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


def print_error(error: str) -> None:
    """Prints an error of a request on stderr."""
    print(f"error: {error}", file=sys.stderr)
