"""The child process that renders chat templates: `python -m ... <parent pid>`.

A template is a program, and Jinja's sandbox limits neither its time nor its memory: one large power, or nested loops,
would block every thread of a process for minutes. So templates run here, under limits that the kernel enforces.

    stdin   ChatTemplateJobs, see pipe_process     stdout  a RenderedChat for each

The process ends with its parent, at the end of stdin, or after a job that took too much memory.
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
"""Address space that a job may add to the process."""
MAX_RENDERED = 16 << 20
"""Longest text that a template may write beside the conversation, in characters."""
_COPIES = 2  # of a conversation that a template may write
_MAX_ERROR_LENGTH = 1000


class ChatTemplateJob(msgspec.Struct):
    """One conversation to render.

    Attributes:
        seconds: Limit of processor time.
        special_tokens: Special tokens by the names that templates use.
        conversation: JSON of a list of the messages and the keyword arguments of `render_chat`. It is not msgpack,
            which cannot encode large integers.
    """

    seconds: float
    special_tokens: dict[str, Any]
    conversation: bytes


class RenderedChat(msgspec.Struct):
    """The result of a job: a text or an error.

    Attributes:
        parameter: The field of the request that caused the error.
        is_last: Whether the process ends after this job, because it may keep the memory.
    """

    text: str | None = None
    error: str | None = None
    parameter: str | None = None
    is_last: bool = False


def main() -> None:
    """Runs the process."""
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
    """Runs one job. `render_jinja_template` is transformers' function."""

    def apply(conversation: list[dict[str, Any]], *, tokenize: bool, **settings: Any) -> str:
        chat = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        texts, _ = render_jinja_template(conversations=[chat], **{**job.special_tokens, **settings})
        return str(texts[0])

    tokenizer: Any = SimpleNamespace(template_renderer=SimpleNamespace(chat_template=None, apply_chat_template=apply))
    try:
        messages, settings = msgspec.json.decode(job.conversation)
        text = render_chat(cast(Any, tokenizer), messages, **settings)
    except (RequestError, MemoryError) as e:
        if isinstance(e, MemoryError) or isinstance(e.__cause__, MemoryError):
            error = f"The chat template takes more memory than the {MEMORY_BYTES >> 20} MB allowed."
            return RenderedChat(error=error, parameter="chat_template", is_last=True)
        error = str(e)[:_MAX_ERROR_LENGTH].encode("utf-8", "replace").decode()
        return RenderedChat(error=error, parameter=e.parameter)
    max_length = MAX_RENDERED + _COPIES * len(job.conversation)
    if len(text) > max_length:
        error = f"The chat template wrote {len(text)} characters; {max_length} are allowed."
        return RenderedChat(error=error, parameter="chat_template")
    try:
        text.encode()
    except UnicodeEncodeError:
        return RenderedChat(error="The chat template wrote text that is not valid Unicode.", parameter="chat_template")
    return RenderedChat(text)


if __name__ == "__main__":
    main()
