"""`mvllm generate`: prompts on the command line, texts on the screen."""

from __future__ import annotations

import argparse
import sys
import time

from mvllm.entrypoints.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_args, sampling_params
from mvllm.messages.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="The prompt; may be given several times. Default: read stdin."
    )
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS, several=True)
    add_engine_arguments(parser, own_seed=True)


def run(args: argparse.Namespace) -> int:
    """Prints what the model makes of each prompt, and at the end how fast it was and on which platform."""
    from mvllm.engine.frontend.outputs import RequestOutput
    from mvllm.entrypoints.cli.terminal import ThroughputCounter, describe_end, print_stream
    from mvllm.entrypoints.llm import LLM

    prompts: list[str] = args.prompt or [_read_stdin()]
    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # refuses before the model is loaded what would be refused after
    with LLM.from_engine_args(settings) as llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        speed = ThroughputCounter()
        failed = False
        if streamed := len(prompts) == 1 and params.n == 1:
            print(prompts[0], end="", flush=True)
            _, error = print_stream(llm.llm_engine, prompts[0], params, speed)
            failed = error is not None
            if error:
                print(f"error: {error}", file=sys.stderr)
        else:
            start = time.perf_counter()
            outputs: list[RequestOutput] = llm.generate(prompts, params)
            speed.seconds = time.perf_counter() - start
            for output in outputs:
                for sequence in output.outputs:
                    speed.num_tokens += len(sequence.token_ids)
                    failed = failed or sequence.error is not None
                    print(f"{output.prompt}{sequence.text}{describe_end(sequence)}\n")
        print(("\n" if streamed else "") + speed.summary(f"platform {llm.llm_engine.platform_summary}"))
    return 1 if failed else 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D:", file=sys.stderr)
    return sys.stdin.read().rstrip("\n")
