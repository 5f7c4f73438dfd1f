"""Engines with a cache on disk: prefixes are found after a restart, and tokens are equal."""

from __future__ import annotations

import pytest

from mvllm.engine.core import kv_tiers
from tests.engine.test_kv_tiers import checkpoint, generate, long_prompts, stats
from tests.engine.test_speculative import THREADS
from tests.helpers.parity import engine


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
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts[:1]) == [(expected[0], 0)], "what was stored before is not found"


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
