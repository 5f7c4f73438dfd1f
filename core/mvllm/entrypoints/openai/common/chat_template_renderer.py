"""Renders chat templates in a child process with limits. The process itself is chat_template_process.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mvllm.entrypoints.openai.common.chat_template_process import ChatTemplateJob, RenderedChat
from mvllm.errors import ModelError, RequestError
from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError

SECONDS = 5.0
"""Processor time to render one conversation."""
WALL_SECONDS = 60.0
"""Wall time after which a conversation fails, even if the process got no processor time."""

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
        self._process = PipeProcess("mvllm.entrypoints.openai.common.chat_template_process")
        # The process dies with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    def start(self) -> None:
        """Starts the process in the background, so that the first conversation does not wait for it."""
        self._thread.submit(self._process.start)

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
        return self._process.pid

    def close(self) -> None:
        """Kills the process for good. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    def _run_job(self, job: ChatTemplateJob) -> RenderedChat:
        try:
            answer = self._process.run(job, RenderedChat, WALL_SECONDS)
        except PipeProcessError as e:
            match e.reason:
                case "closed":
                    return RenderedChat(error="The server is shutting down.")
                case "killed":
                    error = "The process that renders chat templates was killed twice; try again."
                    return RenderedChat(error=error)
                case reason:
                    return self._over_limit("memory" if reason == "memory" else "time")
        if answer.is_last:
            self._process.kill()
        return answer

    def _over_limit(self, what: str) -> RenderedChat:
        limit = f"longer than {self._seconds:g} s" if what == "time" else "too much memory"
        return RenderedChat(error=f"The chat template took {limit}.", parameter="chat_template", over_limit=True)
