"""Renders chat templates in child processes with limits. The process itself is chat_template_process.py.

first process     conversations that are not long, so that none of them waits for a long one
second process    long conversations, and others when it has nothing to do; starts with the first long one
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mvllm.entrypoints.chat_template import SHORT_CONVERSATION, unusable_template
from mvllm.entrypoints.openai.common.chat_template_process import ChatTemplateJob, RenderedChat
from mvllm.errors import RequestError
from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError

SECONDS = 5.0
"""Processor time to render one conversation."""
WALL_SECONDS = 60.0
"""Wall time after which a conversation fails, even if the process got no processor time."""
LONG_BYTES = 256 << 10
"""A conversation of more bytes, as JSON, is a long one."""


class ChatTemplateRenderer:
    """Renders conversations, one at a time in each process, and restarts a process after it was killed.

    Args:
        seconds: Processor time to render one conversation.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._first, self._second = _TemplateProcess(), _TemplateProcess()

    def start(self) -> None:
        """Starts the first process in the background, so that the first conversation does not wait for it."""
        self._first.thread.submit(self._first.process.start)

    async def render(
        self,
        messages: Sequence[Any],
        settings: Mapping[str, Any],
        special_tokens: Mapping[str, Any],
        max_bytes: int | None = None,
    ) -> str:
        """The prompt of a conversation, as text.

        Args:
            settings: Keyword arguments of `render_chat`, with `chat_template`.
            special_tokens: Special tokens by the names that templates use.
            max_bytes: Most bytes of the conversation and the settings as JSON; None for any number.

        Raises:
            RequestError: The conversation is not acceptable, or the template failed, or took too much time or memory.
        """
        conversation = msgspec.json.encode([list(messages), dict(settings)])
        if max_bytes is not None and len(conversation) > max_bytes:
            raise RequestError(
                f"The conversation and its tools have {len(conversation)} bytes as JSON; with this model they may have "
                f"{max_bytes}, many times as much as fits into its context (max_model_len). Shorten the conversation.",
                parameter="messages",
            )
        job = ChatTemplateJob(self._seconds, dict(special_tokens), conversation)
        process = self._process_for(len(conversation))
        process.num_jobs += 1
        loop = asyncio.get_running_loop()

        def ended(unused: object) -> None:  # which may be long after this call was cancelled
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(process.job_done)

        answering = process.thread.submit(self._run_job, process, job)
        answering.add_done_callback(ended)
        answer = await asyncio.wrap_future(answering)
        if answer.text is None:
            raise RequestError(answer.error or "The chat template failed.", parameter=answer.parameter)
        return answer.text

    async def check(self, template: str, special_tokens: Mapping[str, Any], source: str) -> None:
        """Renders a short conversation, so that a template that exceeds the limits is found before the first request.

        Other errors are ignored: the template may require other messages.

        Args:
            source: Origin of the template, for the error message.

        Raises:
            ModelError: The template took too much time or memory, has a syntax error, or calls a function that does not
                exist.
        """
        try:
            await self.render(SHORT_CONVERSATION, {"chat_template": template}, special_tokens)
        except RequestError as e:
            if e.parameter == "chat_template":
                raise unusable_template(e, source) from e

    @property
    def pid(self) -> int | None:
        """The id of the first process; None if it does not run."""
        return self._first.process.pid

    def close(self) -> None:
        """Kills the processes for good. Idempotent."""
        for each in (self._first, self._second):
            each.thread.shutdown(wait=False, cancel_futures=True)
            each.process.close()

    def _process_for(self, num_bytes: int) -> _TemplateProcess:
        if num_bytes > LONG_BYTES:
            return self._second
        is_helpful = self._first.num_jobs and not self._second.num_jobs and self._second.has_answered
        return self._second if is_helpful else self._first

    def _run_job(self, process: _TemplateProcess, job: ChatTemplateJob) -> RenderedChat:
        try:
            answer = process.process.run(job, RenderedChat, WALL_SECONDS)
            process.has_answered = True
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
            process.process.kill()
        return answer

    def _over_limit(self, what: str) -> RenderedChat:
        limit = f"longer than {self._seconds:g} s" if what == "time" else "too much memory"
        return RenderedChat(error=f"The chat template took {limit}.", parameter="chat_template")


class _TemplateProcess:
    """A process, and the thread that waits for it.

    Attributes:
        num_jobs: Jobs that have not ended.
        has_answered: Whether it has ended one: the first one waits for the imports of the process.
    """

    def __init__(self) -> None:
        self.process = PipeProcess("mvllm.entrypoints.openai.common.chat_template_process")
        # The process dies with the thread that started it.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self.num_jobs = 0
        self.has_answered = False

    def job_done(self) -> None:
        """One job less: it has ended, or was cancelled before it began."""
        self.num_jobs -= 1
