"""`mvllm generate`: generates text from prompts on the command line."""

from __future__ import annotations

import argparse
import sys
import time

from mvllm.entrypoints.cli.arguments import add_engine_arguments, add_sampling_arguments

DEFAULT_MAX_TOKENS = 128
LOG_LEVEL = "WARNING"
"""Texts are not interleaved with the log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="The prompt; may be given several times. Default: read stdin."
    )
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS, several=True)
    add_engine_arguments(parser, own_seed=True)


def run(args: argparse.Namespace) -> int:
    """Prints the generated text of each prompt, then on stderr the throughput and the platform."""
    from mvllm.entrypoints.cli.terminal import ThroughputCounter, open_llm, print_error, print_stream

    prompts: list[str] = args.prompt or [_read_stdin()]
    with open_llm(args) as (llm, params):
        speed = ThroughputCounter()
        failed = False
        if streamed := len(prompts) == 1 and params.n == 1:
            print(prompts[0], end="", flush=True)
            _, error = print_stream(llm.llm_engine, prompts[0], params, speed)
            failed = error is not None
            if error:
                print_error(error)
        else:
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, raise_on_error=False)
            speed.seconds = time.perf_counter() - start
            for output in outputs:
                for sequence in output.outputs:
                    speed.num_tokens += len(sequence.token_ids)
                    failed = failed or sequence.error is not None
                    error_note = f" [error: {sequence.error}]" if sequence.error else ""
                    print(f"{output.prompt}{sequence.text}{error_note}\n")
        summary = speed.summary(f"platform {llm.llm_engine.platform_summary}")
        sys.stdout.flush()
        print(("\n" if streamed else "") + summary, file=sys.stderr)
    return 1 if failed else 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D:", file=sys.stderr)
    return sys.stdin.read().rstrip("\n")
