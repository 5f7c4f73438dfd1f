"""Platforms and settings that take text only say so in one sentence, which front ends read; the engine starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm.config.encoder_limits import limits_of
from mvllm.config.engine_config import EngineConfig
from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.engine.core.capability_checks import refusal_of_items
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.frontend.prompt_items import PromptItems
from mvllm.errors import RequestError
from mvllm.multimodal.processor_client import ProcessorClient
from mvllm.platform.capabilities import Capabilities
from mvllm.scheduler.encoder_planner import make_encoder_planner
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform

ABLE = Capabilities(
    dtypes=("float32",), kv_dtypes=("float32",), prefix_caching=True, chunked_prefill=True, sliding_window=True
)
AS_GRAPHS = replace(ABLE, graph_compiler=True)


def config_of(**model: object) -> EngineConfig:
    config = make_config(max_model_len=512)
    multimodal = MultiModalModel(**{"placeholders": {"image": 1}, "embedding_width": 8, **model})  # type: ignore[arg-type]
    return replace(config, model=replace(config.model, architecture="LlamaForCausalLM", multimodal=multimodal))


def test_a_causal_model_with_images_is_accepted() -> None:
    assert refusal_of_items(config_of(), ABLE) is None
    assert make_encoder_planner(config_of()) is not None
    assert refusal_of_items(config_of(), AS_GRAPHS) is None
    assert refusal_of_items(config_of(), replace(AS_GRAPHS, static_shapes=True)) is None
    assert refusal_of_items(config_of(), replace(ABLE, static_shapes=True)) is None


@pytest.mark.parametrize(
    ("config", "capabilities", "why"),
    [
        (config_of(spans_attend_both_ways=True), replace(AS_GRAPHS, non_causal_spans=True), "attention is causal"),
        (config_of(cross_attention=True), AS_GRAPHS, "no cross-attention"),
        (config_of(by_transformers=True), AS_GRAPHS, "runs through transformers"),
        (config_of(by_transformers=True), replace(ABLE, static_shapes=True), "for every shape of its encoders"),
        (config_of(cross_attention=True), replace(ABLE, static_shapes=True), "lengths of cross-attention differ"),
        (
            config_of(spans_attend_both_ways=True),
            replace(ABLE, static_shapes=True, non_causal_spans=True),
            "every shape for causal attention",
        ),
        (config_of(), replace(ABLE, torch_device=False), "its own worker"),
    ],
)
def test_what_cannot_take_items_says_why(config: EngineConfig, capabilities: Capabilities, why: str) -> None:
    refusal = refusal_of_items(config, capabilities)
    assert refusal is not None and why in refusal and refusal.count(".") == 1
    text_only = replace(config, multimodal=MultiModalConfig(refusal=refusal))
    assert make_encoder_planner(text_only) is None and limits_of(text_only) is None


def test_spans_that_attend_both_ways_need_their_capability() -> None:
    config = config_of(spans_attend_both_ways=True)
    without = replace(ABLE, non_causal_spans=False) if hasattr(ABLE, "non_causal_spans") else ABLE
    assert "non_causal_spans" in str(refusal_of_items(config, without))


def test_models_that_run_through_transformers_take_items_with_its_encoders_only() -> None:
    config = config_of()
    through = replace(config, model=replace(config.model, model_impl="transformers"))
    assert "through transformers" in str(refusal_of_items(through, ABLE))
    config = config_of(by_transformers=True)
    through = replace(config, model=replace(config.model, model_impl="transformers"))
    assert refusal_of_items(through, ABLE) is None


def test_a_plugins_class_does_not_have_transformers_encoders() -> None:
    platform = FakePlatform()
    platform.capabilities = ABLE
    resolved = resolve_config(config_of(by_transformers=True), platform)  # for a native class
    assert resolved.model.multimodal is None and resolved.multimodal.refusal is None


def test_cross_attention_is_refused_with_pipeline_stages() -> None:
    config = config_of(cross_attention=True)
    assert refusal_of_items(config, ABLE) is None
    staged = replace(config, parallel=replace(config.parallel, pipeline_parallel_size=2))
    assert "pipeline_parallel_size" in str(refusal_of_items(staged, ABLE))


def test_the_resolved_configuration_has_the_refusal() -> None:
    platform = FakePlatform()
    platform.capabilities = replace(ABLE, static_shapes=True)
    config = config_of(cross_attention=True)
    assert "compiles every shape" in str(resolve_config(config, platform).multimodal.refusal)
    assert resolve_config(make_config(), platform).multimodal.refusal is None


def test_embeddings_of_text_models_are_items_where_they_are_enabled() -> None:
    config = make_config()
    assert make_encoder_planner(config) is None
    enabled = replace(config, multimodal=MultiModalConfig(enable_embeds=True))
    limits = limits_of(enabled)
    assert limits is not None and limits.cache_tokens >= config.model.max_model_len
    assert make_encoder_planner(enabled) is not None


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ({}, {}, (2048, 2048, 512)),
        ({"max_encoded": 5000}, {}, (2048, 5000, 5000)),
        ({}, {"max_encoder_tokens": 100}, (100, 512, 512)),
        ({}, {"encoder_cache_tokens": 300}, (2048, 300, 300)),
        ({"max_encoded": 1500, "cross_attention": True}, {}, (2048, 96000, 1500)),
    ],
)
def test_limits(model: dict, settings: dict, expected: tuple[int, int, int]) -> None:
    config = replace(config_of(**model), multimodal=MultiModalConfig(**settings))
    scheduler = replace(config.scheduler, max_num_batched_tokens=2048, max_num_seqs=256)
    limits = limits_of(replace(config, scheduler=scheduler))
    assert limits is not None
    assert (limits.step_tokens, limits.cache_tokens, limits.item_tokens) == expected


def test_a_request_with_an_image_is_refused_with_that_sentence() -> None:
    refusal = refusal_of_items(config_of(), replace(ABLE, torch_device=False))
    config = replace(config_of(), multimodal=MultiModalConfig(refusal=refusal, enable_embeds=True))
    items = PromptItems(config, ProcessorClient(config.model, config.multimodal))
    prompt = {"prompt": "a", "multi_modal_data": {"image": b""}}
    assert items.submit({"prompt": "a"}) is None
    for ask in (items.check, items.submit, lambda _: items.check_embeds_enabled()):
        with pytest.raises(RequestError, match="has its own worker"):
            ask(prompt)
