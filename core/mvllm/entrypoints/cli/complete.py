"""`mvllm complete`: the model goes on with what is typed, without any chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from mvllm.entrypoints.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_args,
    require_model,
    sampling_params,
)
from mvllm.entrypoints.cli.remote import add_url_arguments
from mvllm.errors import RequestError
from mvllm.messages.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--prompt", metavar="TEXT", help="Continue this and exit. Default: ask for prompts.")
    add_url_arguments(parser)
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_arguments(parser, model_required=False, own_seed=True)


def run(args: argparse.Namespace) -> int:
    """Continues one prompt, or each line of input."""
    from mvllm.entrypoints.cli.remote import RemoteModel
    from mvllm.entrypoints.cli.terminal import ThroughputCounter, print_stream

    speed = ThroughputCounter()
    if args.url is not None:
        remote = RemoteModel(args)
        return _complete_all(args, lambda prompt: remote.print_completion(prompt, speed)[1], remote.summary)

    from mvllm.entrypoints.llm import LLM

    require_model(args)
    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # refuses before the model is loaded what would be refused after
    with LLM.from_engine_args(settings) as llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        engine = llm.llm_engine
        where = f"platform {engine.platform_summary}"
        return _complete_all(args, lambda prompt: print_stream(engine, prompt, params, speed)[1], where)


def _complete_all(args: argparse.Namespace, complete: Callable[[str], str | None], where: str) -> int:
    """Continues what is asked for with a function that prints, and returns the error that ended the text."""
    from mvllm.entrypoints.cli.terminal import read_lines

    if args.prompt is not None:
        error = complete(args.prompt)
        if error:
            print(f"error: {error}", file=sys.stderr)
        return 1 if error else 0
    if sys.stdin.isatty():
        print(f"Running on {where}. Type text to continue; /bye ends.")
    for line in read_lines("> "):
        if line.strip() in ("/bye", "/exit", "/quit"):
            break
        try:
            error = complete(line)
            if error:
                print(f"error: {error}", file=sys.stderr)
        except RequestError as e:
            print(f"error: {e}", file=sys.stderr)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(" [stopped]")
    return 0
