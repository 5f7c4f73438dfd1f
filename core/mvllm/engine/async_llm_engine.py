"""Public older name of AsyncLLM."""

from mvllm.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]
