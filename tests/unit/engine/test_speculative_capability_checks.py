"""Whether speculative decoding works with the platform and the other settings."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.errors import ConfigError
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform

ABLE = Capabilities(
    dtypes=("float32", "bfloat16"),
    kv_dtypes=("float32",),
    prefix_caching=True,
    chunked_prefill=True,
    sliding_window=True,
    async_copies=True,
)
NGRAM = SpeculativeConfig("ngram", 3)


def speculative_config(speculative: SpeculativeConfig | None = NGRAM, **scheduler: Any) -> EngineConfig:
    config = make_config()
    return dataclasses.replace(
        config, speculative=speculative, scheduler=dataclasses.replace(config.scheduler, **scheduler)
    )


def draft(**model: Any) -> SpeculativeConfig:
    return SpeculativeConfig("draft_model", 3, model=dataclasses.replace(make_config().model, model="small", **model))


def resolve(config: EngineConfig, **changes: Any) -> EngineConfig:
    platform = FakePlatform()
    platform.capabilities = dataclasses.replace(ABLE, **changes)
    return resolve_config(config, platform)


@pytest.mark.parametrize(
    ("backend", "size", "is_on"), [(None, 1, False), ("uni", 1, False), (None, 2, True), ("mp", 1, True)]
)
def test_async_scheduling_is_on_with_draft_tokens_where_workers_have_processes(caplog, backend, size, is_on):
    caplog.set_level(logging.INFO)
    assert resolve(speculative_config(None)).scheduler.async_scheduling is True
    assert "async_scheduling" not in caplog.text
    config = speculative_config()
    parallel = dataclasses.replace(config.parallel, distributed_executor_backend=backend, tensor_parallel_size=size)
    config = dataclasses.replace(config, parallel=parallel)
    changes = {"collectives": ("all_reduce", "all_gather")}
    assert resolve(config, **changes).scheduler.async_scheduling is is_on
    assert ("scheduler.async_scheduling = False: with draft tokens" in caplog.text) is not is_on
    assert resolve(config, async_copies=False, **changes).scheduler.async_scheduling is False


def test_methods_that_read_hidden_states_are_refused_where_models_run_as_graphs():
    for reads in ({"reads_hidden": True}, {"reads_layers": (1,)}):
        config = speculative_config(dataclasses.replace(draft(), method="mtp", **reads))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture="LlamaForCausalLM"))
        assert resolve(config).speculative is not None
        with pytest.raises(ConfigError, match=r"the method 'mtp' reads hidden states .*Choose the method 'ngram'"):
            resolve(config, graph_compiler=True)
    assert resolve(speculative_config(draft()), graph_compiler=True).speculative is not None


@pytest.mark.parametrize(
    ("changes", "backend", "why"),
    [
        ({}, None, None),
        ({"drafts_by_default": False}, None, "on the platform 'acme' they are used where they are asked for"),
        ({"graph_compiler": True}, None, "it runs models as graphs"),
        ({"static_shapes": True}, None, "compiles every shape"),
        ({"torch_device": False}, None, "has its own worker"),
        ({}, "external_launcher", "with external_launcher their number cannot follow"),
    ],
)
def test_drafts_that_nobody_has_asked_for_are_left_out_where_something_excludes_them(
    changes, backend, why, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(FakePlatform, "shapes", lambda self: ShapePolicy(tokens=(64,)), raising=False)
    config = speculative_config(dataclasses.replace(draft(), method="mtp", reads_hidden=True, is_default=True))
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, distributed_executor_backend=backend)
    )
    settled = resolve(config, **{"drafts_by_default": True, **changes})
    assert (settled.speculative is None) == (why is not None)
    assert (f"{why}" in caplog.text) == (why is not None)
    assert ('{"method": "none"} leaves the module out' in caplog.text) == (why is None)


@pytest.mark.parametrize("asked", [True, False])
def test_async_scheduling_with_draft_tokens_is_as_asked(asked):
    settled = resolve(speculative_config(async_scheduling=asked))
    assert (settled.speculative, settled.scheduler.async_scheduling) == (NGRAM, asked)
    assert not keeps_sampled_tokens_on_device(settled, ABLE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"torch_device": False}, "has its own worker"),
        ({"static_shapes": True}, "compiles every shape"),
    ],
)
def test_an_unsupporting_platform_is_named_with_the_reason(changes, why, monkeypatch):
    monkeypatch.setattr(FakePlatform, "shapes", lambda self: ShapePolicy(tokens=(64,)), raising=False)
    with pytest.raises(ConfigError, match=rf"is not supported on the platform 'acme', which {why}.*Leave it out, or"):
        resolve(speculative_config(), **changes)
    assert resolve(speculative_config(None), **changes).speculative is None


def test_a_draft_model_has_the_models_dtype():
    settled = resolve(speculative_config(draft(dtype="bfloat16")))
    assert settled.speculative is not None and settled.speculative.model is not None
    assert settled.speculative.model.dtype == settled.model.dtype == "float32"


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ({"sliding_window": 128}, {"sliding_window": False}, r"small has a sliding window of 128 tokens"),
        ({"head_size": 80}, {"max_head_size": 64}, r"small's attention heads have 80 elements.*at most 64"),
    ],
)
def test_a_draft_model_is_checked_against_the_capabilities(model, changes, why):
    with pytest.raises(ConfigError, match=rf"The draft model {why}.*Choose another draft model, or another platform\."):
        resolve(speculative_config(draft(**model)), **changes)
    resolve(speculative_config(draft(**model)))
