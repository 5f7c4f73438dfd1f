"""With batch_invariant, the log-probabilities of a request have the same bits in every batch and on every path."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, AsyncLLM, ConfigError, RequestOutput, SamplingParams
from tests.engine.test_speculative import THREADS, spec_config
from tests.helpers.async_engine import async_engine, last
from tests.helpers.model_zoo import VOCAB_SIZE, make_checkpoint
from tests.helpers.parity import bytes_of_blocks, engine

LONGEST = 560
"""Tokens of the longest prompt: longer than the segments of keys in which attention adds up."""

ROOM = 80
"""Most tokens of an output, and the rest of the context."""

MODELS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
EXHAUSTIVE_MODELS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "int8 in float32": {"quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistral-window": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3moe": {},
    "gptoss-plain": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma3": {},
}
"""Checkpoints with windows, norms of heads, experts and sinks, and changes of their `config.json`."""


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
PATHS: dict[str, dict[str, Any]] = {
    "cuts, hits and preemption": {"max_num_batched_tokens": 90, "blocks": 48},
    "drafts": {"max_num_batched_tokens": 200, "speculative_config": NGRAM},
    "eager, whole prompts": {"max_num_batched_tokens": 4096, "enforce_eager": True, "enable_prefix_caching": False},
}

Scored = tuple[tuple[int, ...], tuple[float, ...]]
"""The tokens of an output, and their log-probabilities."""


@dataclass(frozen=True)
class Request:
    """One request of the test, with a seed of its own."""

    prompt: tuple[int, ...]
    params: SamplingParams


def make_requests(seed: int, count: int) -> list[Request]:
    """Requests whose prompts share prefixes of all lengths, with greedy and random sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(LONGEST)]
    found = []
    for i in range(count):
        length = rng.choice([1, 2, 15, 17, 60, 130, 130, 300, 300, LONGEST])
        own = rng.randrange(1, length + 1)
        prompt = (*shared[: length - own], *(rng.randrange(2, VOCAB_SIZE) for _ in range(own)))
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 0, 9]),
            min_p=rng.choice([0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            seed=i,
            max_tokens=rng.choice([1, 20, ROOM]),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        found.append(Request(prompt, params))
    return found


def scored(output: RequestOutput) -> Scored:
    """Tokens and log-probabilities of a finished request."""
    [sequence] = output.outputs
    assert sequence.logprobs is not None
    tokens = tuple(sequence.token_ids)
    return tokens, tuple(entry[token].logprob for token, entry in zip(tokens, sequence.logprobs, strict=True))


def alone(llm: LLM, requests: Sequence[Request]) -> list[Scored]:
    """Each request in a batch of its own, computed from scratch."""
    results = []
    for request in requests:
        [output] = llm.generate({"prompt_token_ids": list(request.prompt)}, request.params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        results.append(scored(output))
    return results


def together(llm: LLM, requests: Sequence[Request], rng: random.Random) -> tuple[list[Scored], int]:
    """The requests in batches of changing size: they start at random times. Also the number of cached tokens."""
    core, waiting = llm.llm_engine, list(range(len(requests)))
    rng.shuffle(waiting)
    found: dict[int, Scored] = {}
    num_cached = 0
    while waiting or core.has_unfinished_requests():
        for _ in range(min(len(waiting), rng.choice([0, 0, 0, 1, 3, len(requests) // 2]))):
            i = waiting.pop()
            core.add_request(str(i), {"prompt_token_ids": list(requests[i].prompt)}, requests[i].params)
        for output in core.step():
            if output.finished:
                found[int(output.request_id)] = scored(output)
                num_cached += output.num_cached_tokens or 0
    return [found[i] for i in range(len(requests))], num_cached


def teacher_forced(llm: LLM, request: Request, tokens: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of `tokens` in a prompt that ends with them."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    ids = [*request.prompt, *tokens]
    [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(request.prompt) :]
    return tuple(entry[token].logprob for token, entry in zip(tokens, entries, strict=True) if entry is not None)


@cache
def folder_of(name: str, root: Path) -> Path:
    return make_checkpoint(name, root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariant")


@contextmanager
def invariant_engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine with batch_invariant; `blocks` is the size of its KV cache in blocks."""
    longest = LONGEST + ROOM + 1
    overrides = {"max_position_embeddings": longest, **settings.pop("hf_overrides", {})}
    common = {"max_model_len": longest, "hf_overrides": overrides, "max_num_seqs": 32, "batch_invariant": True}
    blocks = settings.pop("blocks", None)
    if blocks is not None:
        with engine(folder, **common, **settings) as measured:
            settings["kv_cache_memory_bytes"] = bytes_of_blocks(measured, blocks)
    with engine(folder, **common, **settings) as llm:
        yield llm


def check_invariance(
    folder: Path, settings: dict[str, Any], paths: Sequence[str], seed: int, count: int
) -> Counter[str]:
    """The property: every path gives the bits of a request that is alone. Returns how often the paths were taken."""
    taken: Counter[str] = Counter()
    requests = make_requests(seed, count)
    with invariant_engine(folder, max_num_batched_tokens=1024, enable_prefix_caching=False, **settings) as llm:
        expected = alone(llm, requests)
        for request, (tokens, logprobs) in zip(requests, expected, strict=True):
            assert teacher_forced(llm, request, tokens) == logprobs
    for path in paths:
        rng = random.Random(seed)
        with invariant_engine(folder, **settings, **PATHS[path]) as llm:
            found, num_cached = together(llm, requests, rng)
            stats = llm.llm_engine._client._core.scheduler.make_stats()
            taken["hits"] += num_cached
            taken["preemptions"] += stats.num_preemptions
            taken["accepted"] += stats.num_accepted_tokens
            taken["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
            for request, mine, theirs in zip(requests, found, expected, strict=True):
                assert mine == theirs, (path, len(request.prompt), request.params)
            if llm.llm_engine.cache_summary.num_blocks < 100:  # the prompts are cut, and partly found in the cache
                for request, (tokens, logprobs) in zip(requests, expected, strict=True):
                    assert teacher_forced(llm, request, tokens) == logprobs
    return taken


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_have_the_same_bits_on_every_path(root: Path, model: str) -> None:
    """Batches of 1 to 32, cut prompts, prefix hits, preemption, draft tokens, and teacher forcing."""
    taken = check_invariance(folder_of("llama-gqa", root), MODELS[model], list(PATHS)[:2], seed=1, count=32)
    assert all(taken[path] > 0 for path in ("hits", "preemptions", "accepted", "rejected")), taken


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("model", [*MODELS, *EXHAUSTIVE_MODELS])
def test_more_requests_dtypes_and_paths(root: Path, model: str, seed: int, path: str) -> None:
    settings = (MODELS | EXHAUSTIVE_MODELS)[model]
    check_invariance(folder_of("llama-gqa", root), settings, [path], seed=seed, count=48)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_windows_sinks_and_experts(root: Path, architecture: str, model: str) -> None:
    settings = {**MODELS[model], "hf_overrides": ARCHITECTURES[architecture]}
    check_invariance(folder_of(architecture, root), settings, list(PATHS), seed=7, count=32)


@pytest.fixture(scope="module")
def plain(root: Path) -> tuple[list[Request], list[Scored]]:
    """Short requests, and their results in an engine of one worker without drafts."""
    requests = [Request(request.prompt[:90], request.params) for request in make_requests(seed=11, count=10)]
    with invariant_engine(folder_of("llama-gqa", root), enable_prefix_caching=False) as llm:
        return requests, alone(llm, requests)


def test_pipeline_stages_give_the_same_bits(root: Path, plain: tuple[list[Request], list[Scored]]) -> None:
    requests, expected = plain
    settings = {"pipeline_parallel_size": 2, "distributed_executor_backend": THREADS, "max_num_batched_tokens": 40}
    with invariant_engine(folder_of("llama-gqa", root), **settings) as llm:
        assert together(llm, requests, random.Random(1))[0] == expected


def test_replicas_give_the_same_bits(root: Path, plain: tuple[list[Request], list[Scored]]) -> None:
    requests, expected = plain

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        prompts = ({"prompt_token_ids": list(request.prompt)} for request in requests)
        each = (last(llm.generate(p, request.params)) for p, request in zip(prompts, requests, strict=True))  # type: ignore[arg-type]
        return await asyncio.gather(*each)

    with async_engine(folder_of("llama-gqa", root), batch_invariant=True, data_parallel_size=2) as llm:
        assert [scored(output) for output in asyncio.run(main(llm))] == expected


@pytest.mark.parametrize("kind", ["ngram", "near"])
def test_draft_tokens_of_a_prompt_or_a_model_give_the_same_bits(
    root: Path, plain: tuple[list[Request], list[Scored]], kind: str
) -> None:
    requests, expected = plain
    with invariant_engine(folder_of("llama-gqa", root), speculative_config=spec_config(kind)) as llm:
        assert together(llm, requests, random.Random(2))[0] == expected
        stats = llm.llm_engine._client._core.scheduler.make_stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_edited_and_scaled_logits_have_log_probabilities_with_the_same_bits(root: Path) -> None:
    params = SamplingParams(temperature=0.7, presence_penalty=0.5, seed=1, max_tokens=24, logprobs=0, ignore_eos=True)
    requests = [Request(request.prompt[:60], params) for request in make_requests(seed=9, count=6)]
    settings = {"logprobs_mode": "post_temperature_logprobs", "max_num_batched_tokens": 64}
    with invariant_engine(folder_of("llama-gqa", root), enable_prefix_caching=False, **settings) as llm:
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [scored(output) for output in outputs] == alone(llm, requests)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"platform": "example"}, "the platform 'example' does not claim this capability"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"enable_lora": True}, "enable_lora is set"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode is 'processed_logprobs'"),
    ],
    ids=str,
)
def test_settings_that_exclude_it_are_refused(root: Path, settings: dict[str, Any], found: str) -> None:
    with (
        pytest.raises(ConfigError, match=found),
        engine(folder_of("llama-gqa", root), batch_invariant=True, **settings),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("deepseek2", r"Multi-head latent attention \(MLA\) is not batch-invariant"),
        ("llama-rope-dynamic", "RoPE scaling 'dynamic' is not batch-invariant"),
    ],
)
def test_models_that_exclude_it_are_refused(root: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found), engine(folder_of(name, root), batch_invariant=True):
        pass
