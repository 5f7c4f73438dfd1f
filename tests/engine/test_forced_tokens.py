"""`forced_token_ids` in outputs of text."""

from __future__ import annotations

import pytest

from mvllm import SamplingParams
from tests.engine.conftest import MakeLLM


@pytest.mark.parametrize("asynchronous", [False, True])
def test_forced_tokens_are_generated_and_the_others_follow_from_them(make_llm: MakeLLM, asynchronous: bool) -> None:
    llm = make_llm(async_scheduling=asynchronous)
    prompt, forced = {"prompt_token_ids": [5, 6, 7]}, {1: 42, 4: 43}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (plain,) = llm.generate(prompt, params, use_tqdm=False)
    both = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, forced_token_ids=forced, logprobs=0
    )
    found, other = llm.generate([prompt, prompt], [both, params], use_tqdm=False)
    tokens = found.outputs[0].token_ids
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    assert (tokens[1], tokens[4]) == (42, 43) and tokens[0] == plain.outputs[0].token_ids[0]
    (rest,) = llm.generate({"prompt_token_ids": [5, 6, 7, *tokens[:5]]}, params, use_tqdm=False)
    assert rest.outputs[0].token_ids[:3] == tokens[5:]
