"""What a platform's compiler makes of the model gives the model's tokens: in bfloat16, and for batches that shrink.

So steps of several shapes are seen for the first time, and then again.
"""

from __future__ import annotations

import pytest

from mvllm import LLM, SamplingParams
from tests.helpers.model_zoo import make_checkpoint

PROMPTS = [{"prompt_token_ids": [5 + 7 * i + j for j in range(6 + 3 * i)]} for i in range(3)]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (20, 9, 16)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-gqa", {}),
        ("llama-gqa", {"pipeline_parallel_size": 2}),
        ("llama-gqa", {"quantization": "int8"}),
        ("llama-gqa", {"quantization": "int4"}),
        ("qwen3", {}),
        ("qwen3-head-dim-tied", {}),
        ("mistral-window", {}),
        ("gpt2", {}),
    ],
    ids=str,
)
def test_compiled_steps_give_the_models_tokens(name, settings, tmp_path):
    folder, tokens = make_checkpoint(name, tmp_path), []
    for eager in (True, False):
        with LLM(str(folder), dtype="bfloat16", max_model_len=64, enforce_eager=eager, **settings) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
