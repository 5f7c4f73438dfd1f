"""Speculative decoding gives the tokens of decoding without it, for every draft method and all request settings."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mvllm import LLM, BeamSearchParams, LoRARequest, RequestError, RequestOutput, SamplingParams
from mvllm.messages.sampling_params import RequestOutputKind, StructuredOutputsParams
from mvllm.sampling.sampler import Sampler
from mvllm.scheduler import draft_length
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import requests, visible_outputs
from tests.helpers import parity
from tests.helpers.async_engine import async_engine, joined, params
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import VOCAB_SIZE, load_reference, make_checkpoint
from tests.helpers.parity import bytes_of_blocks, engine
from tests.helpers.thread_executor import ThreadExecutor
from tests.helpers.threads import generate_in_threads
from tests.helpers.zoo_mtp import MTPReference, nearly_agree

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False}
AHEAD = {"async_scheduling": True}
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"


@cache
def drafts(name: str = "llama-gqa", *, seed: int = 0, noise: float = 0.0, **edits: Any) -> Path:
    """A draft checkpoint: equal to the fixture `checkpoint`, close to it, or different."""
    folder = make_checkpoint(name, Path(tempfile.mkdtemp(prefix="mvllm-draft-")) / name, seed=seed)
    if noise:
        path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
        tensors = {
            key: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            for key, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    if edits:
        path = folder / "config.json"
        text = path.read_text()
        for key, value in edits.items():
            text = text.replace(f'"{key}":', f'"{key}": {value}, "was_{key}":')
        path.write_text(text)
    return folder


def edit_tensor(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name]).clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@cache
def shorter() -> Path:
    """A draft model of 64 learned positions."""
    folder = drafts("gpt2", n_positions=64)
    edit_tensor(folder, "transformer.wpe.weight", lambda table: table[:64])
    return folder


@cache
def larger() -> Path:
    """A draft model whose vocabulary has three more tokens, which it finds more likely than all others."""
    folder = make_checkpoint("llama-odd-vocabulary-tied", Path(tempfile.mkdtemp(prefix="mvllm-draft-")) / "larger")
    edit_tensor(folder, "model.embed_tokens.weight", lambda table: torch.cat((table[:320], table[320:] * 50)))
    return folder


def spec_config(kind: str, count: int = 4) -> dict[str, Any]:
    """Settings of a drafter whose drafts are always accepted (greedily), often, or rarely."""
    if kind == "ngram":
        return {**NGRAM, "num_speculative_tokens": count}
    folder = {"same": drafts(), "near": drafts(noise=0.05), "other": drafts(seed=5)}[kind]
    return {"model": str(folder), "num_speculative_tokens": count, "adaptive": False}


def check_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Asserts equal outputs, except for rounding differences of log-probabilities."""
    for mine, theirs in zip(found, expected, strict=True):
        assert visible_outputs(mine) == visible_outputs(theirs)
        pairs = [(a.logprobs or [], b.logprobs or []) for a, b in zip(mine.outputs, theirs.outputs, strict=True)]
        if mine.outputs[0].error is None:  # otherwise only the entries that were complete before the error
            pairs.append((mine.prompt_logprobs or [], theirs.prompt_logprobs or []))
        for mine_here, theirs_here in pairs:
            for a, b in zip(mine_here, theirs_here, strict=True):
                assert (a is None) == (b is None)
                for token in a or ():
                    assert b is not None and a is not None
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def run(llm: LLM, prompts: list[list[int]], sampling: Any) -> list[RequestOutput]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, sampling, use_tqdm=False, raise_on_error=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def acceptance(llm: LLM) -> tuple[int, int]:
    """Numbers of draft tokens and accepted tokens since the start."""
    stats = llm.llm_engine.stats
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


# ---------------------------------------------------------------------------------------- for all request settings


