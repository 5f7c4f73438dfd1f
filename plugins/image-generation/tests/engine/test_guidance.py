"""Classifier-free guidance gives the tokens of transformers' `generate(guidance_scale=..., negative_prompt_ids=...)`.

transformers combines log-probabilities, we combine logits. These differ by a constant in each row, so tokens and
probabilities are equal.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mvllm import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import TIGHT
from tests.engine.test_batch_invariance import (
    Request,
    alone,
    folder_of,
    invariant_engine,
    make_requests,
    scored,
    teacher_forced,
)
from tests.helpers.late_plugin import LOG
from tests.helpers.model_zoo import BOS_TOKEN_ID, VOCAB_SIZE
from tests.helpers.parity import LOGPROB_TOLERANCE
from tests.helpers.plugins import late_platform_path, prepend
from tests.helpers.thread_executor import ThreadExecutor

NUM_TOKENS = 20
SCALES = (3.0, 1.5, 7.5, 0.5, 0.0, 2.0, 1.0)
THREADS = {"distributed_executor_backend": f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"}


class Oracle:
    """What transformers generates, for guided requests and for ordinary ones.

    Attributes:
        prompts, negative: Token ids. Some share prefixes of several blocks; the two sides have all lengths.
        guided, plain: Greedy continuations.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rng = random.Random(7)
        shared, other = ([rng.randrange(2, VOCAB_SIZE) for _ in range(80)] for _ in range(2))
        lengths = ((5, 7), (40, 3), (1, 50), (70, 70), (33, 17), (16, 16), (64, 1))
        self.prompts = [[*shared[: a - 1], rng.randrange(2, VOCAB_SIZE)] for a, _ in lengths]
        self.negative = [[*other[: b - 1], rng.randrange(2, VOCAB_SIZE)] for _, b in lengths]
        self.guided = [self._generate(i, guided=True) for i in range(len(lengths))]
        self.plain = [self._generate(i, guided=False) for i in range(len(lengths))]

    def _generate(self, i: int, *, guided: bool) -> list[int]:
        settings: dict[str, Any] = {}
        if guided:
            settings = {"guidance_scale": SCALES[i], "negative_prompt_ids": torch.tensor([self.negative[i]])}
        prompt, length = torch.tensor([self.prompts[i]]), {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
        found = self.model.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **length, **settings)
        return found[0, prompt.shape[1] :].tolist()

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]: the logits that predict each token behind a prompt."""
        ids = torch.tensor([prompt + tokens])
        return self.model(ids).logits[0, len(prompt) - 1 : -1]

    def params(self, i: int, **settings: Any) -> SamplingParams:
        settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | settings
        return SamplingParams(guidance_scale=SCALES[i], negative_prompt=self.negative[i], **settings)

    def run(
        self, llm: LLM, which: Sequence[int] = range(len(SCALES)), num_tokens: int = NUM_TOKENS, **settings: Any
    ) -> list[RequestOutput]:
        """Generates guided requests beside ordinary ones, and checks the tokens. Returns the guided ones."""
        prompts, params = [], []
        for i in which:
            prompts += [{"prompt_token_ids": self.prompts[i]}] * 2
            plain = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            params += [self.params(i, max_tokens=num_tokens, **settings), plain]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found[::2] == [self.guided[i][:num_tokens] for i in which]
        assert found[1::2] == [self.plain[i][:num_tokens] for i in which]
        assert llm.llm_engine.stats is not None and llm.llm_engine.stats.kv_cache_usage == 0, "blocks leaked"
        return outputs[::2]


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def test_the_oracle_tells_the_cases_apart(oracle: Oracle) -> None:
    different = [guided != plain for guided, plain in zip(oracle.guided, oracle.plain, strict=True)]
    assert different == [scale != 1.0 for scale in SCALES]


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": False},
        {"async_scheduling": True, "max_num_batched_tokens": 17},
        {"async_scheduling": True, **TIGHT},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3, "enable_prefix_caching": False},
        {"tensor_parallel_size": 2, **THREADS},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 30, **THREADS},
    ],
    ids=["plain", "async in chunks", "async preempted", "three rows", "TP", "PP in chunks"],
)
def test_tokens_of_guided_requests_are_those_of_transformers(
    make_llm: MakeLLM, oracle: Oracle, settings: dict[str, Any]
) -> None:
    llm = make_llm(**settings)
    oracle.run(llm)
    stats = llm.llm_engine.stats
    assert stats is not None
    assert stats.num_preemptions > 0 or "kv_cache_memory_bytes" not in settings
    before = stats.prefix_cache_hits
    outputs = oracle.run(llm)  # with prefixes in the cache, of different lengths on the two sides
    if settings.get("enable_prefix_caching", True):
        assert sum(output.num_cached_tokens for output in outputs) > 0
        on_one_side = 2 * sum(len(prompt) // 16 * 16 for prompt in oracle.prompts)
        assert "kv_cache_memory_bytes" in settings or llm.llm_engine.stats.prefix_cache_hits - before > on_one_side


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tokens_of_guided_requests_are_those_of_transformers_in_processes(make_llm: MakeLLM, oracle: Oracle) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    llm = make_llm(async_scheduling=True, max_num_batched_tokens=40, engine_core_process=True, **sizes)
    for output in oracle.run(llm, logprobs=0):
        assert output.outputs[0].conditional_logprobs is None or len(output.outputs[0].logprobs or ()) == NUM_TOKENS


def test_tokens_stay_on_the_device(
    checkpoint: Path, make_llm: MakeLLM, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepend(monkeypatch, late_platform_path(tmp_path / "plugins"))
    monkeypatch.setenv("FAULT_INJECTION", "none")
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    oracle.run(
        make_llm(platform="late", async_scheduling=True, max_num_batched_tokens=40),
        which=(0, 4),
        num_tokens=6,
        logprobs=1,
    )


@pytest.mark.parametrize("mode", ["static", pytest.param("lazy", marks=pytest.mark.exhaustive)])
def test_devices_with_static_shapes_and_lazy_ones_give_the_same_tokens(
    make_llm: MakeLLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("MVLLM_EXAMPLE_MODE", mode)
    limits = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = make_llm(platform="example", distributed_executor_backend="uni", **limits)
    params = [oracle.params(0, max_tokens=5, logprobs=0), oracle.params(4, max_tokens=5)]
    outputs = llm.generate([{"prompt_token_ids": oracle.prompts[i]} for i in (0, 4)], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [oracle.guided[0][:5], oracle.guided[4][:5]]
    assert len(outputs[0].outputs[0].conditional_logprobs or ()) == 5


@pytest.mark.parametrize("clear_cache", [True, False])
def test_guided_requests_go_on_after_a_pause_and_leave_nothing_when_aborted(
    make_llm: MakeLLM, oracle: Oracle, clear_cache: bool
) -> None:
    llm = make_llm(async_scheduling=True, max_num_batched_tokens=24)
    engine, tokens = llm.llm_engine, dict[str, list[int]]()

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)

    for i in range(4):
        engine.add_request(str(i), {"prompt_token_ids": oracle.prompts[i]}, oracle.params(i))
    for _ in range(12):
        step()
    llm.pause_generation(mode="keep", clear_cache=clear_cache)
    assert llm.is_paused()
    engine.abort_request("3")
    llm.resume_generation()
    while engine.has_unfinished_requests():
        step()
    assert [tokens[str(i)] for i in range(3)] == oracle.guided[:3]
    assert tokens.get("3", []) == oracle.guided[3][: len(tokens.get("3", []))] != oracle.guided[3]
    assert engine.stats is not None and engine.stats.kv_cache_usage == 0
    assert llm.reset_prefix_cache(), "no request holds a block"


def test_conditional_and_guided_logprobs_are_those_of_teacher_forcing(make_llm: MakeLLM, oracle: Oracle) -> None:
    for i, output in enumerate(oracle.run(make_llm(), logprobs=3)):
        found = output.outputs[0]
        tokens = list(found.token_ids)
        conditional, other = (oracle.logits(ids, tokens) for ids in (oracle.prompts[i], oracle.negative[i]))
        guided = (other + SCALES[i] * (conditional - other)).log_softmax(1)
        assert found.logprobs is not None
        for position, (token, entries) in enumerate(zip(tokens, found.logprobs, strict=True)):
            assert entries[token].logprob == pytest.approx(float(guided[position, token]), abs=2e-4)
            assert set(entries) == {token, *guided[position].topk(3).indices.tolist()}
        if SCALES[i] == 1.0:
            assert found.conditional_logprobs is None
            continue
        expected = conditional.log_softmax(1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert found.conditional_logprobs == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)


def test_four_sequences_are_those_of_four_requests(make_llm: MakeLLM, oracle: Oracle) -> None:
    llm = make_llm()
    prompt = {"prompt_token_ids": oracle.prompts[3]}
    settings: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, "repetition_penalty": 1.2, "top_k": 50}
    together = llm.generate(prompt, oracle.params(3, n=4, seed=11, **settings), use_tqdm=False)[0].outputs
    alone = [
        llm.generate(prompt, oracle.params(3, seed=11 + k, **settings), use_tqdm=False)[0].outputs[0] for k in range(4)
    ]
    assert [list(each.token_ids) for each in together] == [list(each.token_ids) for each in alone]
    assert len({tuple(each.token_ids) for each in together}) == 4
    for one, other in zip(together, alone, strict=True):
        assert one.conditional_logprobs == pytest.approx(other.conditional_logprobs, abs=LOGPROB_TOLERANCE)


def test_penalties_and_masks_apply_to_the_combined_logits(make_llm: MakeLLM, oracle: Oracle) -> None:
    allowed = list(range(3, VOCAB_SIZE, 3))
    params = oracle.params(4, allowed_token_ids=allowed, frequency_penalty=2.0)
    found = make_llm().generate({"prompt_token_ids": oracle.prompts[4]}, params, use_tqdm=False)[0].outputs[0]
    tokens: list[int] = []
    for _ in range(NUM_TOKENS):
        conditional, other = (oracle.logits(ids, [*tokens, 0])[-1] for ids in (oracle.prompts[4], oracle.negative[4]))
        logits = other + SCALES[4] * (conditional - other)
        for token in tokens:
            logits[token] -= 2.0
        tokens.append(max(allowed, key=lambda token: float(logits[token])))
    assert list(found.token_ids) == tokens


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_grammar_applies_to_the_combined_logits(make_llm: MakeLLM, oracle: Oracle, async_scheduling: bool) -> None:
    llm = make_llm(async_scheduling=async_scheduling)
    grammar = StructuredOutputsParams(regex="(ab|ba){3}")
    settings: dict[str, Any] = {"detokenize": True, "ignore_eos": False, "structured_outputs": grammar}
    params = [oracle.params(i, **settings) for i in (0, 4)]
    prompts = [{"prompt_token_ids": oracle.prompts[i]} for i in (0, 4)]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert all(re.fullmatch("(ab|ba){3}", text) for text in texts), texts


def test_a_text_needs_no_negative_prompt(make_llm: MakeLLM, oracle: Oracle) -> None:
    llm, prompt = make_llm(), {"prompt_token_ids": oracle.prompts[0]}
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "guidance_scale": 3.0}
    default = llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)[0].outputs[0]
    given = llm.generate(prompt, SamplingParams(negative_prompt=[BOS_TOKEN_ID], **settings), use_tqdm=False)[0]
    assert list(default.token_ids) == list(given.outputs[0].token_ids)
    as_text = llm.llm_engine.tokenizer.decode(oracle.negative[0])  # type: ignore[union-attr]
    ids = llm.llm_engine.tokenizer.encode(as_text)  # type: ignore[union-attr]
    texts = [SamplingParams(negative_prompt=negative, **settings) for negative in (as_text, ids)]
    found = [list(each.outputs[0].token_ids) for each in llm.generate([prompt] * 2, texts, use_tqdm=False)]
    assert found[0] == found[1] != list(default.token_ids)


def test_requests_that_cannot_be_guided_are_refused(make_llm: MakeLLM, oracle: Oracle) -> None:
    llm, prompt = make_llm(), {"prompt_token_ids": oracle.prompts[0]}
    for settings, message in (
        ({"negative_prompt": [VOCAB_SIZE]}, f"negative_prompt: Token ids must be from 0 to {VOCAB_SIZE - 1}"),
        ({"negative_prompt": [3] * 176}, "negative_prompt: The prompt has 176 tokens"),
        ({"token_space": "image"}, "token_space must be one of the spaces of the model .*: 'text'"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, SamplingParams(guidance_scale=2.0, **settings), use_tqdm=False)
    for settings, message in (
        ({"guidance_scale": -1.0}, "guidance_scale must be a number from 0 to 1000"),
        ({"negative_prompt": [1]}, "negative_prompt must be unset without guidance_scale"),
        ({"guidance_scale": 2.0, "negative_prompt": []}, "negative_prompt must be a text"),
        ({"guidance_scale": 2.0, "use_beam_search": True, "n": 2}, "guidance_scale must be unset when use_beam_search"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**settings)
    one_row = make_llm(max_num_seqs=1)
    with pytest.raises(RequestError, match="needs two rows in a step, but the engine has max_num_seqs=1"):
        one_row.generate(prompt, SamplingParams(guidance_scale=2.0), use_tqdm=False)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_ordinary_requests_have_drafts_beside_guided_ones(
    make_llm: MakeLLM, oracle: Oracle, checkpoint: Path, async_scheduling: bool
) -> None:
    drafts = {"model": str(checkpoint), "num_speculative_tokens": 3, "adaptive": False}
    llm = make_llm(speculative_config=drafts, async_scheduling=async_scheduling)
    oracle.run(llm, which=(0, 1, 4))
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_accepted_tokens == stats.num_draft_tokens > 0


def test_batch_invariant_guidance_has_log_probabilities_with_the_same_bits(tmp_path: Path) -> None:
    """The conditional log-probabilities are scored by teacher forcing."""
    params = SamplingParams(
        guidance_scale=3, temperature=0.7, presence_penalty=0.5, seed=1, max_tokens=24, logprobs=0, ignore_eos=True
    )
    requests = [Request(request.prompt[:60], params) for request in make_requests(seed=9, count=6)]
    settings = {"logprobs_mode": "post_temperature_logprobs", "max_num_batched_tokens": 64}
    with invariant_engine(folder_of("llama-gqa", tmp_path), enable_prefix_caching=False, **settings) as llm:
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [scored(output) for output in outputs] == alone(llm, requests)
        for request, output in zip(requests, outputs, strict=True):
            conditional = output.outputs[0].conditional_logprobs
            assert tuple(conditional or ()) == teacher_forced(llm, request, output.outputs[0].token_ids)
