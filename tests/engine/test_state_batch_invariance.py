"""With batch_invariant, models with sequence states give a request the same bits in every batch and on every path.

Prompts are computed at once, cut into steps, started from a kept state, and computed again after preemption and after
rejected draft tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, ConfigError
from tests.engine.test_batch_invariance import (
    NGRAM,
    Request,
    Scored,
    alone,
    folder_of,
    invariant_engine,
    make_requests,
    teacher_forced,
    together,
)
from tests.helpers.parity import engine

FAMILIES = (
    "mamba2", "granitehybrid", "granitehybrid-dense", "falconh1", "falconh1-norm", "nemotronh", "bamba",
    "qwen3next", "qwen35", "qwen35moe", "olmohybrid", "lfm2", "lfm2moe",
)  # fmt: skip
PATHS: dict[str, dict[str, Any]] = {
    "cuts, hits and preemption": {"max_num_batched_tokens": 90, "slots": 12, "blocks": 46},
    "drafts": {"max_num_batched_tokens": 200, "speculative_config": NGRAM},
    "whole prompts": {"max_num_batched_tokens": 4096, "enforce_eager": True, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariant-states")


def bytes_of(llm: LLM, num_slots: int, num_blocks: int) -> int:
    """Bytes of so many state slots and blocks."""
    [needs] = llm.llm_engine._client._core._executor.kv_cache_needs()  # type: ignore[attr-defined]
    block = needs.bytes_per_token * llm.llm_engine.cache_summary.block_size
    return int(needs.fixed_state_bytes + num_slots * needs.state_bytes + num_blocks * block)


def check(folder: Path, settings: dict[str, Any], paths: list[str], requests: list[Request]) -> Counter[str]:
    """The property, as `check_invariance` in test_batch_invariance.py. Returns how often the paths were taken."""
    taken: Counter[str] = Counter()
    with invariant_engine(folder, max_num_batched_tokens=1024, enable_prefix_caching=False, **settings) as llm:
        expected = alone(llm, requests)
        memory = {path: bytes_of(llm, PATHS[path].get("slots", 0), PATHS[path].get("blocks", 0)) for path in paths}
        for request, (tokens, logprobs) in zip(requests, expected, strict=True):
            assert teacher_forced(llm, request, tokens) == logprobs
    for path in paths:
        own = dict(PATHS[path])
        if own.pop("slots", 0) and own.pop("blocks"):
            own["kv_cache_memory_bytes"] = memory[path]
        found: list[Scored]
        with invariant_engine(folder, state_snapshot_interval=32, **settings, **own) as llm:
            found, num_cached = together(llm, requests, random.Random(1))
            stats = llm.llm_engine._client._core.scheduler.make_stats()  # type: ignore[attr-defined]
            taken["hits"] += num_cached
            taken["preemptions"] += stats.num_preemptions
            taken["accepted"] += stats.num_accepted_tokens
            taken["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
            for request, mine, theirs in zip(requests, found, expected, strict=True):
                assert mine == theirs, (path, len(request.prompt), request.params)
            for request, (tokens, logprobs) in list(zip(requests, expected, strict=True))[:6]:
                assert teacher_forced(llm, request, tokens) == logprobs
    return taken


@pytest.mark.parametrize("name", ["qwen3next", pytest.param("granitehybrid", marks=pytest.mark.exhaustive)])
def test_log_probabilities_have_the_same_bits_on_every_path(root: Path, name: str) -> None:
    """Batches of changing size, cut prompts, hits, preemption, draft tokens, and teacher forcing."""
    requests = make_requests(seed=1, count=20)
    requests = [
        replace(request, prompt=request.prompt[-200:]) if i % 3 else request for i, request in enumerate(requests)
    ]
    taken = check(folder_of(name, root), {}, list(PATHS)[:2], requests)
    assert all(taken[path] > 0 for path in ("hits", "preemptions", "accepted", "rejected")), taken


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_families_and_paths(root: Path, name: str, settings: dict[str, Any]) -> None:
    check(folder_of(name, root), settings, list(PATHS), make_requests(seed=len(name), count=24))


def test_a_model_with_an_operation_that_excludes_it_is_refused(root: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"Multi-head latent attention \(MLA\) is not batch-invariant"),
        engine(folder_of("kimilinear", root), batch_invariant=True),
    ):
        pass


def test_a_platform_whose_operations_exclude_it_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mvllm_cpu.state_ops import StateOps

    monkeypatch.setattr(StateOps, "providers", lambda self: [])
    with (
        pytest.raises(ConfigError, match="needs the operation causal_conv1d in float32, of which this platform has no"),
        engine(folder_of("mamba2", root), batch_invariant=True),
    ):
        pass
