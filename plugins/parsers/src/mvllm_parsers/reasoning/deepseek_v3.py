"""Reasoning of DeepSeek-V3.1 and later: the template opens it with `thinking` true, and closes it otherwise.

thinking: true     prompt ...<｜Assistant｜><think>       output  I add.</think>4
thinking: false    prompt ...<｜Assistant｜></think>      output  4
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ThinkTagParser


class DeepSeekV3ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, as the prompt says."""
