"""`mvllm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mvllm.entrypoints.cli.arguments import add_engine_arguments, add_sampling_arguments, engine_args, sampling_params
from mvllm.errors import RequestError
from mvllm.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mvllm.engine.llm_engine import LLMEngine
    from mvllm.entrypoints.cli.terminal import Speedometer

_HELP = "/reset forgets the conversation, /stats shows the speed, /exit ends. Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--system", metavar="TEXT", help="A system message, put before the conversation.")
    parser.add_argument("--chat-template", metavar="TEXT", help="A Jinja template, or a file that holds one.")
    add_sampling_arguments(parser, max_tokens=None)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answers each line of input, remembering the conversation."""
    from mvllm.entrypoints.cli.terminal import Speedometer, read_lines
    from mvllm.entrypoints.llm import LLM

    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # refuses before the model is loaded what would be refused after
    template = _read_template(args.chat_template)
    with LLM.from_engine_args(settings) as llm:
        engine = llm.llm_engine
        params = sampling_params(args, llm.get_default_sampling_params())
        speed = Speedometer()
        conversation = Conversation(engine, params, system=args.system, template=template)
        if sys.stdin.isatty():
            print(f"Running on platform {engine.platform_summary}.\n{_HELP}")
        for line in read_lines("> "):
            match line.strip():
                case "":
                    pass
                case "/exit" | "/quit":
                    break
                case "/reset":
                    conversation.reset()
                case "/stats":
                    print(speed.summary(engine))
                case "/help":
                    print(_HELP)
                case _:
                    _answer(conversation, line, speed)
    return 0


class Conversation:
    """What has been said so far.

    Args:
        system: Text of the system message, if there is one.
        template: Chat template in place of the tokenizer's own.
    """

    def __init__(self, engine: LLMEngine, params: SamplingParams, *, system: str | None, template: str | None) -> None:
        self._engine = engine
        self._params = params
        self._template = template
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages = list(self._first)

    def say(self, text: str, speed: Speedometer) -> None:
        """Prints the answer to `text` as it comes. What was printed is remembered, also where the answer was stopped.

        Raises:
            RequestError: The conversation is not acceptable, for instance too long; it is as before.
        """
        from mvllm.entrypoints.chat_template import render_chat
        from mvllm.entrypoints.cli.terminal import print_stream

        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = render_chat(self._engine.tokenizer, messages, chat_template=self._template)
        self._engine.input_processor.check_text(rendered)
        ids = self._engine.tokenizer.encode(rendered, add_special_tokens=False)
        answer, error = print_stream(self._engine, {"prompt_token_ids": ids}, self._params, speed)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if error:
            raise RequestError(error)


def _answer(conversation: Conversation, line: str, speed: Speedometer) -> None:
    try:
        conversation.say(line, speed)
    except RequestError as e:
        print(f"error: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" [stopped]")


def _read_template(given: str | None) -> str | None:
    """The template itself, or the content of the file that was named."""
    from pathlib import Path

    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise RequestError(f"The chat template {given!r} cannot be read: {e}") from e
