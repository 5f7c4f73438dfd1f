"""Gemma, Phi-3, Granite, OLMo 2, GLM, StarCoder2 and Falcon: sharded, quantized, in bfloat16, and misconfigured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.rope_parameters import RopeParameters, prompt_cache_key
from mvllm.errors import ModelError
from mvllm.layers.context import ForwardStep
from mvllm.layers.norm import RMSNorm
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.registry import resolve_model_class
from tests.helpers.host_sync import ForbidSynchronizingOps
from tests.helpers.model_zoo import ZOO, load_reference, make_checkpoint, marked
from tests.helpers.paged_driver import HOST, PagedDriver, load_model, make_context, make_layout, read_config
from tests.helpers.quantized_zoo import make_quantized
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_dense import DENSE
from tests.unit.models.test_parallel import build, check_every_element_is_read, run
from tests.unit.models.test_parity import TOLERANCE, draw_tokens, reference_logits, run_mixed
from tests.unit.models.test_quantized import check_quantized_on_load, expected


@pytest.mark.shows("tp", "pp")
@pytest.mark.parametrize("name", marked(DENSE))
def test_ranks_and_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(PagedDriver(load_model(folder)))
    for world_size in (2, 4):
        together = run_ranks(world_size, lambda tp: run(PagedDriver(load_model(folder, make_context(tp=tp)))))
        for logits in together:
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(PagedDriver(*stages)), alone, atol=1e-5, rtol=0)
    for tp_size, pp_size in ((2, 1), (4, 1), (2, 2)):
        check_every_element_is_read(folder, tp_size, pp_size)


# (checkpoint, config options with the values that a family would have if it ignored its own).
FORGOTTEN: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"windows": (None, None)}),
    ("gemma2", {"norm": RMSNorm}),
    ("gemma2", {"hidden_act": "silu"}),
    ("gemma2", {"attention_scale": None}),
    ("gemma2", {"soft_cap": None}),
    ("gemma2", {"embedding_scale": 1.0}),
    ("gemma2", {"logits_soft_cap": None}),
    ("gemma3", {"windows": (9, 9, 9)}),
    ("gemma3", {"local_rope": None}),
    ("granite", {"attention_scale": None}),
    ("granite", {"embedding_scale": 1.0}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logits_scale": 1.0}),
    ("phi3", {"rope": None}),
    ("glm", {"rope": None}),
    ("glm", {"interleaved_rotary": False}),
    ("starcoder2", {"windows": (None, None)}),
]


@pytest.mark.parametrize(("name", "without"), FORGOTTEN, ids=lambda value: str(value))
def test_every_setting_of_a_family_changes_the_logits(
    name: str, without: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parity tests cannot detect settings that do not change the outputs of these weights."""
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    config = read_config(folder)
    family = resolve_model_class(config.architecture)
    assert issubclass(family, LlamaForCausalLM)
    right, options = run(PagedDriver(load_model(folder))), family.options(config)
    monkeypatch.setattr(family, "options", staticmethod(lambda config: replace(options, **without)))
    assert (run(PagedDriver(load_model(folder))) - right).abs().max() > 100 * TOLERANCE


# (weight format, checkpoint): projections that a family has fused are split out of the packed words.
PACKED = [
    ("awq", "phi3-longrope-window"),
    ("gptq", "falcon-new"),
    ("w4a16-zero-points", "glm4"),
    ("gptq", "gemma3"),
    ("w8a16-rows", "olmo2"),
    ("w8a16-rows", "phi3"),
    ("awq", "falcon-sequential"),
    ("gptq", "granite"),
    ("gptq-8-bits", "gemma2"),
    ("w4a16", "starcoder2"),
    ("awq", "glm"),
]


@pytest.mark.shows("quantization", by="scheme")
@pytest.mark.parametrize(
    ("scheme", "name"), [pytest.param(*case, marks=[pytest.mark.exhaustive] * (i > 2)) for i, case in enumerate(PACKED)]
)
def test_packed_weights_give_the_logits_of_transformers_with_the_dequantized_weights(
    scheme: str, name: str, tmp_path: Path
) -> None:
    checkpoint = make_quantized(scheme, tmp_path, name)
    assert len(checkpoint.matrices) >= 4 * 2
    wanted = expected(checkpoint)
    torch.testing.assert_close(run(PagedDriver(load_model(checkpoint.quantized))), wanted, atol=TOLERANCE, rtol=0)
    if scheme == "w8a16-rows":
        for logits in run_ranks(2, lambda tp: run(PagedDriver(load_model(checkpoint.quantized, make_context(tp=tp))))):
            torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.shows("quantization", by="quantization")
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("phi3", "int8"),
        ("falcon-new", "int4"),
        *(
            pytest.param(name, quantization, marks=pytest.mark.exhaustive)
            for name in ("gemma2", "gemma3", "granite", "olmo2", "glm", "glm4", "starcoder2", "falcon-sequential")
            for quantization in ("int8", "int4")
        ),
    ],
)
def test_weights_quantized_on_load_give_the_logits_of_transformers_with_them(
    name: str, quantization: str, tmp_path: Path
) -> None:
    check_quantized_on_load(make_checkpoint(name, tmp_path, tokenizer=False), quantization)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("gemma2", "phi3", "granite", "olmo2", "glm4", "starcoder2", "falcon-new")
        ),
    ],
)
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    driver, tokens = PagedDriver(load_model(folder, make_context(dtype=torch.bfloat16))), draw_tokens(40, seed=6)
    (ours,) = driver.step([(driver.add(len(tokens)), tokens)])
    wanted = reference_logits(load_reference(folder), tokens, len(tokens))
    assert (ours.float() - wanted).pow(2).mean().sqrt() < 0.06 * wanted.std()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "glm4", "falcon-new"])
