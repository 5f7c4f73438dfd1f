"""Renders a conversation with a template that came with a request: `python -m ... <parent pid>`.

The idea: such a template is somebody's program, and the sandbox of its language bounds neither time nor memory: one
power of two numbers holds up every thread of a process for minutes. So it runs in a process of its own, under limits
that the kernel enforces, which ends with its one job.

    stdin   TemplateJob, as JSON        stdout  READY when the time of the job begins, then Rendered, as JSON
"""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil  # type: ignore[import-untyped]

from mvllm.entrypoints.chat_template import render_chat
from mvllm.errors import RequestError
from mvllm.executor.process_tools import die_with_parent, set_process_name

READY = b"ready\n"
MEMORY_BYTES = 512 << 20
"""Address space beyond what the process has when it is ready."""
MAX_RENDERED = 16 << 20
"""Longest text that a template may write, in characters."""


class TemplateJob(msgspec.Struct):
    """One conversation to render.

    Attributes:
        seconds: Processor time that it may take.
        special_tokens: The tokenizer's, which templates know by name.
        settings: Of `render_chat`.
    """

    seconds: int
    special_tokens: dict[str, Any]
    messages: list[Any]
    settings: dict[str, Any]


class Rendered(msgspec.Struct):
    """The text, or why there is none, and the field of the request that is at fault."""

    text: str | None = None
    error: str | None = None
    parameter: str | None = None


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("ChatTemplate")
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(conversation: list[dict[str, Any]], *, tokenize: bool, **settings: Any) -> str:
        chat = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        texts, _ = render_jinja_template(conversations=[chat], **{**job.special_tokens, **settings})
        return str(texts[0])

    job = msgspec.json.decode(sys.stdin.buffer.read(), type=TemplateJob)
    _limit(job.seconds)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    tokenizer: Any = SimpleNamespace(hf=SimpleNamespace(chat_template=None, apply_chat_template=apply))
    try:
        text = render_chat(cast(Any, tokenizer), job.messages, **job.settings)
        answer = Rendered(text)
        if len(text) > MAX_RENDERED:
            answer = Rendered(error=f"The chat template wrote {len(text)} characters.", parameter="chat_template")
    except RequestError as e:
        answer = Rendered(error=str(e)[:1000], parameter=e.parameter)
    except MemoryError:
        answer = Rendered(error="The chat template takes too much memory.", parameter="chat_template")
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.buffer.flush()
    os._exit(0)


def _limit(seconds: int) -> None:
    """Has the kernel enforce what the job may take."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    room = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()
