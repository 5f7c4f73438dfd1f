"""Streams the new text of requests from an asynchronous engine."""

import asyncio

from mvllm import SamplingParams
from mvllm.engine.arg_utils import AsyncEngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.sampling_params import RequestOutputKind


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    print(f"Prompt: {prompt!r}\nResponse:", end="", flush=True)
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            print("\nGeneration complete")
            break


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", enforce_eager=True))
    try:
        for i, prompt in enumerate(["The future is", "In a galaxy far away"], 1):
            await stream_response(engine, prompt, f"stream-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