@pytest.mark.parametrize(
    ("kind", "count", "settings", "num_blocks"),
    [
        pytest.param("ngram", 4, {}, None, marks=pytest.mark.exhaustive),
        ("ngram", 9, {"max_num_batched_tokens": 17, "scheduling_policy": "priority"}, 12),
        pytest.param("same", 1, {"max_num_batched_tokens": 16, "max_num_seqs": 3}, None, marks=pytest.mark.exhaustive),
        pytest.param("same", 5, {"enable_prefix_caching": False}, 12, marks=pytest.mark.exhaustive),
        ("near", 3, {"max_num_batched_tokens": 33, **AHEAD}, 12),
        pytest.param("ngram", 9, {"max_num_batched_tokens": 17, **AHEAD}, 12, marks=pytest.mark.exhaustive),
        pytest.param("same", 5, {"distributed_executor_backend": "mp", **AHEAD}, 12, marks=pytest.mark.exhaustive),
        pytest.param("near", 3, {"max_num_batched_tokens": 33}, 12, marks=pytest.mark.exhaustive),
        pytest.param("other", 8, {"enable_chunked_prefill": False, **AHEAD}, 12, marks=pytest.mark.exhaustive),
        pytest.param("other", 8, {"enable_chunked_prefill": False}, 12, marks=pytest.mark.exhaustive),
    ],
)
def test_every_request_gives_the_outputs_without_speculation(
    make_llm: MakeLLM, kind: str, count: int, settings: dict[str, Any], num_blocks: int | None
) -> None:
    prompts, params = requests(seed=count)
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    settings = {**settings, "speculative_config": spec_config(kind, count)}
    if num_blocks is not None:
        settings["kv_cache_memory_bytes"] = bytes_of_blocks(make_llm(**settings), num_blocks)
    llm = make_llm(**settings)
    for _ in range(2):  # the second time with prefixes in the cache
        found = llm.generate(prompts, params, use_tqdm=False)
        check_close(found, expected)
    guessed, right = acceptance(llm)
    assert 0 < right <= guessed
    assert llm.reset_prefix_cache()


KINDS: dict[str, Callable[[random.Random], Any]] = {
    "max_tokens": lambda rng: rng.choice([1, 2, 3, 10, 40, 40, 40, None]),
    "seed": lambda rng: rng.randrange(9),
    "temperature": lambda rng: rng.choice([0, 0, 0.3, 0.7, 1.0]),
}
SOMETIMES: dict[str, Callable[[random.Random], Any]] = {
    "ignore_eos": lambda rng: True,
    "stop": lambda rng: rng.choice([list("aeiou"), ["th"], ["zz", "e"]]),
    "stop_token_ids": lambda rng: list(range(rng.randrange(9), VOCAB_SIZE, rng.choice([9, 30]))),
    "min_tokens": lambda rng: 1,
    "repetition_penalty": lambda rng: rng.choice([1.3, 0.8]),
    "frequency_penalty": lambda rng: rng.choice([0.5, -0.4]),
    "logprobs": lambda rng: rng.choice([0, 2]),
    "prompt_logprobs": lambda rng: rng.choice([0, 1]),
    "top_k": lambda rng: rng.choice([1, 5, 20]),
    "top_p": lambda rng: 0.9,
    "min_p": lambda rng: 0.05,
    "logit_bias": lambda rng: {rng.randrange(2, VOCAB_SIZE): rng.choice([-100, 5, 20]) for _ in range(3)},
    "allowed_token_ids": lambda rng: rng.sample(range(2, VOCAB_SIZE), rng.choice([2, 5, 60])),
    "bad_words": lambda rng: ["e", "th", "o b"],
    "structured_outputs": lambda rng: StructuredOutputsParams(regex="[a-z ]{3,30}"),
}
MODELS = ("llama-gqa", "mistral-window", "qwen2-layer-types", "gpt2", "opt", "gemma3")


