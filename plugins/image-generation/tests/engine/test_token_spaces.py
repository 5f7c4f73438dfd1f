"""Requests for images beside requests for text: each row gets the head of its token space."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, RequestError, SamplingParams
from tests.helpers.model_zoo import BOS_TOKEN_ID, VOCAB_SIZE
from tests.helpers.parity import LOGPROB_TOLERANCE, engine

zoo = importlib.import_module("plugins.image-generation.tests.image_zoo")
BEGIN_OF_IMAGE_ID = zoo.BEGIN_OF_IMAGE_ID
NUM_CODES = zoo.NUM_CODES
load_janus = zoo.load_janus
make_janus = zoo.make_janus


NUM_IMAGE_TOKENS = 16
SCALE = 5.0
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, key and value, heads, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_janus(tmp_path_factory.mktemp("spaces") / "janus", grid=4)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with engine(folder) as made:
        yield made


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    own = ([rng.randrange(2, VOCAB_SIZE - 4) for _ in range(length)] for length in (5, 40, 1, 17))
    return [[BOS_TOKEN_ID, *ids, BEGIN_OF_IMAGE_ID] for ids in own]


class Oracle:
    """Greedy codes and texts of transformers' model, computed without a cache."""

    def __init__(self, folder: Path) -> None:
        self.model = load_janus(folder)

    @torch.no_grad()
    def image_logits(self, prompt: list[int], codes: list[int]) -> torch.Tensor:
        """[len(codes) + 1, NUM_CODES]."""
        embedded = self.model.get_input_embeddings()(torch.tensor([prompt]))
        if codes:
            images = self.model.prepare_embeddings_for_image_generation(torch.tensor([codes]))
            embedded = torch.cat([embedded, images.view(1, len(codes), -1)], dim=1)
        hidden = self.model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return self.model.model.generation_head(hidden[0, len(prompt) - 1 :])

    def codes(self, prompt: list[int], negative: list[int], scale: float) -> list[int]:
        codes: list[int] = []
        while len(codes) < NUM_IMAGE_TOKENS:
            conditional, other = (self.image_logits(ids, codes)[-1] for ids in (prompt, negative))
            codes.append(int((other + scale * (conditional - other)).argmax()))
        return codes

    @torch.no_grad()
    def text(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def image_params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": None, "token_space": "image"} | settings)


@pytest.mark.parametrize(
    "settings",
    [{"async_scheduling": False}, {"kv_cache_memory_bytes": 12 * BLOCK_BYTES, "max_num_batched_tokens": 20}],
    ids=["plain", "async preempted in chunks"],
)
def test_images_and_text_of_one_batch_are_those_of_transformers(
    folder: Path, oracle: Oracle, settings: dict[str, Any]
) -> None:
    prompts = prompts_of(1)
    negative = [[BOS_TOKEN_ID, 7, 9, BEGIN_OF_IMAGE_ID], *prompts_of(2)[1:]]
    text = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    params = [
        image_params(guidance_scale=SCALE, negative_prompt=negative[0], logprobs=1),
        image_params(guidance_scale=SCALE, negative_prompt=negative[1]),
        image_params(logprobs=2),
        text,
    ]
    given = [{"prompt_token_ids": ids} for ids in prompts]
    with engine(folder, **settings) as llm:
        for _ in range(2):
            found = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
            for i in (0, 1):
                assert found[i].image_codes == oracle.codes(prompts[i], negative[i], SCALE)
                assert found[i].finish_reason == "length"
                assert found[i].token_ids == [VOCAB_SIZE + code for code in found[i].image_codes or ()]
            assert found[2].image_codes == oracle.codes(prompts[2], prompts[2], 1.0)
            assert list(found[3].token_ids) == oracle.text(prompts[3], 10)
            assert found[3].image_codes is None
        assert llm.llm_engine.stats is not None and llm.llm_engine.stats.kv_cache_usage == 0
        assert llm.llm_engine.stats.num_preemptions > 0 or "kv_cache_memory_bytes" not in settings
    codes = found[0].image_codes or []
    expected = oracle.image_logits(prompts[0], codes[:-1]).log_softmax(1).gather(1, torch.tensor(codes).unsqueeze(1))
    assert found[0].conditional_logprobs == pytest.approx(expected.squeeze(1).tolist(), abs=LOGPROB_TOLERANCE)
    assert all(token >= VOCAB_SIZE for entries in found[2].logprobs or () for token in entries)


def test_a_generated_image_can_be_scored_as_a_prompt(llm: LLM) -> None:
    prompt = prompts_of(3)[1]
    params = image_params(temperature=1.0, seed=3, guidance_scale=3.0, logprobs=0)
    image = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    scored = llm.generate(
        {"prompt_token_ids": [*prompt, *image.token_ids]},
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )[0].prompt_logprobs
    assert scored is not None
    logprobs = [entries[token].logprob for entries, token in zip(scored[len(prompt) :], image.token_ids, strict=True)]
    assert image.conditional_logprobs == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)


def test_the_default_unconditional_prompt_keeps_what_begins_a_sequence_and_an_image(llm: LLM) -> None:
    prompt = prompts_of(4)[0]
    space = llm.llm_engine.config.model.token_spaces["image"]
    kept = {BOS_TOKEN_ID, *space.begin_token_ids}
    negative = [token if token in kept else space.pad_token_id for token in prompt]
    params = [image_params(guidance_scale=4.0), image_params(guidance_scale=4.0, negative_prompt=negative)]
    found = llm.generate([{"prompt_token_ids": prompt}] * 2, params, use_tqdm=False)
    assert found[0].outputs[0].image_codes == found[1].outputs[0].image_codes


def test_two_images_share_both_prompts(llm: LLM) -> None:
    prompt = {"prompt_token_ids": prompts_of(5)[1]}
    params = image_params(temperature=1.0, guidance_scale=5.0, n=2, seed=1)
    images = [each.image_codes for each in llm.generate(prompt, params, use_tqdm=False)[0].outputs]
    alone = [
        llm.generate(
            prompt, image_params(temperature=1.0, guidance_scale=5.0, seed=1 + k), use_tqdm=False
        )[0].outputs[0].image_codes
        for k in range(2)
    ]  # fmt: skip
    assert images == alone
    assert all(0 <= code < NUM_CODES for codes in images for code in codes or ())


def test_requests_that_a_space_cannot_have_are_refused(llm: LLM) -> None:
    prompt = {"prompt_token_ids": prompts_of(6)[0]}
    for settings, message in (
        ({"stop": ["x"]}, "stop must be unset when token_space is 'image'"),
        ({"token_space": "sound"}, "token_space must be one of the spaces of the model .*: 'text', 'image'"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, image_params(**settings), use_tqdm=False)
    with pytest.raises(RequestError, match=f"Token ids must be from 0 to {VOCAB_SIZE + NUM_CODES - 1}"):
        llm.generate({"prompt_token_ids": [VOCAB_SIZE + NUM_CODES]}, image_params(), use_tqdm=False)
