"""What a platform does not claim is off, or refused where the model needs it."""

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


def settle(capabilities: Capabilities, config: EngineConfig | None = None) -> EngineConfig:
    platform = FakePlatform()
    platform.capabilities = capabilities
    return resolve_config(config or make_config(), platform)


def test_features_with_their_capability_stay_on():
    settled = settle(ABLE)
    assert settled.cache.enable_prefix_caching and settled.scheduler.enable_chunked_prefill


def test_prefix_caching_that_is_not_claimed_is_switched_off_and_logged(caplog):
    with caplog.at_level("INFO", logger="mvllm"):
        settled = settle(replace(ABLE, prefix_caching=False))
    assert not settled.cache.enable_prefix_caching
    assert "does not claim prefix_caching" in caplog.text


def test_chunked_prefill_that_is_not_claimed_is_switched_off():
    config = make_config(max_model_len=256)
    settled = settle(replace(ABLE, chunked_prefill=False), config)
    assert not settled.scheduler.enable_chunked_prefill
    assert settled.scheduler.max_num_batched_tokens == config.scheduler.max_num_batched_tokens


def test_a_step_then_holds_the_longest_prompt(caplog):
    with caplog.at_level("INFO", logger="mvllm"):
        settled = settle(replace(ABLE, chunked_prefill=False), make_config(max_model_len=5000))
    assert settled.scheduler.max_num_batched_tokens == 5000
    assert "max_num_batched_tokens = 5000" in caplog.text


def test_a_sliding_window_that_is_not_claimed_is_refused():
    config = make_config(sliding_window=128)
    assert settle(ABLE, config).model.sliding_window == 128
    with pytest.raises(ConfigError, match=r"sliding window of 128 tokens.*'acme' does not claim"):
        settle(replace(ABLE, sliding_window=False), config)


def test_heads_larger_than_the_platform_takes_are_refused():
    assert settle(replace(ABLE, max_head_size=8)).model.head_size == 8
    with pytest.raises(ConfigError, match=r"have 8 elements.*'acme' takes at most 4"):
        settle(replace(ABLE, max_head_size=4))


class TestStorage:
    def asking(self, dtype: str) -> EngineConfig:
        config = make_config()
        return replace(config, cache=replace(config.cache, dtype=dtype))

    def test_auto_stays_where_the_compute_dtype_is_stored(self):
        assert settle(ABLE).cache.dtype == "auto"

    def test_auto_is_otherwise_the_platforms_first_dtype(self, caplog):
        with caplog.at_level("INFO", logger="mvllm"):
            settled = settle(replace(ABLE, kv_dtypes=("bfloat16", "float16")))
        assert settled.cache.dtype == "bfloat16"
        assert "cache.dtype = bfloat16" in caplog.text

    def test_an_explicit_dtype_is_accepted_or_refused(self):
        assert settle(ABLE, self.asking("float32")).cache.dtype == "float32"
        with pytest.raises(ConfigError, match=r"kv_cache_dtype 'int3' was asked for.*float32"):
            settle(ABLE, self.asking("int3"))

    def test_a_platform_that_stores_nothing_cannot_run(self):
        with pytest.raises(ConfigError, match="nothing"):
            settle(replace(ABLE, kv_dtypes=()))


def test_a_runtime_without_a_torch_device_must_bring_its_worker():
    platform = FakePlatform()
    platform.capabilities = replace(ABLE, torch_device=False)
    WorkerWrapper(make_config(), platform, WorkerContext())
    platform.worker_class = lambda: None
    with pytest.raises(PlatformError, match=r"'acme' has no torch device.*worker_class"):
        WorkerWrapper(make_config(), platform, WorkerContext())
