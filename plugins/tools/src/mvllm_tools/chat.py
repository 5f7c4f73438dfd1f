"""`mvllm chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import base64
import mimetypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.extension_api import ConfigError, SamplingParams
from mvllm.extension_api.cli import (
    add_chat_template_argument,
    add_engine_arguments,
    add_sampling_arguments,
    load_chat_template,
    plain_reason,
    require_model,
)
from mvllm_tools.remote_model import RemoteModel, add_url_arguments

if TYPE_CHECKING:
    from mvllm.extension_api.engine import LLMEngine
    from mvllm.extension_api.terminal import ThroughputCounter
    from mvllm_tools.input_lines import Command

LOG_LEVEL = "WARNING"
"""A conversation is not interleaved with the log."""
QUESTION = "What is in the picture?"
"""The first message of a conversation that begins with pictures."""

Messages = list[dict[str, Any]]
MessagePrinter = Callable[[Messages, "ThroughputCounter"], tuple[str, str | None]]
"""Prints the assistant's next message while it is generated; returns its text, and the error that ended it or None."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--system", metavar="TEXT", help="A system message, put before the conversation.")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="A picture for the first message, for models that take pictures; may be repeated. The conversation begins "
        f"with the question {QUESTION!r}.",
    )
    add_chat_template_argument(parser)
    add_url_arguments(parser)
    add_sampling_arguments(parser, max_tokens=None)
    add_engine_arguments(parser, model_required=False, own_seed=True)


def run(args: argparse.Namespace, message: str | None = None) -> int:
    """Answers each line of input as the next message of one conversation.

    Args:
        message: Answer this message only, and read no input.
    """
    images = [image_url(Path(file)) for file in args.image]
    if args.url is not None:
        if args.chat_template is not None:
            raise ConfigError("--chat-template is for an engine in this process; leave it out with --url.")
        remote = RemoteModel(args)
        session = ChatSession(remote.print_chat, system=args.system, images=images)
        return _run_conversation(session, remote.summary, message)

    from mvllm.extension_api.terminal import open_llm, require_chat_template

    require_model(args)
    template = load_chat_template(args.chat_template)
    with open_llm(args, lambda model: require_chat_template(model, template)) as (llm, params):
        session = ChatSession(_message_printer(llm.llm_engine, params, template), system=args.system, images=images)
        return _run_conversation(session, f"platform {llm.llm_engine.platform_summary}", message)


def _run_conversation(session: ChatSession, where: str, message: str | None) -> int:
    """Answers one message, or lines of input until the input or a command ends the conversation."""
    from mvllm.extension_api.terminal import ThroughputCounter, print_error
    from mvllm_tools.input_lines import answer_lines, run_request, stopped_by_ctrl_c

    speed = ThroughputCounter()
    if message is not None:
        if error := session.respond(message, speed):
            print_error(error)
        return 1 if error else 0
    if sys.stdin.isatty():
        print(f"Running on {where}.\n/help lists the commands, /exit leaves, Ctrl-C stops an answer.")
    if session.images:
        print(f"> {QUESTION}")
        with stopped_by_ctrl_c():
            run_request(lambda text: session.respond(text, speed), QUESTION)
    answer_lines(lambda text: session.respond(text, speed), _commands(session, speed, where))
    return 0


def _commands(session: ChatSession, speed: ThroughputCounter, where: str) -> list[Command]:
    """The commands of a conversation."""
    from mvllm_tools.input_lines import Command

    def show_speed(text: str) -> None:
        print(speed.summary(where))

    return [
        Command(("/image",), "add a picture to the next message", session.add_image, "FILE"),
        Command(("/system",), "set the system message; without TEXT, remove it", session.set_system, "TEXT"),
        Command(("/retry",), "answer the last message again", lambda text: session.retry(speed)),
        Command(("/clear", "/reset"), "forget the conversation", session.reset),
        Command(("/stats",), "show the speed", show_speed),
    ]


def _message_printer(engine: LLMEngine, params: SamplingParams, template: str | None) -> MessagePrinter:
    """A printer that generates messages with an engine in this process.

    Args:
        template: A chat template in place of the tokenizer's; None for the tokenizer's.
    """
    from mvllm.extension_api.terminal import chat_prompt, print_stream

    def print_message(messages: Messages, speed: ThroughputCounter) -> tuple[str, str | None]:
        prompt = chat_prompt(
            engine.config, engine.tokenizer, messages, item_client=engine.item_client, chat_template=template
        )
        return print_stream(engine, prompt, params, speed)

    return print_message


def image_url(file: Path) -> str:
    """The data URL of a picture. Its contents are checked where it is decoded.

    Raises:
        ConfigError: The file cannot be read.
    """
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        data = file.expanduser().read_bytes()
    except OSError as e:
        raise ConfigError(f"The picture {str(file)!r} cannot be read: {plain_reason(e)}.") from e
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class ChatSession:
    """The messages of a conversation.

    Args:
        print_message: Generates and prints the assistant's messages.
        system: Text of the system message, if there is one.
        images: Pictures of the first message.

    Attributes:
        images: Pictures of the next message, as data URLs.
    """

    def __init__(self, print_message: MessagePrinter, *, system: str | None, images: Sequence[str] = ()) -> None:
        self._print_message = print_message
        self.images = list(images)
        self._system_messages: Messages = []
        self._messages: Messages = []
        self._last_message: dict[str, Any] | None = None
        self._messages_before: Messages = []
        self.set_system(system or "")

    def reset(self, text: str = "") -> None:
        """Drops all messages but the system message, and pictures that were not sent."""
        self.images.clear()
        self._messages, self._last_message = [], None

    def set_system(self, text: str) -> None:
        """Replaces the system message; an empty text removes it. Other messages stay."""
        self._system_messages = [{"role": "system", "content": text}] if text else []

    def add_image(self, name: str) -> str | None:
        """Adds a picture to the next message. Returns what is wrong with the file, or None."""
        if not name.strip():
            return "Name a file: /image FILE"
        try:
            self.images.append(image_url(Path(name.strip())))
        except ConfigError as e:
            return str(e)
        return None

    def respond(self, text: str, speed: ThroughputCounter) -> str | None:
        """Prints the answer to `text` and adds both to the conversation.

        Returns:
            The error that ended the answer, or None.

        Raises:
            RequestError: The request is invalid, for instance too long. The conversation is unchanged.
            KeyboardInterrupt: The user has stopped the answer. The conversation is unchanged.
        """
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images.clear()
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        self._messages_before, self._last_message = self._messages, {"role": "user", "content": content}
        return self._answer(speed)

    def retry(self, speed: ThroughputCounter) -> str | None:
        """Answers the last message again, whose answer is dropped. Returns and raises as `respond`."""
        if self._last_message is None:
            return "There is no message to answer again."
        return self._answer(speed)

    def _answer(self, speed: ThroughputCounter) -> str | None:
        assert self._last_message is not None
        messages = [*self._messages_before, self._last_message]
        answer, error = self._print_message([*self._system_messages, *messages], speed)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return error
