"""Token ids and perplexities of the published models are those of llama.cpp, which `measure.py` has measured."""

from __future__ import annotations

import math

from mvllm import LLM, SamplingParams
from tests.published.conftest import SIZES, Published
from tests.published.texts import HARD, PASSAGE


def test_ids_and_perplexity(published: Published) -> None:
    with LLM(str(published.path), **SIZES, use_tqdm_on_load=False) as llm:
        assert llm.get_tokenizer().encode(HARD) == published.measured["ids"]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([PASSAGE], params, use_tqdm=False)
    ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert ids is not None and found is not None and len(ids) == published.measured["passage_tokens"]
    total = sum(entries[token].logprob for token, entries in zip(ids[1:], found[1:], strict=True) if entries)
    perplexity = math.exp(-total / (len(ids) - 1))
    # llama.cpp rounds activations where weights are quantized; float32 is what both compute with dequantized weights.
    assert abs(perplexity / published.measured["perplexity_float32"] - 1) < 0.002
    assert abs(perplexity / published.measured["perplexity"] - 1) < 0.01
