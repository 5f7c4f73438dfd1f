"""Features of the engine work with sequence states: outputs are those of transformers, or of requests alone.

Other tests: drafts in test_state_draft_models.py, random mixtures of settings in test_state_requests.py.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mvllm import BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from tests.engine.test_beam_search import close
from tests.engine.test_embeddings import check_all_ways
from tests.engine.test_embeddings import reference as hidden_states
from tests.engine.test_speculative import check_close
from tests.helpers import parity
from tests.helpers.lora_adapters import check_against, merged, write_adapter
from tests.helpers.model_zoo import VOCAB_SIZE, load_reference, make_checkpoint
from tests.helpers.parity import LOGPROB_TOLERANCE, engine, generate

pytestmark = pytest.mark.exhaustive

FAMILIES = (
    *("granitehybrid", "mamba2", "falconh1", "nemotronh", "bamba"),
    *("qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe", "kimilinear", "olmohybrid"),
)
CHUNKS = {"max_num_batched_tokens": 32, "state_snapshot_interval": 16}
WHICH = (0, 5, 6, 8, 11)
"""Prompts of the oracle, of 1 to 97 tokens. Some share prefixes."""
NUM_TOKENS = 24

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_embeddings_are_the_hidden_states_of_transformers(name: str) -> None:
    expected = hidden_states(name)
    with engine(expected.folder, **CHUNKS) as llm:
        check_all_ways(expected, llm)


def search(model: PreTrainedModel, prompt: list[int], width: int, length: int) -> list[tuple[list[int], float]]:
    """A beam search without caches and ends; sequences and mean log-probabilities, best first."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(length):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens for tokens, _ in beams]), use_cache=False).logits[:, -1]
        scores = logits.float().log_softmax(-1) + torch.tensor([[score] for _, score in beams])
        best, where = scores.flatten().topk(width)
        beams = [
            ([*beams[place // scores.shape[1]][0], place % scores.shape[1]], score)
            for score, place in zip(best.tolist(), where.tolist(), strict=True)
        ]
    return [(tokens, score / length) for tokens, score in beams]


@every_family
@pytest.mark.parametrize("shared", [True, False], ids=["prefix-cache", "siblings"])
def test_beams_are_those_of_a_search_without_caches(name: str, tmp_path: Path, *, shared: bool) -> None:
    folder = make_checkpoint(name, tmp_path)
    prompts = [[5, 6, 7], list(range(10, 43)), list(range(10, 58))]
    model = load_reference(folder)
    with engine(folder, enable_prefix_caching=shared, max_num_seqs=5, **CHUNKS) as llm:
        params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
        outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
        stats = llm.llm_engine.stats
        assert stats is not None and stats.kv_cache_usage == 0
        assert not shared or stats.prefix_cache_hits > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        found = [(s.tokens[len(prompt) :], s.score) for s in output.sequences]
        expected = search(model, prompt, 4, 20)
        assert close(found, expected), (found, expected)


def odd_steps_only(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Forbids known tokens, and every second token of the vocabulary at every second step."""
    logits[token_ids] = -math.inf
    logits[len(token_ids) % 2 :: 2] = -math.inf
    return logits


@every_family
def test_functions_of_a_request_change_its_logits(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    prompts = [[5, 6, 7], list(range(10, 43)), list(range(10, 58))]
    model, expected = load_reference(folder), list[list[int]]()
    for prompt in prompts:
        tokens = list[int]()
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].float()
                tokens.append(int(odd_steps_only(tokens, logits).argmax()))
        expected.append(tokens)
    with engine(folder, max_num_seqs=4, **CHUNKS) as llm:
        for _ in range(2):
            found = generate(llm, prompts, max_tokens=NUM_TOKENS, logits_processors=[odd_steps_only])
            assert [list(output.outputs[0].token_ids) for output in found] == expected


@every_family
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])
def test_paused_requests_go_on_as_before(name: str, *, ahead: bool) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    with engine(expected.folder, max_num_seqs=3, async_scheduling=ahead, **CHUNKS) as llm:
        core, outputs = llm.llm_engine, dict[str, RequestOutput]()
        for clear_cache in itertools.chain([True, False] * 3, itertools.repeat(None)):
            if clear_cache is None and not core.has_unfinished_requests():
                break
            if not core.has_unfinished_requests():
                for i, prompt in enumerate(expected.prompts):
                    core.add_request(str(i), {"prompt_token_ids": prompt}, params)
            for _ in range(7):
                outputs |= {output.request_id: output for output in core.step()}
            if clear_cache is not None:
                llm.pause_generation(mode="keep", clear_cache=clear_cache)
                llm.resume_generation()
        parity.check(expected, [outputs[str(i)] for i in range(len(expected.prompts))])


@every_family
def test_a_sleeping_engine_wakes_up_with_the_same_outputs(name: str) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    with engine(expected.folder, max_num_seqs=3, **CHUNKS) as llm:
        for level in (1, 2, None):
            for _ in range(2):
                parity.check(expected, generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
            if level is not None:
                llm.sleep(level)
                llm.wake_up()


@every_family
def test_prompt_logprobs_are_those_of_transformers_after_prefix_hits(name: str) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    with engine(expected.folder, max_num_seqs=3, **CHUNKS) as llm:
        for prompt_logprobs in (None, 2, None, 0):
            outputs = generate(llm, expected.prompts, max_tokens=NUM_TOKENS, prompt_logprobs=prompt_logprobs)
            parity.check(expected, outputs)
            if prompt_logprobs is not None:
                parity.check_prompt_logprobs(expected, outputs)
        assert llm.llm_engine.stats is not None and llm.llm_engine.stats.prefix_cache_hits > 0


TARGETS = {
    "granitehybrid": ("q_proj", "v_proj", "in_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
    "falconh1": ("q_proj", "in_proj", "out_proj"),
    "nemotronh": ("q_proj", "in_proj", "out_proj"),
    "bamba": ("q_proj", "in_proj", "out_proj", "down_proj"),
    "qwen3next": ("q_proj", "o_proj", "in_proj_qkvz", "out_proj"),
    "qwen35": ("q_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
    "qwen35moe": ("q_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
    "lfm2": ("q_proj", "out_proj", "in_proj"),
    "lfm2moe": ("q_proj", "out_proj", "in_proj"),
    "kimilinear": ("q_proj", "o_proj", "k_proj", "b_proj"),
    "olmohybrid": ("q_proj", "g_proj", "o_proj"),
}


@pytest.mark.shows("lora")
@every_family
def test_adapters_give_the_outputs_of_merged_weights(name: str, tmp_path: Path) -> None:
    """The same prompts with and without the adapter: neither finds the states of the other."""
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    folder = write_adapter(tmp_path / "adapter", expected.folder, targets=TARGETS[name], seed=1)
    reference, adapter = merged(expected.folder, folder), LoRARequest("it", 1, str(folder))
    prompts = [{"prompt_token_ids": prompt} for prompt in expected.prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    with engine(expected.folder, enable_lora=True, max_num_seqs=4, **CHUNKS) as llm:
        for _ in range(2):
            choice = [adapter] * len(prompts) + [None] * len(prompts)
            outputs = llm.generate(prompts * 2, params, use_tqdm=False, lora_request=choice)
            check_against(reference, outputs[: len(prompts)])
            parity.check(expected, outputs[len(prompts) :])
        assert sum(output.num_cached_tokens for output in outputs[: len(prompts)]) > 0
        assert sum(output.num_cached_tokens for output in outputs[len(prompts) :]) > 0
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert tokens[: len(prompts)] != tokens[len(prompts) :]


def forced_logprobs(folder: Path, expected: parity.Oracle, **settings: Any) -> tuple[torch.Tensor, int]:
    """Log-probabilities of the oracle's continuations, [tokens, vocabulary]; and tokens from the cache."""
    prompts = [
        prompt + tokens[:count]
        for prompt, tokens in zip(expected.prompts, expected.tokens, strict=True)
        for count in range(len(tokens))
    ]
    with engine(folder, max_logprobs=VOCAB_SIZE, **settings) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, max_tokens=1, logprobs=VOCAB_SIZE)
    rows = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    found = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
    return found, sum(output.num_cached_tokens for output in outputs)


SMALL = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.1),
    "int8": ({"quantization": "int8"}, 0.15),
    "int4": ({"quantization": "int4"}, 0.6),
    "int8-keys": ({"kv_cache_dtype": "int8"}, 0.01),
    "fp8-keys": ({"kv_cache_dtype": "fp8"}, 0.05),
    "bfloat16-int8-int8-keys": ({"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}, 0.15),
}
"""Settings, and the distance from float32 that the median token may have, in standard deviations of the
log-probabilities. Rounding changes the experts of some tokens, whose distance is many times as large."""


@every_family
@pytest.mark.parametrize("kind", SMALL)
def test_small_numbers_stay_close_to_float32_and_hits_change_nothing(name: str, kind: str) -> None:
    settings, noise = SMALL[kind]
    expected = parity.oracle(name, (0, 5, 8, 11), 4)
    plain, _ = forced_logprobs(expected.folder, expected, **settings, enable_prefix_caching=False, max_num_seqs=1)
    hit, hits = forced_logprobs(expected.folder, expected, **settings, max_num_seqs=3, **CHUNKS)
    assert hits > 0
    reference = torch.cat(expected.logprobs)
    scale = reference.std()

    def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of each token."""
        return (a - b).pow(2).mean(1).sqrt() / scale

    changes_nothing = kind in ("int8-keys", "fp8-keys") and name == "mamba2"
    assert float(distances(plain, reference).median()) < noise
    assert (float(distances(plain, reference).max()) < LOGPROB_TOLERANCE) == changes_nothing
    same = LOGPROB_TOLERANCE if settings.get("dtype") is None else 0.02
    assert float(distances(hit, plain).pow(2).mean().sqrt()) < same


@pytest.mark.parametrize("name", ["granitehybrid", "mamba2", "qwen3next"])
def test_prompts_that_begin_alike_reuse_their_common_tokens(name: str, tmp_path: Path) -> None:
    """16 requests with 1,024 tokens in common, which arrive together."""
    folder = make_checkpoint(name, tmp_path)
    rng = random.Random(1)
    common = [rng.randrange(2, VOCAB_SIZE) for _ in range(1024)]
    prompts = [common + [rng.randrange(2, VOCAB_SIZE) for _ in range(1 + i)] for i in range(16)]
    limits = {"max_model_len": 1088, "hf_overrides": {"max_position_embeddings": 2048}, "max_num_batched_tokens": 512}
    with engine(folder, **limits, enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected = [generate(llm, [prompt], max_tokens=8)[0] for prompt in prompts]
    with engine(folder, **limits) as llm:
        found = generate(llm, prompts, max_tokens=8)
    assert sum(output.num_cached_tokens for output in found) >= 0.9 * 16 * 1024
    check_close(found, expected)
