"""`mvllm complete`: continues typed text without a chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from mvllm.extension_api.cli import add_engine_arguments, add_sampling_arguments, require_model
from mvllm_tools.remote_model import RemoteModel, add_url_arguments

DEFAULT_MAX_TOKENS = 128
LOG_LEVEL = "WARNING"
"""Text is not interleaved with the log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--prompt", metavar="TEXT", help="Continue this and exit. Default: ask for prompts.")
    add_url_arguments(parser)
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_arguments(parser, model_required=False, own_seed=True)


def run(args: argparse.Namespace) -> int:
    """Continues the prompt of the command line, or each line of input."""
    from mvllm.extension_api.terminal import ThroughputCounter, open_llm, print_stream

    speed = ThroughputCounter()
    if args.url is not None:
        remote = RemoteModel(args)
        return _complete_all(args, lambda prompt: remote.print_completion(prompt, speed)[1], remote.summary)
    require_model(args)
    with open_llm(args) as (llm, params):
        engine = llm.llm_engine
        where = f"platform {engine.platform_summary}"
        return _complete_all(args, lambda prompt: print_stream(engine, prompt, params, speed)[1], where)


def _complete_all(args: argparse.Namespace, complete: Callable[[str], str | None], where: str) -> int:
    """Continues each prompt; returns the exit status.

    Args:
        complete: Prints the continuation of a prompt; returns the error that ended it, or None.
        where: The model's place, for the greeting.
    """
    from mvllm.extension_api.terminal import print_error
    from mvllm_tools.input_lines import answer_lines

    if args.prompt is not None:
        error = complete(args.prompt)
        if error:
            print_error(error)
        return 1 if error else 0
    if sys.stdin.isatty():
        print(f"Running on {where}.\nType text to continue. /exit leaves, Ctrl-C stops a continuation.")
    answer_lines(complete)
    return 0
