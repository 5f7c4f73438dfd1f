"""For packages with a command that generates text in a terminal. Importing it loads the engine, but not torch."""

from __future__ import annotations

from mvllm.entrypoints.chat_prompt import chat_prompt as chat_prompt
from mvllm.entrypoints.cli.terminal import ThroughputCounter as ThroughputCounter
from mvllm.entrypoints.cli.terminal import open_llm as open_llm
from mvllm.entrypoints.cli.terminal import print_error as print_error
from mvllm.entrypoints.cli.terminal import print_stream as print_stream
from mvllm.entrypoints.cli.terminal import require_chat_template as require_chat_template

__all__ = [
    "ThroughputCounter",
    "chat_prompt",
    "open_llm",
    "print_error",
    "print_stream",
    "require_chat_template",
]
