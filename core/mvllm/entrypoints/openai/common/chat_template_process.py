"""Renders conversations with chat templates, in a process that may be killed: `python -m ... <parent pid>`.

The idea: a template is somebody's program, and the sandbox of its language bounds neither time nor memory: one power of
two numbers, or one loop in another, holds up every thread of a process for minutes. So templates run here, under
limits that the kernel enforces.

    stdin   TemplateJobs, see pipe_messages        stdout  a Rendered for each

The process ends with its parent, when stdin does, or after a job that took too much memory.
"""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from mvllm.entrypoints.chat_template import render_chat
from mvllm.errors import RequestError
from mvllm.executor.process.pipe_process import read_message, write_message
from mvllm.executor.process.process_utils import die_with_parent, limit_memory, limit_processor_time, set_process_name

MEMORY_BYTES = 512 << 20
"""Address space beyond what the process has when it is ready."""
MAX_RENDERED = 16 << 20
"""Longest text that a template may write beside the conversation's own, in characters."""
_COPIES = 2  # of a conversation that a template may write
_LONGEST_ERROR = 1000


class ChatTemplateJob(msgspec.Struct):
    """One conversation to render.

    Attributes:
        seconds: Processor time that it may take.
        special_tokens: The tokenizer's, which templates know by name.
        conversation: JSON of two values: the messages, and the settings of `render_chat`, `chat_template` included.
            They were JSON before, and may have integers for which msgpack has no form.
    """

    seconds: float
    special_tokens: dict[str, Any]
    conversation: bytes


class RenderedChat(msgspec.Struct):
    """The text, or why there is none.

    Attributes:
        parameter: The field of the request that is at fault.
        over_limit: Whether the template took too much memory or wrote too much.
        is_last: Whether the process ends, since what it has taken may not be given back.
    """

    text: str | None = None
    error: str | None = None
    parameter: str | None = None
    over_limit: bool = False
    is_last: bool = False


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("ChatTemplate")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_memory(MEMORY_BYTES)
    try:
        while True:
            job = read_message(sys.stdin.buffer, ChatTemplateJob)
            limit_processor_time(job.seconds)
            answer = render(job, render_jinja_template)
            write_message(sys.stdout.buffer, answer)
            if answer.is_last:
                break
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


def render(job: ChatTemplateJob, render_jinja_template: Any) -> RenderedChat:
    """Does one job; `render_jinja_template` is the function that transformers has."""

    def apply(conversation: list[dict[str, Any]], *, tokenize: bool, **settings: Any) -> str:
        chat = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        texts, _ = render_jinja_template(conversations=[chat], **{**job.special_tokens, **settings})
        return str(texts[0])

    tokenizer: Any = SimpleNamespace(hf=SimpleNamespace(chat_template=None, apply_chat_template=apply))
    try:
        messages, settings = msgspec.json.decode(job.conversation)
        text = render_chat(cast(Any, tokenizer), messages, **settings)
    except (RequestError, MemoryError) as e:
        if isinstance(e, MemoryError) or isinstance(e.__cause__, MemoryError):
            error = f"The chat template takes more memory than the {MEMORY_BYTES >> 20} MB allowed."
            return RenderedChat(error=error, parameter="chat_template", over_limit=True, is_last=True)
        error = str(e)[:_LONGEST_ERROR].encode("utf-8", "replace").decode()
        return RenderedChat(error=error, parameter=e.parameter)
    most = MAX_RENDERED + _COPIES * len(job.conversation)
    if len(text) > most:
        error = f"The chat template wrote {len(text)} characters; {most} are allowed."
        return RenderedChat(error=error, parameter="chat_template", over_limit=True)
    try:
        text.encode()
    except UnicodeEncodeError:
        return RenderedChat(error="The chat template wrote text that is not valid Unicode.", parameter="chat_template")
    return RenderedChat(text)


if __name__ == "__main__":
    main()
