"""`mvllm complete`: the model goes on with what is typed, without any chat template."""

from __future__ import annotations

import argparse
import sys

from mvllm.entrypoints.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_args, sampling_params
from mvllm.errors import RequestError
from mvllm.messages.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--prompt", metavar="TEXT", help="Continue this and exit. Default: ask for prompts.")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Continues one prompt, or each line of input."""
    from mvllm.entrypoints.cli.terminal import Speedometer, print_stream, read_lines
    from mvllm.entrypoints.llm import LLM

    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # refuses before the model is loaded what would be refused after
    with LLM.from_engine_args(settings) as llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        speed = Speedometer()
        if args.prompt is not None:
            _, error = print_stream(llm.llm_engine, args.prompt, params, speed)
            if error:
                print(f"error: {error}", file=sys.stderr)
            return 1 if error else 0
        if sys.stdin.isatty():
            print(f"Running on platform {llm.llm_engine.platform_summary}. Type text to continue; /exit ends.")
        for line in read_lines("> "):
            if line.strip() in ("/exit", "/quit"):
                break
            try:
                print_stream(llm.llm_engine, line, params, speed)
            except RequestError as e:
                print(f"error: {e}", file=sys.stderr)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                print(" [stopped]")
    return 0
