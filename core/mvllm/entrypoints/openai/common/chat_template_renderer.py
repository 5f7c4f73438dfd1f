"""Renders chat templates in a child process with limits. The process itself is chat_template_process.py."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mvllm.entrypoints.openai.common.chat_template_process import ChatTemplateJob, RenderedChat
from mvllm.errors import ModelError, RequestError
from mvllm.executor.process.pipe_process import (
    find_exceeded_limit,
    kill_pipe_process,
    receive_message,
    start_pipe_process,
    write_message,
)

SECONDS = 5.0
"""Processor time to render one conversation."""
WALL_SECONDS = 60.0
"""Wall time after which a conversation fails, even if the process got no processor time."""

_ATTEMPTS = 2
_SHORT_CONVERSATION = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What can I do for you?"},
    {"role": "user", "content": "Name a color."},
)


class ChatTemplateLimitError(RequestError):
    """A template took more time or memory than allowed."""


class ChatTemplateRenderer:
    """Renders one conversation at a time, and restarts the process after it was killed.

    Args:
        seconds: Processor time to render one conversation.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the process together with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Starts the process in the background, so that the first conversation does not wait for it."""
        self._thread.submit(self._running_process)

    async def render(
        self, messages: Sequence[Any], settings: Mapping[str, Any], special_tokens: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation, as text.

        Args:
            settings: Keyword arguments of `render_chat`, with `chat_template`.
            special_tokens: Special tokens by the names that templates use.

        Raises:
            ChatTemplateLimitError: The template took too much time or memory.
            RequestError: The conversation is not acceptable, or the template failed.
        """
        conversation = msgspec.json.encode([list(messages), dict(settings)])
        job = ChatTemplateJob(self._seconds, dict(special_tokens), conversation)
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._run_job, job)
        if answer.text is None:
            kind = ChatTemplateLimitError if answer.over_limit else RequestError
            raise kind(answer.error or "The chat template failed.", parameter=answer.parameter)
        return answer.text

    async def check(self, template: str, special_tokens: Mapping[str, Any], source: str) -> None:
        """Renders a short conversation, so that a template that exceeds the limits is found before the first request.

        An error that the template raises itself is ignored: the template may require other messages.

        Args:
            source: Origin of the template, for the error message.

        Raises:
            ModelError: The template took too much time or memory.
        """
        try:
            await self.render(_SHORT_CONVERSATION, {"chat_template": template}, special_tokens)
        except ChatTemplateLimitError as e:
            raise ModelError(
                f"The chat template ({source}) cannot be used, since it fails with three short messages: {e} "
                "Check the origin of the model, or pass another template with --chat-template."
            ) from e
        except RequestError:
            pass

    @property
    def pid(self) -> int | None:
        """The process id; None if no process runs."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """Kills the process for good. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._kill_process()

    def _run_job(self, job: ChatTemplateJob) -> RenderedChat:
        for _ in range(_ATTEMPTS):
            process = self._running_process()
            if process is None:
                return RenderedChat(error="The server is shutting down.")
            assert process.stdin is not None and process.stdout is not None
            try:
                write_message(process.stdin, job)
                answer = receive_message(process.stdout, RenderedChat, WALL_SECONDS)
            except (EOFError, OSError) as e:  # TimeoutError is an OSError
                error = "time" if isinstance(e, TimeoutError) else find_exceeded_limit(process, WALL_SECONDS)
                self._kill_process()
                if error is not None:
                    return self._over_limit(error)
            else:
                if answer.is_last:
                    self._kill_process()
                return answer
        return RenderedChat(error="The process that renders chat templates was killed twice; try again.")

    def _over_limit(self, what: str) -> RenderedChat:
        limit = f"longer than {self._seconds:g} s" if what == "time" else "too much memory"
        return RenderedChat(error=f"The chat template took {limit}.", parameter="chat_template", over_limit=True)

    def _running_process(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None or self._process.poll() is not None:
                self._process = start_pipe_process("mvllm.entrypoints.openai.common.chat_template_process")
            return self._process

    def _kill_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            kill_pipe_process(process)