def random_requests(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which share prefixes or repeat themselves, with compatible settings."""
    shared, loop = draw(rng, 100), draw(rng, rng.randrange(1, 6))
    prompts, wanted = [], []
    while len(prompts) < 9:
        length = rng.choice((1, 2, 15, 16, 17, 32, 33, 64, 100))
        own = rng.randrange(1, length + 1)
        settings = {name: choose(rng) for name, choose in KINDS.items()}
        settings |= {name: choose(rng) for name, choose in SOMETIMES.items() if rng.random() < 0.2}
        try:
            wanted.append(SamplingParams(**settings))
        except RequestError:  # these two settings exclude each other
            continue
        repeats = rng.random() < 0.4
        prompts.append((loop * 100)[:length] if repeats else shared[: length - own] + draw(rng, own))
    return prompts, wanted


def change_draft_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive number of draft tokens changes with most steps."""
    for name in ("_FIRST_INTERVAL", "_FIRST_INTERVAL_OF_MANY", "_LONGEST_INTERVAL", "_TRIAL_STEPS"):
        monkeypatch.setattr(draft_length, name, 1)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(3, 60))])
def test_random_engines_and_requests_give_the_outputs_without_speculation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    change_draft_lengths(monkeypatch)
    name = rng.choice(MODELS)
    folder = drafts(name)
    prompts, wanted = random_requests(rng)
    guess: dict[str, Any] = {
        "num_speculative_tokens": rng.choice([1, 2, 3, 5, 8, 16]),
        "adaptive": rng.choice([True, True, False]),
    }
    if rng.random() < 0.4:
        guess |= {"method": "ngram", "prompt_lookup_min": rng.randrange(1, 4)}
    else:
        guess["model"] = str(rng.choice([folder, drafts(name, noise=0.05), drafts(rng.choice(MODELS))]))
    settings: dict[str, Any] = {"max_num_seqs": rng.choice([1, 3, 16]), "speculative_config": guess}
    settings["max_num_batched_tokens"] = rng.choice([16, 17, 40, 64])
    if rng.random() < 0.2:
        settings |= {"distributed_executor_backend": THREADS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    elif seed % 3:
        settings["async_scheduling"] = True
    with engine(folder) as llm:
        expected = run(llm, prompts, wanted)
    if rng.random() < 0.5:
        with engine(folder, **settings) as llm:
            num_blocks = llm.llm_engine.cache_summary.blocks_per_request + rng.choice([0, 2])
            settings["kv_cache_memory_bytes"] = bytes_of_blocks(llm, num_blocks)
    with engine(folder, **settings) as llm:
        for num_threads in (1, 3):
            check_close(generate_in_threads(llm, prompts, wanted, num_threads), expected)
        llm.llm_engine._client._core.scheduler.check_integrity()


def test_a_stop_string_within_a_draft_cuts_tokens_text_and_log_probabilities(make_llm: MakeLLM) -> None:
    prompt = draw(random.Random(1), 20)
    plain = make_llm()
    text = run(plain, [prompt], SamplingParams(temperature=0, max_tokens=17))[0].outputs[0].text
    for include in (False, True):
        llm = make_llm(speculative_config=spec_config("same", 16), async_scheduling=include)
        for stop in [text[i : i + 2] for i in range(2, len(text) - 2, 5)]:
            for kind in RequestOutputKind:
                params = SamplingParams(
                    temperature=0,
                    max_tokens=40,
                    stop=[stop],
                    logprobs=0,
                    include_stop_str_in_output=include,
                    output_kind=kind,
                )
                found = run(llm, [prompt], params)[0].outputs[0]
                if kind is RequestOutputKind.FINAL_ONLY:
                    check_close(run(llm, [prompt], params), run(plain, [prompt], params))
                assert found.finish_reason == "stop" and found.stop_reason == stop
                assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)


