"""AsyncLLM on a test's checkpoint, and functions that collect a request's outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mvllm import RequestOutput, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM

PROMPTS = ["Hello world", "The capital of", [5, 6, 7, 8], "x"]
SETTINGS = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 176,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**24,
    "seed": 0,
    "use_tqdm_on_load": False,
}


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 20, "ignore_eos": True} | settings))


@contextmanager
def async_engine(checkpoint: Path, **settings: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(model=str(checkpoint), **(SETTINGS | settings)))
    try:
        yield llm
    finally:
        llm.shutdown()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, output = [output async for output in outputs]
    assert output.finished
    return output


async def joined(outputs: AsyncIterator[RequestOutput]) -> tuple[list[int], str]:
    """The complete token ids and text of a single-sequence request, from its deltas."""
    ids: list[int] = []
    text = ""
    async for output in outputs:
        ids += output.outputs[0].token_ids
        text += output.outputs[0].text
    return ids, text
