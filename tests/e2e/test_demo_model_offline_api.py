"""The demo model through ``LLM("demo")``: the same greedy answers as transformers."""

from __future__ import annotations

import inspect

import pytest
from safetensors.torch import load_file

from mvllm import LLM, SamplingParams
from tests.e2e import python_api_examples
from tests.e2e.demo_model_expectations import COMPLETIONS, REPLIES, messages, says

GREEDY = SamplingParams(temperature=0, max_tokens=256)


@pytest.fixture(scope="module")
def llm():
    with LLM(model="demo", max_model_len=512, kv_cache_memory_bytes=32 * 1024 * 1024) as llm:
        yield llm


@pytest.mark.quick
def test_it_completes_plain_text(llm):
    outputs = llm.generate(list(COMPLETIONS), GREEDY, use_tqdm=False)
    said = {output.prompt: output.outputs[0].text for output in outputs}
    wrong = {prompt: said[prompt] for prompt, expected in COMPLETIONS.items() if not says(said[prompt], expected)}
    assert not wrong


def test_it_replies_in_conversations(llm):
    outputs = llm.chat([messages(chat) for chat in REPLIES], GREEDY, use_tqdm=False)
    wrong = [
        output.outputs[0].text
        for output, expected in zip(outputs, REPLIES.values(), strict=True)
        if not says(output.outputs[0].text, expected)
    ]
    assert not wrong


def test_an_answer_ends_with_an_eos_token(llm):
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of Italy?"}], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) < 20


def test_the_program_of_the_readme_prints_sentences(llm):
    prompts = ["Have you heard of paged attention?", "The capital of"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_k=50, seed=1, max_tokens=64), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.outputs[0].text.strip().endswith(".") for output in outputs)


NEEDS_OTHER_ENGINES = {
    "AsyncLLM",
    "RequestOutputKind",
    "ClassificationRequestOutput",
    "LoRARequest",
    "WeightTransferGroup",
}
"""Examples that other tests run, with engines that they have: test_async_llm.py, test_encoders.py, test_lora.py,
test_weight_updates.py."""


@pytest.mark.parametrize("name", sorted({name[8:] for name in vars(python_api_examples) if name[:8] == "example_"}))
def test_the_examples_of_the_python_api_run(llm, name):
    if name in NEEDS_OTHER_ENGINES:
        return
    example = getattr(python_api_examples, f"example_{name}")
    values = {
        "llm": lambda: llm,
        "embedder": lambda: llm,
        "engine": lambda: llm.llm_engine,
        "named": lambda: load_file(llm.model_config.path / "model.safetensors"),
    }
    example(**{parameter: values[parameter]() for parameter in inspect.signature(example).parameters})