def test_pooling_beam_search_and_parallel_sampling_give_the_outputs_without_speculation(make_llm: MakeLLM) -> None:
    prompts = [draw(random.Random(i), 10 + 11 * i) for i in range(4)]
    several = SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=20, detokenize=False)
    beams = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)

    def everything(llm: LLM) -> list[Any]:
        beam = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], beams)
        vectors = [output.outputs.data for output in llm.encode(prompts, use_tqdm=False)]
        found = [[list(each.token_ids) for each in output.outputs] for output in run(llm, prompts, several)]
        return [[list(each.tokens) for output in beam for each in output.sequences], found, vectors]

    *expected, vectors = everything(make_llm())
    for kind in ("ngram", "same"):
        ahead = kind == "ngram"
        *found, mine = everything(
            make_llm(speculative_config=spec_config(kind), max_num_batched_tokens=32, async_scheduling=ahead)
        )
        assert found == expected
        for a, b in zip(mine, vectors, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_each_request_uses_its_own_lora_adapter(checkpoint: Path, make_llm: MakeLLM, tmp_path: Path) -> None:
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", checkpoint, seed=1)))
    prompts = [draw(random.Random(7), 20)] * 4 + [[5, 6] * 12] * 2
    whose = [None, adapter, None, adapter, adapter, None]
    greedy = SamplingParams(max_tokens=24, **GREEDY)
    outputs, constrained = [], []
    for speculative in (None, spec_config("same"), spec_config("ngram")):
        ahead = speculative is not None and "model" in speculative
        llm = make_llm(
            enable_lora=True, speculative_config=speculative, max_num_batched_tokens=32, async_scheduling=ahead
        )
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False, lora_request=whose)
        outputs.append(tokens(found))
        formed = SamplingParams(
            n=3, seed=3, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-f]{9}")
        )
        found = llm.generate([{"prompt_token_ids": prompts[0]}] * 2, formed, use_tqdm=False, lora_request=whose[:2])
        constrained.append([[list(each.token_ids) for each in output.outputs] for output in found])
        assert all(re.fullmatch("[a-f]{9}", each.text) for output in found for each in output.outputs)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0] != outputs[0][1]
    assert constrained[0] == constrained[1] == constrained[2], "n sequences with a grammar and an adapter"
    assert constrained[0][0] != constrained[0][1]


def test_requests_with_grammars_have_drafts(make_llm: MakeLLM) -> None:
    kinds = (("ngram", 5, True), ("same", 4, False), ("near", 7, True))
    check_grammars(
        make_llm,
        [{"speculative_config": spec_config(kind, count), "async_scheduling": ahead} for kind, count, ahead in kinds],
    )


def check_grammars(make_llm: MakeLLM, engines: list[dict[str, Any]], **common: Any) -> None:
    """Tokens with grammars, also where reasoning ends within a draft, with penalties, and with tokens that the grammar
    refuses.

    Args:
        engines: Settings of engines with drafts.
        common: Settings of all engines.
    """
    words = StructuredOutputsParams(regex="(ab|cd|ef)( (ab|cd|ef)){2,12}")
    reasoning = StructuredOutputsParams(choice=["abcabcabcabc", "abcabd"], thoughts_start="<", thoughts_end=">")
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 9}
    forms = [words, reasoning, StructuredOutputsParams(json=schema)]
    settings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0, "n": 1}]
    settings[2] |= {"presence_penalty": 1.0, "min_tokens": 9, "logprobs": 1}
    wanted = [
        SamplingParams(seed=5, max_tokens=40, structured_outputs=form, **each) for form in forms for each in settings
    ]
    wanted.append(SamplingParams(max_tokens=30, **GREEDY))
    prompts = [draw(random.Random(9), 20)] * len(wanted)
    expected = run(make_llm(**common), prompts, wanted)
    for each in engines:
        llm = make_llm(**common, **each)
        check_close(run(llm, prompts[:-1], wanted[:-1]), expected[:-1])
        guessed, right = acceptance(llm)
        assert 0 < right <= guessed
        check_close(run(llm, prompts, wanted), expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_aborted_request_leaves_no_state(make_llm: MakeLLM, ahead: bool) -> None:
    check_aborts(make_llm, spec_config("near"), async_scheduling=ahead)


def check_aborts(make_llm: MakeLLM, speculative: dict[str, Any], **settings: Any) -> None:
    """Requests that are aborted after every number of steps change no token of others and leave no block."""
    llm = make_llm(speculative_config=speculative, **settings)
    prompts = [draw(random.Random(i), 20) for i in range(4)]
    greedy = SamplingParams(max_tokens=40, **GREEDY)
    expected = tokens(run(make_llm(**settings), prompts, greedy))
    llm_engine = llm.llm_engine
    for i in range(12):
        for place, prompt in enumerate(prompts):
            llm_engine.add_request(f"{i}-{place}", {"prompt_token_ids": prompt}, greedy)
        for _ in range(i):
            llm_engine.step()
        llm_engine.abort_request(f"{i}-{i % 4}")
        found = {}
        while llm_engine.has_unfinished_requests():
            found |= {each.request_id: list(each.outputs[0].token_ids) for each in llm_engine.step()}
        assert f"{i}-{i % 4}" not in found
        assert all(each == expected[int(name[-1])] for name, each in found.items())
    scheduler = llm_engine._client._core.scheduler
    scheduler.check_integrity()
    assert scheduler.make_stats().kv_cache_usage == 0


# ------------------------------------------------------------------------------------------------ for every draft
# method


def test_all_drafts_of_the_target_model_are_accepted(make_llm: MakeLLM) -> None:
    prompts = [draw(random.Random(i), length) for i, length in enumerate((1, 15, 16, 17, 31, 32, 48, 100))]
    llm = make_llm(speculative_config=spec_config("same", 3), max_num_batched_tokens=40)
    sampling = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=t, seed=1) for t in (0, 0.7)]
    for each in sampling:
        run(llm, prompts, each)
    guessed, right = acceptance(llm)
    assert guessed == right > 8 * 2 * 15


