"""Streaming: AsyncLLM serves several requests at once and yields the text of each as it is generated.

AsyncLLM is the engine behind the HTTP server. The engine core runs in a process of its own, and each request is an
async iterator. Leaving the iterator early aborts the request.

    python docs/examples/streaming_async.py [--model PATH_OR_NAME]
"""

import argparse
import asyncio

from mvllm import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPTS = ["Once upon a time", "What is paged attention?"]


async def stream(llm: AsyncLLM, number: int, prompt: str) -> str:
    """Prints the pieces of one request as they arrive; returns the whole text."""
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        output_kind=RequestOutputKind.DELTA,  # each output has the new text only; CUMULATIVE repeats all of it
    )
    pieces = []
    async for output in llm.generate(prompt, params):
        piece = output.outputs[0].text
        pieces.append(piece)
        print(f"[request {number}] {piece!r}", flush=True)
    return prompt + "".join(pieces)


async def stream_all(llm: AsyncLLM) -> None:
    texts = await asyncio.gather(*(stream(llm, number, prompt) for number, prompt in enumerate(PROMPTS)))
    for text in texts:
        print(f"\nComplete: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream two requests at once.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    llm = AsyncLLM.from_engine_args(EngineArgs(model=args.model))  # loads the model: before the event loop runs
    try:
        asyncio.run(stream_all(llm))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
