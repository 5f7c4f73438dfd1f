"""`mvllm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mvllm.entrypoints.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_args,
    require_model,
    sampling_params,
)
from mvllm.entrypoints.cli.remote import add_url_arguments
from mvllm.errors import ConfigError, RequestError
from mvllm.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mvllm.engine.llm_engine import LLMEngine
    from mvllm.entrypoints.cli.terminal import ThroughputCounter

_HELP = "/reset forgets the conversation, /stats shows the speed, /bye ends. Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--system", metavar="TEXT", help="A system message, put before the conversation.")
    parser.add_argument("--chat-template", metavar="TEXT", help="A Jinja template, or a file that holds one.")
    add_url_arguments(parser)
    add_sampling_arguments(parser, max_tokens=None)
    add_engine_arguments(parser, model_required=False, own_seed=True)


def run(args: argparse.Namespace) -> int:
    """Answers each line of input, remembering the conversation."""
    from mvllm.entrypoints.cli.remote import RemoteModel

    if args.url is not None:
        if args.chat_template is not None:
            raise ConfigError("--chat-template is for an engine in this process; with --url, the server has its own.")
        remote = RemoteModel(args)
        return _run_conversation(ChatSession(remote.print_chat, system=args.system), remote.summary)

    from mvllm.entrypoints.llm import LLM

    require_model(args)
    settings = engine_args(args)
    sampling_params(args, SamplingParams())  # refuses before the model is loaded what would be refused after
    template = _read_template(args.chat_template)
    with LLM.from_engine_args(settings) as llm:
        params = sampling_params(args, llm.get_default_sampling_params())
        say = _make_printer(llm.llm_engine, params, template)
        return _run_conversation(ChatSession(say, system=args.system), f"platform {llm.llm_engine.platform_summary}")


def _run_conversation(conversation: ChatSession, where: str) -> int:
    """Goes through the lines of input until one ends the conversation."""
    from mvllm.entrypoints.cli.terminal import ThroughputCounter, read_lines

    speed = ThroughputCounter()
    if sys.stdin.isatty():
        print(f"Running on {where}.\n{_HELP}")
    for line in read_lines("> "):
        match line.strip():
            case "":
                pass
            case "/bye" | "/exit" | "/quit":
                break
            case "/reset":
                conversation.reset()
            case "/stats":
                print(speed.summary(where))
            case "/help":
                print(_HELP)
            case _:
                _answer(conversation, line, speed)
    return 0


Messages = list[dict[str, Any]]
MessagePrinter = Callable[[Messages, "ThroughputCounter"], tuple[str, str | None]]
"""Prints the next message as it comes; returns it, and the error that ended it, if one did."""


def _make_printer(engine: LLMEngine, params: SamplingParams, template: str | None) -> MessagePrinter:
    """Has an engine in this process speak, with a chat template in place of the tokenizer's own if there is one."""
    from mvllm.entrypoints.chat_template import render_chat
    from mvllm.entrypoints.cli.terminal import print_stream

    def say(messages: Messages, speed: ThroughputCounter) -> tuple[str, str | None]:
        rendered = render_chat(engine.tokenizer, messages, chat_template=template)
        engine.input_processor.check_text(rendered)
        ids = engine.tokenizer.encode(rendered, add_special_tokens=False)
        return print_stream(engine, {"prompt_token_ids": ids}, params, speed)

    return say


class ChatSession:
    """What has been said so far.

    Args:
        speaker: Who answers.
        system: Text of the system message, if there is one.
    """

    def __init__(self, speaker: MessagePrinter, *, system: str | None) -> None:
        self._make_printer = speaker
        self._system_messages: Messages = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system_messages)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages = list(self._system_messages)

    def respond(self, text: str, speed: ThroughputCounter) -> None:
        """Prints the answer to `text` as it comes. What was printed is remembered, also where the answer was stopped.

        Raises:
            RequestError: The conversation is not acceptable, for instance too long; it is as before.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        answer, error = self._make_printer(messages, speed)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if error:
            raise RequestError(error)


def _answer(conversation: ChatSession, line: str, speed: ThroughputCounter) -> None:
    try:
        conversation.respond(line, speed)
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