def test_prompts_that_all_fill_their_blocks_in_one_step(make_llm: MakeLLM) -> None:
    """No request has a slot for the draft model's next token, and more prompts come with the next step."""
    prompts = [draw(random.Random(i), 16) for i in range(24)]
    greedy = SamplingParams(max_tokens=20, **GREEDY)
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=8, speculative_config=spec_config("same", 3))
    assert tokens(run(llm, prompts, greedy)) == tokens(run(make_llm(), prompts, greedy))
    guessed, right = acceptance(llm)
    assert guessed == right > 0


@pytest.mark.parametrize("first", [{"structured_outputs": StructuredOutputsParams(regex="[a-z]{3,9}")}, {"n": 1}])
def test_the_draft_model_computes_prefixes_that_the_target_has_cached(make_llm: MakeLLM, first: dict[str, Any]) -> None:
    """The earlier request used no drafts, or ended before the draft model had computed its prompt."""
    llm = make_llm(speculative_config=spec_config("same", 3))
    prompt = draw(random.Random(3), 64)
    run(llm, [prompt], SamplingParams(max_tokens=4 if "n" not in first else 1, temperature=0, **first))
    before = acceptance(llm)
    output = run(llm, [[*prompt, 9]], SamplingParams(max_tokens=30, **GREEDY))[0]
    assert output.num_cached_tokens == 64
    guessed, right = (now - then for now, then in zip(acceptance(llm), before, strict=True))
    assert guessed == right > 0


@pytest.mark.parametrize(
    "draft",
    [
        larger,
        shorter,
        lambda: drafts("gpt2"),
        lambda: drafts("qwen2-layer-types"),
        lambda: drafts("llama-mqa-biases"),
    ],
    ids=["larger vocabulary", "shorter", "learned positions", "windows", "other heads"],
)
def test_a_draft_model_may_have_another_architecture(make_llm: MakeLLM, draft: Callable[[], Path]) -> None:
    prompts = [draw(random.Random(i), length) for i, length in enumerate((1, 16, 40, 62, 63, 64, 65, 90))]
    greedy = SamplingParams(max_tokens=40, logprobs=1, **GREEDY)
    speculative = {"model": str(draft()), "num_speculative_tokens": 3}
    llm = make_llm(speculative_config=speculative, max_num_batched_tokens=40)
    check_close(run(llm, prompts, greedy), run(make_llm(), prompts, greedy))
    assert acceptance(llm)[0] > 0


def draft_lengths(llm: LLM, prompt: list[int]) -> list[tuple[int, list[int]]]:
    """After each step of a request: its number of tokens, and the draft of the next ones."""
    llm.llm_engine.add_request("watched", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=30, **GREEDY))
    found = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        found += [
            (len(r.token_ids), r.draft_token_ids) for r in llm.llm_engine._client._core.scheduler.requests.running
        ]
    return found


