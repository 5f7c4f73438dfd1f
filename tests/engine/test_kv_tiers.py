"""Engines with a host tier: prefixes are found after sleep, preempted requests go on; equal tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, SamplingParams, plugin_groups
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from mvllm.plugin_groups import PluginSource
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


def checkpoint(name: str) -> str:
    """The first checkpoint of the zoo with this name, or of this family."""
    from tests.helpers.model_zoo import ZOO

    return name if name in ZOO else next(each for each in ZOO if each.split("-")[0] == name)


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


def test_a_prefix_survives_sleep_in_host_memory_and_new_weights_do_not_find_it():
    folder, prompts = long_prompts("llama-gqa")
    with engine(folder, kv_offloading_size=0.05) as llm:
        expected = generate(llm, prompts[:1])[0][0]
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            tokens, cached = generate(llm, prompts[:1])[0]
            assert tokens == expected and cached > 0
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts[:1])[0] == (expected, 0)
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


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"kv_disk_cache": "/x"}, "kv_disk_cache or kv_transfer_config asks for the KV connector 'disk'"),
        ({"kv_role": "both"}, "kv_role or kv_transfer_config asks for the KV connector 'shared_memory'"),
        ({"kv_transfer_config": {"kv_connector": "my"}}, "kv_transfer_config asks for the KV connector 'my'"),
    ],
)
def test_a_connector_that_no_package_has_is_refused_with_the_package_of_mvllms_own(monkeypatch, settings, asked):
    folder = oracle("llama-gqa", num_tokens=4).folder
    acme = PluginSource("acme", "acme:Connector", "acme", "1")
    monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: [acme])
    with pytest.raises(ConfigError, match=f"^{asked}.*There are: acme") as caught, engine(folder, **settings):
        pass
    assert str(caught.value).endswith(
        "A KV connector of mvllm itself needs the package mvllm-kv-transfer, which is not installed. "
        f"Run: {install_command('mvllm-kv-transfer')}"
    )
