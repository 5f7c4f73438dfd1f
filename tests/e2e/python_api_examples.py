"""The examples of docs/reference/python: a function for each class, with the class's name.

tests/unit/docs/python_api_page.py writes the body of each function into a page, after the line that makes its parameter
(`SETUP`). Tests call the functions with engines of their own: most in test_demo_model_offline_api.py, where one engine
with the demo model runs them all.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from mvllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ConfigError,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    ModelError,
    MvllmError,
    PlatformError,
    PoolingParams,
    RequestError,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
    SharedMemoryWeights,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    WeightTransferGroup,
    WeightTransferInfo,
)

if TYPE_CHECKING:
    import torch

SETUP = {
    "llm": 'llm = LLM("demo")',
    "engine": "engine = llm.llm_engine",
    "async_llm": 'async_llm = AsyncLLM.from_engine_args(EngineArgs(model="demo"))',
    "embedder": 'llm = LLM("demo")  # or a model for embeddings',
    "classifier": 'llm = LLM("path/of/a/classifier")',
    "named": 'named = load_file("new/model.safetensors")  # of safetensors.torch; or a state_dict of the model',
    "other_process": 'llm = LLM("demo", distributed_executor_backend="mp")  # its workers are other processes',
    "adapted": 'llm = LLM("demo", enable_lora=True)',
}
"""How a parameter is made, as the pages say it."""


def example_LLM(llm: LLM) -> None:
    outputs = llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(temperature=0))
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
    [reply] = llm.chat([{"role": "user", "content": "What is the capital of Italy?"}])
    print(reply.outputs[0].text)


def example_EngineArgs() -> None:
    args = EngineArgs(model="demo", max_model_len=512, kv_cache_memory_bytes=32 * 1024 * 1024)
    with LLM.from_engine_args(args) as llm:
        print(llm.model_config.max_model_len)


def example_LLMEngine(engine: LLMEngine) -> None:
    engine.add_request("request-1", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text, output.finished)


async def example_AsyncLLM(async_llm: AsyncLLM) -> None:
    async def answer(prompt: str) -> str:
        params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in async_llm.generate(prompt, params):
            return output.outputs[0].text
        return ""

    print(await asyncio.gather(answer("Once upon a time"), answer("The capital of France is")))


def example_SamplingParams(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=1, max_tokens=16, stop=["."])
    [output] = llm.generate("Once upon a time", params)
    print([sequence.text for sequence in output.outputs])


async def example_RequestOutputKind(async_llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    async for output in async_llm.generate("Once upon a time", params):
        print(output.outputs[0].text, end="", flush=True)  # the new piece


def example_StructuredOutputsParams(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    params = SamplingParams(temperature=0, max_tokens=32, structured_outputs=StructuredOutputsParams(json=schema))
    [output] = llm.generate("The capital of France is", params)
    print(output.outputs[0].text)  # {"city": "Paris"}


def example_BeamSearchParams(llm: LLM) -> None:
    [output] = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=3, max_tokens=8))
    print([sequence.text for sequence in output.sequences])  # the best first


def example_PoolingParams(embedder: LLM) -> None:
    [output] = embedder.embed("Paris is in France.", PoolingParams(dimensions=16))
    print(len(output.outputs.embedding))  # 16


def example_LoRARequest(adapted: LLM, folder: str = "path/of/an/adapter") -> None:
    adapter = LoRARequest("poems", 7, folder)
    outputs = adapted.generate(["Once upon a time"] * 2, SamplingParams(max_tokens=8), lora_request=[adapter, None])
    print([output.outputs[0].text for output in outputs])  # with the adapter, and without


def example_TextPrompt(llm: LLM) -> None:
    llm.generate(TextPrompt(prompt="Once upon a time", cache_salt="a user"), SamplingParams(max_tokens=8))


def example_TokensPrompt(llm: LLM) -> None:
    [output] = llm.generate(TokensPrompt(prompt_token_ids=[5, 7, 11]), SamplingParams(max_tokens=8))
    print(output.prompt_token_ids, output.outputs[0].token_ids)


def example_RequestOutput(llm: LLM) -> None:
    [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
    print(output.prompt, len(output.prompt_token_ids), output.finished, output.num_cached_tokens)


def example_CompletionOutput(llm: LLM) -> None:
    [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
    for sequence in output.outputs:
        print(sequence.index, sequence.text, sequence.token_ids, sequence.finish_reason)


def example_Logprob(llm: LLM) -> None:
    [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    sequence = output.outputs[0]
    for token_id, entries in zip(sequence.token_ids, sequence.logprobs or [], strict=True):
        entry = entries[token_id]
        print(entry.decoded_token, entry.logprob, entry.rank)


def example_BeamSearchOutput(llm: LLM) -> None:
    [output] = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=2, max_tokens=4))
    for sequence in output.sequences:
        print(sequence.cum_logprob, sequence.text)


def example_PoolingRequestOutput(embedder: LLM) -> None:
    [output] = embedder.encode("Paris is in France.", pooling_task="token_embed")
    print(output.outputs.data.shape)  # (tokens, hidden size)


def example_EmbeddingRequestOutput(embedder: LLM) -> None:
    [first, second] = embedder.embed(["Paris is in France.", "Rome is in Italy."])
    print(np.dot(first.outputs.embedding, second.outputs.embedding))


def example_ClassificationRequestOutput(classifier: LLM) -> None:
    [output] = classifier.classify("A text.")
    print(output.outputs.probs)


def example_ScoringRequestOutput(embedder: LLM) -> None:
    outputs = embedder.score("Where is Paris?", ["Paris is in France.", "I like music."])
    print([output.outputs.score for output in outputs])


def example_SharedMemoryWeights(llm: LLM, named: dict[str, torch.Tensor]) -> None:
    with SharedMemoryWeights(named) as weights:  # in any process of this machine
        llm.update_weights(shared_memory=weights.name)


def example_WeightTransferGroup(other_process: LLM, named: dict[str, torch.Tensor], port: int = 29600) -> None:
    world_size = 1 + other_process.llm_engine.num_workers  # the trainer is rank 0
    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size, "timeout": 60}
    with ThreadPoolExecutor() as trainer:  # both at the same time
        joining = trainer.submit(WeightTransferGroup, WeightTransferInfo(**info))
        other_process.init_weight_transfer_engine(info)
        trainer.submit(joining.result().send, named)
        other_process.update_weights(**WeightTransferGroup.describe(named))
    joining.result().close()


def example_MvllmError() -> None:
    try:
        LLM("demo", max_model_len=0)
    except MvllmError as e:  # any error of the ones below
        print(e)


def example_RequestError(llm: LLM) -> None:
    try:
        llm.generate("Once upon a time", SamplingParams(top_p=2.0))
    except RequestError as e:
        print(e.parameter, e)  # top_p ...


def example_RequestFailedError(llm: LLM) -> None:
    broken = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="(unclosed"))
    try:
        llm.generate(["Once upon a time", "A number: "], [SamplingParams(max_tokens=8), broken])
    except RequestFailedError as e:
        print(e, [output.outputs[0].error for output in e.outputs])  # the first output is complete, its error None


def example_ConfigError() -> None:
    try:
        LLM("demo", max_model_length=512)
    except ConfigError as e:
        print(e)  # did you mean max_model_len?


def example_ModelError() -> None:
    try:
        LLM("path/that/is/not/there")
    except (ModelError, ConfigError) as e:
        print(e)


def example_PlatformError() -> None:
    try:
        LLM("demo", platform="unknown")
    except PlatformError as e:
        print(e)  # what is installed