def test_there_are_no_drafts_beyond_the_last_position_of_the_draft_model(make_llm: MakeLLM) -> None:
    llm = make_llm(speculative_config={"model": str(shorter()), "num_speculative_tokens": 5})
    found = draft_lengths(llm, draw(random.Random(0), 52))
    assert all(length + len(drafts) <= 65 for length, drafts in found if drafts)
    assert any(length + len(drafts) == 65 for length, drafts in found)
    assert max(length for length, _ in found) > 70


def test_tokens_that_only_the_draft_model_has_are_never_drafted(make_llm: MakeLLM) -> None:
    llm = make_llm(speculative_config={"model": str(larger()), "num_speculative_tokens": 5})
    found = [token for _, drafts in draft_lengths(llm, draw(random.Random(0), 20)) for token in drafts]
    assert len(found) > 50 and max(found) < VOCAB_SIZE


def test_a_draft_model_with_fewer_tokens_than_the_model(make_llm: MakeLLM) -> None:
    large = drafts("llama-odd-vocabulary-tied")
    prompts = [[5, 6, 322, 320, 9] * 5, [321] * 7]
    sampling = SamplingParams(max_tokens=40, temperature=0, logit_bias={321: 8.0, 322: 8.0}, ignore_eos=True)
    found = []
    for speculative in (None, spec_config("same"), {"model": str(large), "num_speculative_tokens": 3}):
        found.append(tokens(run(make_llm(model=large, speculative_config=speculative), prompts, sampling)))
    assert found[0] == found[1] == found[2]
    assert {321, 322} & set(found[0][0] + found[0][1])


# ------------------------------------------------------------------------------------------------- sampled distribution

FEW_TOKENS = (20, 45, 70, 101, 150, 222)


def check_distribution(
    folder: Path, speculative: dict[str, Any], *, model: PreTrainedModel | None = None, num_samples: int = 1200
) -> None:
    """Three sampled tokens have the probabilities that follow from the logits of transformers: chi-square.

    Six tokens are allowed, of which top-p leaves out some. The prompt repeats them, so that every method has drafts.

    Args:
        folder: The served model.
        speculative: `speculative_config` of a method that proposes at least two draft tokens here.
        model: That model in transformers; by default it is read from `folder`.
        num_samples: Sequences, with a seed each.
    """
    prompt = [*FEW_TOKENS, *FEW_TOKENS[::-1], *FEW_TOKENS[::2], *FEW_TOKENS[1::2], *FEW_TOKENS]
    settings = {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.15}
    wanted = [
        SamplingParams(
            n=100, seed=1000 * i, max_tokens=3, allowed_token_ids=list(FEW_TOKENS), ignore_eos=True, **settings
        )
        for i in range(num_samples // 100)
    ]
    with engine(folder, max_num_seqs=24, speculative_config=speculative) as llm:
        outputs = run(llm, [prompt] * len(wanted), wanted)
        drafted, accepted = acceptance(llm)
    assert 0.01 * num_samples < accepted <= drafted
    found = Counter(tuple(each.token_ids) for output in outputs for each in output.outputs)
    probabilities = probabilities_of_three(model or load_reference(folder), prompt, **settings)
    assert found.keys() <= {tokens for tokens, p in probabilities.items() if p > 0}
    cells = [(found[tokens], num_samples * p) for tokens, p in probabilities.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + [(sum(a for a, _ in rare), sum(b for _, b in rare))]
    assert len(cells) > 12
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells if expected)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@torch.inference_mode()
def probabilities_of_three(
    model: PreTrainedModel, prompt: list[int], temperature: float, top_p: float, repetition_penalty: float
) -> dict[tuple[int, ...], float]:
    """The probability of each three tokens of FEW_TOKENS, by their definition."""
    tokens = torch.tensor(FEW_TOKENS)
    threes = list(itertools.product(range(len(tokens)), repeat=3))
    sequences = [[*prompt, FEW_TOKENS[a], FEW_TOKENS[b]] for a, b in itertools.product(range(len(tokens)), repeat=2)]
    logits = model(torch.tensor(sequences)).logits[:, -3:, tokens].float()
    # Every token is in the prompt, so all have the penalty.
    logits = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty) / temperature
    probabilities, order = logits.softmax(-1).sort(descending=True)
    probabilities = probabilities * (probabilities.cumsum(-1) - probabilities < top_p)
    probabilities = torch.zeros_like(probabilities).scatter(-1, order, probabilities)
    probabilities = (probabilities / probabilities.sum(-1, keepdim=True)).double()
    return {
        tuple(FEW_TOKENS[i] for i in (a, b, c)): float(probabilities[a * len(tokens) + b, range(3), (a, b, c)].prod())
        for a, b, c in threes
    }


