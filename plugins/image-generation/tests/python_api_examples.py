"""The examples of docs/reference/python/images.md, as in tests/e2e/python_api_examples.py. test_images.py runs them."""

from __future__ import annotations

from mvllm import LLM, AsyncLLM, ImageParams

SETUP = {
    "llm": 'llm = LLM("deepseek-ai/Janus-Pro-1B")',
    "async_llm": 'async_llm = AsyncLLM.from_engine_args(EngineArgs(model="deepseek-ai/Janus-Pro-1B"))',
}


def example_Images(llm: LLM) -> None:
    outputs = llm.images.generate(["A dog that runs in the rain.", "A red house."], ImageParams(seed=1))
    print([output.images[0].pixels.shape for output in outputs])


async def example_AsyncImages(async_llm: AsyncLLM) -> None:
    output = await async_llm.images.generate("A dog that runs in the rain.", ImageParams(seed=1))
    print(output.images[0].pixels.shape)


def example_ImageParams(llm: LLM) -> None:
    params = ImageParams(n=2, guidance_scale=3.0, temperature=0.9, seed=1)
    [output] = llm.generate_images("A dog that runs in the rain.", params)
    print(len(output.images))  # 2


def example_ImageRequestOutput(llm: LLM) -> None:
    [output] = llm.generate_images("A dog that runs in the rain.", ImageParams(n=2, seed=1))
    print(output.prompt, [image.finish_reason for image in output.images])


def example_GeneratedImage(llm: LLM) -> None:
    [output] = llm.generate_images("A dog that runs in the rain.", ImageParams(seed=1))
    image = output.images[0]
    print(image.codes[:4], image.pixels.shape)  # PIL.Image.fromarray(image.pixels).save("dog.png")
