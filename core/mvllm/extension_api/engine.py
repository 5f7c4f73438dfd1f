"""For packages that run an engine, or add methods to engines: prompts, parameters and outputs."""

from __future__ import annotations

from mvllm.engine.async_llm import AsyncLLM as AsyncLLM
from mvllm.engine.frontend.length_advice import longer_sequences as longer_sequences
from mvllm.engine.frontend.outputs import CompletionOutput as CompletionOutput
from mvllm.engine.frontend.outputs import RequestMetrics as RequestMetrics
from mvllm.engine.frontend.outputs import failure_of as failure_of
from mvllm.engine.frontend.parallel_sampling import child_seed as child_seed
from mvllm.engine.llm_engine import LLMEngine as LLMEngine
from mvllm.engine.tokenizer.content_parts import render_user_message as render_user_message
from mvllm.engine.tokenizer.tokenizer import Tokenizer as Tokenizer
from mvllm.entrypoints.finished_outputs import raise_failures as raise_failures
from mvllm.entrypoints.llm import LLM as LLM
from mvllm.entrypoints.prompt_lists import as_prompt_list as as_prompt_list
from mvllm.entrypoints.prompt_lists import one_per_prompt as one_per_prompt
from mvllm.entrypoints.step_loop import run_prompts as run_prompts
from mvllm.messages.inputs import PromptType as PromptType
from mvllm.messages.inputs import TokensPrompt as TokensPrompt
from mvllm.messages.lora import LoRARequest as LoRARequest
from mvllm.messages.sampling_params import RequestOutputKind as RequestOutputKind
from mvllm.messages.sampling_params import SamplingParams as SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LLMEngine",
    "LoRARequest",
    "PromptType",
    "RequestMetrics",
    "RequestOutputKind",
    "SamplingParams",
    "Tokenizer",
    "TokensPrompt",
    "as_prompt_list",
    "child_seed",
    "failure_of",
    "longer_sequences",
    "one_per_prompt",
    "raise_failures",
    "render_user_message",
    "run_prompts",
]