@pytest.mark.parametrize("kind", ["ngram", "near", "mtp"])
def test_sampled_tokens_have_the_distribution_of_the_model(kind: str) -> None:
    if kind == "mtp":
        made = MTPReference("mimo", Path(tempfile.mkdtemp(prefix="mvllm-mtp-")) / "mimo", edit=nearly_agree)
        settings = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
        check_distribution(made.folder, settings, model=made.model)
    else:
        check_distribution(drafts(), spec_config(kind, 2))


# ------------------------------------------------------------------------------------------------------------- failures


def replace_logits_at(monkeypatch: pytest.MonkeyPatch, length: int, value: float) -> None:
    """Replaces the logits after the first `length` tokens of row 0."""
    sample = Sampler.sample

    def sample_replaced(self: Sampler, logits: torch.Tensor, rows: np.ndarray, *args: Any, **settings: Any) -> Any:
        seq_lens = settings.get("seq_lens")
        seq_lens = args[1].num_tokens[rows] if seq_lens is None else seq_lens
        at = np.flatnonzero((rows == 0) & (seq_lens == length))
        if len(at):
            logits = logits.clone()
            logits[at] = value
        return sample(self, logits, rows, *args, **settings)

    monkeypatch.setattr(Sampler, "sample", sample_replaced)


NAN, NOTHING = float("nan"), float("-inf")
EVERY_TIME = {
    ("same", 12, NOTHING, False),
    ("same", 14, NAN, True),
    ("ngram", 14, NOTHING, True),
    ("ngram", 16, NAN, False),
}
"""Kinds of drafts, lengths and values that every run tests: in the prompt's step, and in both places of a draft."""


@pytest.mark.parametrize(
    ("kind", "length", "value", "ahead"),
    [
        pytest.param(*each, marks=() if each in EVERY_TIME else pytest.mark.exhaustive)
        for each in itertools.product(("same", "ngram"), (12, 14, 16), (NAN, NOTHING), (False, True))
    ],
)
def test_invalid_logits_fail_the_request_at_their_position(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, kind: str, length: int, value: float, ahead: bool
) -> None:
    prompts = [[7, 8, 9] * 4, [5, 6] * 5]
    greedy = [SamplingParams(max_tokens=20, logprobs=0, output_kind=k, **GREEDY) for k in (0, 2)]
    plain, llm = make_llm(), make_llm(speculative_config=spec_config(kind, 8), async_scheduling=ahead)
    whole = tokens(run(plain, prompts, greedy))
    replace_logits_at(monkeypatch, length, value)
    results = []
    for each in (plain, llm):
        first, second = run(each, prompts, greedy)
        results.append((list(first.outputs[0].token_ids), first.outputs[0].finish_reason, first.outputs[0].error))
        assert list(second.outputs[0].token_ids) == whole[1]
    assert results[0] == results[1]
    assert results[0][1] == "error"

    # The tokens before this position are valid: a request that ends there succeeds.
    if length > 12:
        ending = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[whole[0][length - 13]])
        a, b = (run(each, [prompts[0]], ending)[0].outputs[0] for each in (plain, llm))
        assert (list(a.token_ids), a.finish_reason) == (list(b.token_ids), b.finish_reason)
        assert b.finish_reason == "stop"


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_after_sleep_drafts_are_accepted_as_before(make_llm: MakeLLM, level: int) -> None:
    llm = make_llm(speculative_config=spec_config("same", 3), async_scheduling=level == 2)
    prompts = [draw(random.Random(i), 33) for i in range(3)]
    greedy = SamplingParams(max_tokens=20, **GREEDY)
    expected = tokens(run(llm, prompts, greedy))
    before = acceptance(llm)
    llm.sleep(level)
    for tag in ("weights", "kv_cache"):
        llm.wake_up([tag])
    assert tokens(run(llm, prompts, greedy)) == expected
    guessed, right = (now - then for now, then in zip(acceptance(llm), before, strict=True))
    assert guessed == right > 0