def test_models_do_not_synchronize_with_the_device(name: str, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(name, tmp_path, tokenizer=False))
    layout = make_layout([3, 1], [3, 6], [[0], [1, 2]], 4)
    for layer in model.attention_layers():
        layer.kv_cache = layer.backend.allocate(4, 4, HOST)
    metadata = {layer.spec: layer.backend.build_metadata(layout) for layer in model.attention_layers()}
    ids, positions = torch.tensor([5, 6, 7, 8]).int(), torch.tensor([0, 1, 2, 5]).int()
    with torch.inference_mode(), ForbidSynchronizingOps():
        model.compute_logits(model(ids, positions, ForwardStep(metadata, torch.tensor([3, 3, 3, 60]).int())))


@pytest.mark.parametrize("chunks", [[210], [100, 100, 10]], ids=["whole", "chunked"])
def test_long_prompts_of_phi3_use_the_long_frequencies(chunks: list[int], tmp_path: Path) -> None:
    folder = make_checkpoint("phi3-longrope-window", tmp_path, tokenizer=False)
    tokens = draw_tokens(214, seed=5)
    (ours,) = run_mixed(PagedDriver(load_model(folder)), [(tokens, 210, chunks)])
    wanted = reference_logits(load_reference(folder), tokens, 210)
    torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)


def config_of(name: str, folder: Path, **changes: Any) -> HFConfig:
    config = ZOO[name].config()
    config.architectures = [read_architecture(name)]
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return HFConfig.load(folder)


def read_architecture(name: str) -> str:
    return {"falcon": "FalconForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}[name]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("falcon", {"alibi": True}, "'alibi' is true.*rotary position embedding"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set, which is not supported"),
        ("gemma3", {"layer_types": ["full_attention", "linear"]}, "layer_types should name full_attention or sliding"),
        ("gemma2", {"layer_types": 3}, "layer_types should name.*2 layers, found 3"),
        ("gemma2", {"final_logit_softcapping": -1}, "'final_logit_softcapping' should be a number > 0"),
        ("gemma2", {"query_pre_attn_scalar": "a"}, "'query_pre_attn_scalar' should be a number > 0"),
    ],
)
def test_unsupported_settings_are_refused_with_their_key(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config_of(name, tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        build(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "spelling", "known_as"),
    [("phi3", "su", "longrope"), ("phi3", "yarn", "longrope"), ("llama", "su", "longrope"), ("llama", "yarn", "yarn")],
)
def test_longrope_is_recognized_by_its_old_names(model_type: str, spelling: str, known_as: str) -> None:
    scaling = {"type": spelling, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    config = HFConfig({"model_type": model_type, "rope_scaling": scaling, "max_position_embeddings": 64}, "config.json")
    assert RopeParameters.from_config(config, 8).rope_type == known_as


def test_the_position_key_includes_the_rope_of_every_layer_type(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    plain = {"rope_type": "default", "rope_theta": 100.0}
    config_of("gemma3", tmp_path, rope_parameters={"full_attention": dynamic, "sliding_attention": plain})
    key = prompt_cache_key(read_config(tmp_path))
    assert (key(1), key(256), key(257), key(300)) == (0, 0, 257, 300)


def test_a_multi_query_falcon_has_one_key_value_head_despite_num_kv_heads(tmp_path: Path) -> None:
    config_of("falcon", tmp_path, num_kv_heads=4)
    assert read_config(tmp_path).num_kv_heads == 1
    config_of("falcon", tmp_path, num_kv_heads=4, multi_query=False)
    assert read_config(tmp_path).num_kv_heads == 4
    config_of("falcon", tmp_path, num_kv_heads=2, new_decoder_architecture=True)
    assert read_config(tmp_path).num_kv_heads == 2
