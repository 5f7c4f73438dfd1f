"""Features that a platform does not claim are switched off, or are errors if the model needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.errors import ConfigError, PlatformError
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker_wrapper import WorkerWrapper
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform

BARE = Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
ABLE = replace(BARE, prefix_caching=True, chunked_prefill=True, sliding_window=True)


def resolve(capabilities: Capabilities, config: EngineConfig | None = None) -> EngineConfig:
    platform = FakePlatform()
    platform.capabilities = capabilities
    return resolve_config(config or make_config(), platform)


def test_features_with_their_capability_stay_on():
    settled = resolve(ABLE)
    assert settled.cache.enable_prefix_caching and settled.scheduler.enable_chunked_prefill


def test_prefix_caching_that_is_not_claimed_is_switched_off_and_logged(caplog):
    with caplog.at_level("INFO", logger="mvllm"):
        settled = resolve(replace(ABLE, prefix_caching=False))
    assert not settled.cache.enable_prefix_caching
    assert "does not claim prefix_caching" in caplog.text


def test_chunked_prefill_that_is_not_claimed_is_switched_off():
    config = make_config(max_model_len=256)
    settled = resolve(replace(ABLE, chunked_prefill=False), config)
    assert not settled.scheduler.enable_chunked_prefill
    assert settled.scheduler.max_num_batched_tokens == config.scheduler.max_num_batched_tokens


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt(caplog):
    with caplog.at_level("INFO", logger="mvllm"):
        settled = resolve(replace(ABLE, chunked_prefill=False), make_config(max_model_len=5000))
    assert settled.scheduler.max_num_batched_tokens == 5000
    assert "max_num_batched_tokens = 5000" in caplog.text


def test_a_sliding_window_that_is_not_claimed_is_refused():
    config = make_config(sliding_window=128)
    assert resolve(ABLE, config).model.sliding_window == 128
    with pytest.raises(ConfigError, match=r"sliding window of 128 tokens.*'acme' does not claim"):
        resolve(replace(ABLE, sliding_window=False), config)


def test_heads_larger_than_the_platform_supports_are_refused():
    assert resolve(replace(ABLE, max_head_size=8)).model.head_size == 8
    with pytest.raises(ConfigError, match=r"have 8 elements.*'acme' takes at most 4"):
        resolve(replace(ABLE, max_head_size=4))


class TestStorage:
    def asking(self, dtype: str) -> EngineConfig:
        config = make_config()
        return replace(config, cache=replace(config.cache, dtype=dtype))

    def test_auto_is_the_compute_dtype_if_the_platform_stores_it(self):
        assert resolve(ABLE).cache.dtype == "auto"

    def test_auto_is_otherwise_the_platforms_first_dtype(self, caplog):
        with caplog.at_level("INFO", logger="mvllm"):
            settled = resolve(replace(ABLE, kv_dtypes=("bfloat16", "float16")))
        assert settled.cache.dtype == "bfloat16"
        assert "cache.dtype = bfloat16" in caplog.text

    def test_an_explicit_dtype_is_accepted_or_refused(self):
        assert resolve(ABLE, self.asking("float32")).cache.dtype == "float32"
        with pytest.raises(ConfigError, match=r"kv_cache_dtype 'int3' was asked for.*float32"):
            resolve(ABLE, self.asking("int3"))

    def test_a_platform_without_a_kv_cache_dtype_is_refused(self):
        with pytest.raises(ConfigError, match="nothing"):
            resolve(replace(ABLE, kv_dtypes=()))


def test_a_runtime_without_a_torch_device_needs_its_own_worker():
    platform = FakePlatform()
    platform.capabilities = replace(ABLE, torch_device=False)
    WorkerWrapper(make_config(), platform, WorkerContext())
    platform.worker_class = lambda: None
    with pytest.raises(PlatformError, match=r"'acme' has no torch device.*worker_class"):
        WorkerWrapper(make_config(), platform, WorkerContext())