# ------------------------------------------------------------------------------------------------------ on every
# executor

WHICH, NUM_TOKENS = (0, 5, 6, 8, 10, 11, 15), 24


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "gemma3",
        pytest.param("gpt2", marks=pytest.mark.exhaustive),
        pytest.param("opt", marks=pytest.mark.exhaustive),
        pytest.param("qwen2-layer-types", marks=pytest.mark.exhaustive),
        pytest.param("gemma2", marks=pytest.mark.exhaustive),
        pytest.param("mistral-window", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("kind", ["ngram", "same"])
def test_tokens_are_those_of_transformers(name: str, kind: str) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    speculative = NGRAM if kind == "ngram" else {"model": str(expected.folder), "num_speculative_tokens": 5}
    with engine(expected.folder, speculative_config=speculative, max_num_batched_tokens=32) as llm:
        for _ in range(2):
            parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))
        guessed, right = acceptance(llm)
    assert guessed >= right and (kind == "ngram" or guessed == right > 0)


LAYOUTS = [(kind, *layout) for kind in ("ngram", "near") for layout in ((2, 1), (1, 2), (2, 2))]
SHORT = [("near", 2, 1), ("ngram", 1, 2)]


@pytest.mark.parametrize(
    ("kind", "tensor", "pipeline", "backend"),
    [
        *(pytest.param(*each, THREADS, marks=[pytest.mark.exhaustive] * (each not in SHORT)) for each in LAYOUTS),
        *(pytest.param(*each, "mp", marks=pytest.mark.exhaustive) for each in LAYOUTS),
    ],
)
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_several_workers_agree(
    make_llm: MakeLLM, kind: str, tensor: int, pipeline: int, backend: str, ahead: bool
) -> None:
    """All ranks of a group hold the same drafts; with pipeline stages drafts go through the scheduler."""
    prompts, params = requests(seed=9)
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    settings = {"distributed_executor_backend": backend, "max_num_batched_tokens": 32, "async_scheduling": ahead}
    llm = make_llm(**sizes, **settings, speculative_config=spec_config(kind))
    check_close(llm.generate(prompts, params, use_tqdm=False), expected)
    assert acceptance(llm)[1] > 0


def test_stream_deltas_add_up_to_the_output(checkpoint: Path) -> None:
    prompts = [[5, 6, 7] * 6, draw(random.Random(0), 30), draw(random.Random(1), 16)]
    settings = [
        {"max_tokens": 40},
        {"max_tokens": 33, "temperature": 0.5, "seed": 2},
        {"stop": ["e"], "max_tokens": 60},
    ]
    asked = [params(**each) for each in settings]

    async def all_of(llm: Any, kind: RequestOutputKind) -> list[tuple[list[int], str]]:
        def one(i: int) -> Any:
            wanted = params(output_kind=kind, **settings[i])
            return joined(llm.generate({"prompt_token_ids": prompts[i]}, wanted, f"{kind}-{i}"))

        return list(await asyncio.gather(*map(one, range(3))))

    with engine(checkpoint) as llm:
        expected = [(list(o.outputs[0].token_ids), o.outputs[0].text) for o in run(llm, prompts, asked)]
    with async_engine(checkpoint, speculative_config=spec_config("near"), async_scheduling=True) as llm:
        assert asyncio.run(all_of(llm, RequestOutputKind.DELTA)) == expected
