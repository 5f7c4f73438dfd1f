"""Qwen-VL and GLM-4V in the engine give the tokens of transformers."""

from __future__ import annotations

import pytest
import torch

from mvllm import SamplingParams
from tests.helpers.multimodal_suite import NUM_TOKENS, MultiModalSuite, check, engine, generate, names_of, oracle

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe")


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("name", names_of(*FAMILIES, gate=True))
def test_requests_with_images_and_without_in_one_batch(name: str) -> None:
    expected = oracle(name)
    with engine(expected.folder) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=16))


@pytest.mark.exhaustive
def test_ready_embeddings_are_text_for_a_model_with_deepstack() -> None:
    expected = oracle("qwen3_vl")
    ids = expected.prompt_ids(expected.requests[0])
    embeds = expected.model.get_input_embeddings()(torch.tensor(ids)).detach()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with engine(expected.folder, enable_prompt_embeds=True) as llm:
        prompts = [{"prompt_embeds": embeds}, expected.requests[1].as_prompt()]
        of_embeds, of_image = llm.generate(prompts, params, use_tqdm=False)
    expected.check(0, of_embeds.outputs[0].token_ids)
    expected.check(1, of_image.outputs[0].token_ids)


@pytest.mark.exhaustive
class TestGrids(MultiModalSuite):
    names = names_of(*FAMILIES)
