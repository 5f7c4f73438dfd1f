"""Hybrid models from GGUF files produce the tokens of the checkpoints from which the files were written."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.gguf.tests.unit.test_hybrids import NAMES, checkpoint_of, marked
from plugins.gguf.tests.written_files import make_folder, write_gguf

from mvllm import LLM, SamplingParams
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.tensor_names import packed_modules
from tests.helpers import parity

NUM_TOKENS = 24
PROMPTS = (4, 9, 12)  # of parity.PROMPT_LENGTHS: 16, 5 and 3 tokens


@pytest.mark.parametrize("name", marked((*NAMES, "falconh1"), ("falconh1",)))
def test_each_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / "hf")
    expected = parity.oracle_of(checkpoint, parity.prompts_of(name, PROMPTS), NUM_TOKENS)
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    folder = make_folder(file, tmp_path / "derived", model_config(read_gguf(file)))
    with parity.engine(folder, skip_tokenizer_init=True) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))


def _logprobs(llm: LLM, name: str) -> list[list[tuple[int, float]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in parity.prompts_of(name, PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    return [
        [(token, step[token].logprob) for token, step in zip(each.token_ids, each.logprobs or [], strict=True)]
        for each in outputs
    ]


@pytest.mark.parametrize("name", marked((*NAMES, "falconh1"), ("granitehybrid",)))
def test_blocks_give_the_log_probabilities_of_their_values(name: str, tmp_path: Path) -> None:
    checkpoint, found = checkpoint_of(name, tmp_path / "hf"), []
    for dequantized in (False, True):
        file = write_gguf(checkpoint, tmp_path / f"{dequantized}.gguf", lambda name: "Q8_0", dequantized=dequantized)
        model = read_gguf(file)
        types = packed_modules(model, 10_000)
        assert bool(types) != dequantized
        config = {**model_config(model), "dtype": "float32"}
        config["quantization_config"] = {"quant_method": "gguf", "tensors": types}
        folder = make_folder(file, tmp_path / f"derived-{dequantized}", config)
        with parity.engine(folder, skip_tokenizer_init=True) as llm:
            found.append(_logprobs(llm, name))
    for packed, floats in zip(*found, strict=True):
        assert [token for token, _ in packed] == [token for token, _ in floats]
        assert [value for _, value in packed] == pytest.approx([value for _, value in floats], abs=1e-4)
