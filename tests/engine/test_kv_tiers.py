"""Engines with a host tier and a disk: prefixes are found after a restart, preempted requests go on; equal tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, SamplingParams
from mvllm.engine.core import kv_tiers
from mvllm.errors import ConfigError
from tests.engine.test_speculative import THREADS
from tests.helpers.parity import engine, oracle

PREFIX = 64


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int = 12) -> list[tuple[list[int], int]]:
    """Tokens and cached prompt tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]


def stats(llm: LLM) -> Any:
    core = llm.llm_engine._client._core  # type: ignore[attr-defined]
    core.scheduler.kv_loads._stats_time = float("-inf")
    return core.make_stats()


def long_prompts(name: str) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and prompts of more than PREFIX tokens."""
    answers = oracle(name, num_tokens=4)
    return answers.folder, [prompt for prompt in answers.prompts if len(prompt) > PREFIX]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-gqa", {}),
        pytest.param("llama-gqa", {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}),
        pytest.param("llama-gqa", {"pipeline_parallel_size": 2, "distributed_executor_backend": THREADS}),
        pytest.param("llama-gqa", {"kv_cache_dtype": "int8"}, marks=pytest.mark.exhaustive),
        pytest.param("gemma3", {}, marks=pytest.mark.exhaustive),
        pytest.param("mistral", {}, marks=pytest.mark.exhaustive),
        pytest.param("glm4moelite", {}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3next", {"state_snapshot_interval": 32}, marks=pytest.mark.exhaustive),
        pytest.param("mamba2", {"state_snapshot_interval": 32}, marks=pytest.mark.exhaustive),
        pytest.param("lfm2", {"state_snapshot_interval": 32}, marks=pytest.mark.exhaustive),
        pytest.param("kimilinear", {"state_snapshot_interval": 32}, marks=pytest.mark.exhaustive),
    ],
)
def test_after_a_restart_prefixes_are_found_on_disk_and_tokens_are_equal(tmp_path, name, settings):
    folder, prompts = long_prompts(checkpoint(name))
    with engine(folder, **settings) as llm:
        expected = [tokens for tokens, _ in generate(llm, prompts)]
    settings = {**settings, "kv_disk_cache": str(tmp_path / "kv"), "kv_disk_cache_size": 1}
    with engine(folder, **settings) as llm:
        found = generate(llm, prompts)
        assert [tokens for tokens, _ in found] == expected and found[0][1] == 0
    with engine(folder, **settings) as llm:
        found = generate(llm, prompts)
        assert [tokens for tokens, _ in found] == expected
        assert all(cached >= 32 for _, cached in found)
        after = stats(llm)
        assert after.kv_tiers["disk"].num_loaded > 0 and after.kv_tiers["disk"].num_load_failures == 0
        assert after.kv_tiers["disk"].bytes_used <= after.kv_tiers["disk"].bytes_limit == 2**30


def checkpoint(name: str) -> str:
    """The first checkpoint of the zoo with this name, or of this family."""
    from tests.helpers.model_zoo import ZOO

    return name if name in ZOO else next(each for each in ZOO if each.split("-")[0] == name)


def test_damaged_files_and_those_of_another_model_or_version_are_computed_again(tmp_path, monkeypatch):
    folder, prompts = long_prompts("llama-gqa")
    settings = {"kv_disk_cache": str(tmp_path)}
    with monkeypatch.context() as older:
        older.setattr(kv_tiers, "FORMAT_VERSION", 1)
        with engine(folder, **settings) as llm:
            generate(llm, prompts[:1])
    assert list(tmp_path.rglob("*.kv"))
    with engine(folder, **settings) as llm:
        expected = generate(llm, prompts[:1])
        assert expected[0][1] == 0, "some blocks of version 1 are wrong"
    for i, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        data = bytearray(path.read_bytes())
        data[-1 - 7 * i] ^= 1
        path.write_bytes(data if i % 2 else data[: len(data) // 2])
    with engine(folder, **settings) as llm:
        assert generate(llm, prompts[:1]) == expected  # also computed: 0 cached tokens
        assert stats(llm).kv_tiers["disk"].num_load_failures > 0
    for other in ({"dtype": "bfloat16"}, {"load_format": "dummy", "seed": 3}, {"block_size": 32}):
        with engine(folder, **settings, **other) as llm:
            assert generate(llm, prompts[:1])[0][1] == 0
    with engine(folder, **settings) as llm:  # that computed again was saved again
        tokens, cached = generate(llm, prompts[:1])[0]
        assert tokens == expected[0][0] and cached > 0


WINDOWS = ("qwen2-layer-types", "gemma3")
"""With sliding windows in some layers, and so with several groups. A request of a model with windows in all layers gets
all the blocks that it will ever hold when it starts, so that it is never preempted."""


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3next", *WINDOWS))],
)
@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_swapped_requests_have_the_tokens_that_they_have_alone(name, mode):
    has_windows = name in WINDOWS
    name = checkpoint(name)
    folder, _ = long_prompts(name)
    rng = random.Random(1)
    count, shortest, longest, num_tokens = (16, 10, 30, 90) if has_windows else (6, 40, 90, 40)
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(shortest, longest))] for _ in range(count)]
    settings = {"max_num_batched_tokens": 32} if has_windows else {}
    with engine(folder, **settings) as llm:
        expected = [generate(llm, [prompt], num_tokens)[0][0] for prompt in prompts]
        core = llm.llm_engine._client._core
        needs, summary = core._executor.kv_cache_needs(), core.cache_summary
    blocks, slots = summary.blocks_per_request + (2 if has_windows else 10), 5  # windows hold few blocks
    memory = blocks * (summary.total_bytes // summary.num_blocks)
    if summary.num_state_slots:
        memory = max(
            need.fixed_state_bytes + slots * need.state_bytes + blocks * need.bytes_per_token * summary.block_size
            for need in needs
        )
    with engine(
        folder,
        kv_cache_memory_bytes=memory,
        kv_offloading_size=0.05,
        preemption_mode=mode,
        max_num_seqs=count,
        **settings,
    ) as llm:
        assert [tokens for tokens, _ in generate(llm, prompts, num_tokens)] == expected
        after = stats(llm)
        if not summary.num_state_slots:
            assert after.num_preemptions > 0 and (mode == "auto" or after.kv_tiers["host"].num_loaded > 0)
        assert after.num_swapped == 0
        assert 0 < after.kv_tiers["host"].bytes_used <= after.kv_tiers["host"].bytes_limit <= 0.05 * 2**30


def test_a_prefix_survives_sleep_in_host_memory_and_new_weights_do_not_find_it(tmp_path):
    folder, prompts = long_prompts("llama-gqa")
    with engine(folder, kv_offloading_size=0.05, kv_disk_cache=str(tmp_path)) as llm:
        expected = generate(llm, prompts[:1])[0][0]
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            tokens, cached = generate(llm, prompts[:1])[0]
            assert tokens == expected and cached > 0
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts[:1])[0] == (expected, 0)  # nor on disk
        assert generate(llm, prompts[:1])[0][1] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching, which is off"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_what_cannot_work_is_refused(settings, message):
    folder = oracle("llama-gqa", num_tokens=4).folder
    with pytest.raises(ConfigError, match=message), engine(folder, kv_offloading_size=0.05, **settings):
        pass


def test_an_unknown_connector_is_refused_with_the_names_that_there_are():
    folder = oracle("llama-gqa", num_tokens=4).folder
    with pytest.raises(ConfigError, match=r"no KV connector 'no-such'.*disk"):
        with engine(folder, kv_transfer_config={"kv_connector": "no-such"}):
            pass
