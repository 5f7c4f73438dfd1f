"""Quantized models through the whole engine, on the platform under test with its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mvllm import LLM, SamplingParams
from mvllm.errors import ConfigError, ModelError
from tests.helpers.float8_zoo import FLOAT8_SCHEMES, make_float8
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.parity import engine, generate
from tests.helpers.quantized_zoo import make_quantized

PROMPTS = [[5, 6, 7], [90, 1, 44, 300], list(range(2, 42)), [11] * 17]


def expected(folder: Path, num_tokens: int = 24) -> list[list[int]]:
    """Greedy continuations by transformers."""
    model, answers = load_reference(folder), []
    for prompt in PROMPTS:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        *(("awq", {}), ("gptq-desc-act", {}), ("w8a16-rows", {}), ("fp8-blocks", {})),
        # Shards of quantized weights are those of tests/unit/models.
        pytest.param("w8a16-rows", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_with_the_dequantized_weights(
    scheme: str, sizes: dict, tmp_path: Path
) -> None:
    checkpoint = make_float8(scheme, tmp_path) if scheme in FLOAT8_SCHEMES else make_quantized(scheme, tmp_path)
    with engine(checkpoint.quantized, skip_tokenizer_init=True, **sizes) as llm:
        found = [list(o.outputs[0].token_ids) for o in generate(llm, PROMPTS, max_tokens=24)]
    assert found == expected(checkpoint.plain)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_demo_model_quantized_on_load_gives_correct_completions(quantization: str) -> None:
    with LLM("demo", quantization=quantization, use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 24) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        outputs = llm.generate(["The capital of France is", "The opposite of hot is"], params, use_tqdm=False)
        assert [o.outputs[0].text.split(".")[0] for o in outputs] == [" Paris", " cold"]


def test_random_weights_can_be_quantized(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True}
    with engine(folder, quantization="int4", **settings) as rounded, engine(folder, **settings) as floats:
        found, plain = (generate(llm, PROMPTS, max_tokens=8) for llm in (rounded, floats))
        assert [len(o.outputs[0].token_ids) for o in found] == [8] * len(PROMPTS)
        assert [o.outputs[0].cumulative_logprob for o in found] != [o.outputs[0].cumulative_logprob for o in plain]


def test_an_unsupported_quantization_is_rejected_before_loading(tmp_path: Path) -> None:
    checkpoint = make_quantized("awq", tmp_path)
    (checkpoint.quantized / "model.safetensors").unlink()  # the error would be missed
    with pytest.raises(ConfigError, match="stored as 'awq' already"), engine(checkpoint.quantized, quantization="int8"):
        pass
    overrides = {"quantization_config": {"quant_method": "awq", "bits": 3}}
    with pytest.raises(ModelError, match="'bits' is 3"), engine(checkpoint.quantized, hf_overrides=overrides):
        pass
