"""Models with sequence states give every request the outputs that it gets alone, whatever its settings.

Engines with random limits, drafts and ranks run random requests: structured outputs, penalties, log-probabilities of
prompts and outputs, stops, several samples of a prompt, guidance, and pooling. One thread or several ask for them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mvllm import SamplingParams
from tests.engine.test_mtp import reference
from tests.engine.test_speculative import (
    THREADS,
    change_draft_lengths,
    check_close,
    drafts,
    draw,
    random_requests,
    run,
)
from tests.helpers.parity import engine
from tests.helpers.plugins import example_platform_path, prepend
from tests.helpers.threads import generate_in_threads

FAMILIES = (
    "granitehybrid",
    "mamba2",
    "qwen3next",
    "lfm2",
    "kimilinear",
    "falconh1",
    "nemotronh",
    "olmohybrid",
    "bamba",
    "qwen35moe",
)
WITH_MODULES = {"qwen35moe": "near", "nemotronh": "agrees"}
"""Families whose drafts come from the MTP module of the checkpoint, and whether it agrees with the model."""


def random_settings(rng: random.Random, name: str) -> dict[str, Any]:
    """Limits of an engine, with or without drafts."""
    settings: dict[str, Any] = {
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": rng.choice([17, 40, 64]),
        "state_snapshot_interval": rng.choice([0, 16, 32, 512]),
        "long_prefill_token_threshold": rng.choice([None, 8]),
    }
    draft = {"num_speculative_tokens": rng.choice([1, 2, 3, 5]), "adaptive": rng.random() < 0.7}
    kind = rng.choice(["none", "ngram", "near", "other"]) if name not in WITH_MODULES else "mtp"
    if kind == "mtp":
        settings["speculative_config"] = {**draft, "method": "mtp"}
    elif kind == "ngram":
        settings["speculative_config"] = {**draft, "method": "ngram", "prompt_lookup_min": 1}
    elif kind != "none":
        folder = drafts(name, noise=0.05) if kind == "near" else drafts(rng.choice([*FAMILIES, "llama-gqa"]))
        settings["speculative_config"] = {**draft, "model": str(folder)}
    settings["async_scheduling"] = rng.random() < 0.5
    if rng.random() < 0.25:
        settings |= {"distributed_executor_backend": THREADS}
        settings |= rng.choice([{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
    return settings


def smallest_memory(settings: dict[str, Any], folder: Any, rng: random.Random) -> int:
    """Bytes of a few state slots and of little more than the longest sequence."""
    with engine(folder, **settings) as llm:
        summary = llm.llm_engine.cache_summary
        needs = llm.llm_engine._client._core._executor.kv_cache_needs()  # type: ignore[attr-defined]
        blocks, slots = summary.blocks_per_request + rng.choice([0, 2]), rng.choice([3, 5, 8])
        return max(
            need.fixed_state_bytes + slots * need.state_bytes + blocks * need.bytes_per_token * summary.block_size
            for need in needs
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_random_engines_and_requests_give_the_outputs_of_requests_alone(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    change_draft_lengths(monkeypatch)
    name = FAMILIES[seed % len(FAMILIES)]
    prompts, wanted = random_requests(rng)
    prompts += [draw(rng, 40)] * 2
    wanted += [
        SamplingParams(n=3, temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=2, ignore_eos=True),
    ]
    folder = reference(name, WITH_MODULES[name]).folder if name in WITH_MODULES else drafts(name)
    settings = random_settings(rng, name)
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "speculative_config": {"method": "none"}}
    with engine(folder, **plain) as llm:
        expected = [run(llm, [prompt], params)[0] for prompt, params in zip(prompts, wanted, strict=True)]
    if rng.random() < 0.5:
        settings["kv_cache_memory_bytes"] = smallest_memory(settings, folder, rng)
    if "distributed_executor_backend" not in settings and rng.random() < 0.5:
        # On this device, blocks and states arrive in host memory after the next step was launched.
        prepend(monkeypatch, example_platform_path(tmp_path))
        settings |= {"platform": "example", "distributed_executor_backend": "mp", "kv_offloading_size": 0.01}
    with engine(folder, **settings) as llm:
        for num_threads in (1, 3):
            check_close(generate_in_threads(llm, prompts, wanted, num_threads), expected)
        scheduler = llm.llm_engine._client._core.scheduler  # type: ignore[attr-defined]
        scheduler.check_integrity()
        assert scheduler.make_stats().kv_cache_usage == 0
