"""For packages that run an engine in their own process: prompts, sampling parameters, and the loop that runs them."""

from __future__ import annotations

from mvllm.engine.llm_engine import LLMEngine as LLMEngine
from mvllm.entrypoints.llm import LLM as LLM
from mvllm.entrypoints.step_loop import run_prompts as run_prompts
from mvllm.messages.inputs import PromptType as PromptType
from mvllm.messages.inputs import TokensPrompt as TokensPrompt
from mvllm.messages.sampling_params import RequestOutputKind as RequestOutputKind
from mvllm.messages.sampling_params import SamplingParams as SamplingParams

__all__ = [
    "LLM",
    "LLMEngine",
    "PromptType",
    "RequestOutputKind",
    "SamplingParams",
    "TokensPrompt",
    "run_prompts",
]
