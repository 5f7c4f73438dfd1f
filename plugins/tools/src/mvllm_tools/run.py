"""`mvllm run`: a conversation with a model, or the answer to one message."""

from __future__ import annotations

import argparse

from mvllm_tools import chat

LOG_LEVEL = chat.LOG_LEVEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command: those of `mvllm chat`."""
    chat.add_arguments(parser)
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="A message to answer, directly after MODEL; without it, a conversation begins.",
    )


def run(args: argparse.Namespace) -> int:
    """Answers the message of the command line, or each line of input."""
    return chat.run(args, " ".join(args.prompt) if args.prompt else None)
