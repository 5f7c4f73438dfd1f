"""Models with delta rules or short convolutions: sharded, quantized, and unsupported variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.gated_delta_net import DeltaNetConfig, DeltaNetNames, GatedDeltaNet
from mvllm.layers.quantization.config_fields import names
from mvllm.models.causal_lm import CausalLM
from tests.helpers.float8_zoo import make_float8
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.quantized_zoo import make_quantized
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import draw_tokens, reference_logits

FAMILIES = ["qwen3next", "qwen35", "qwen35moe", "lfm2", "lfm2moe", "kimilinear", "olmohybrid"]
FURTHER = [
    *("qwen3next-dense-layer-tied", "qwen35-text-tied", "qwen35moe-text", "lfm2-biases-untied"),
    *("lfm2moe-no-bias", "kimilinear-query-latent", "kimilinear-groups", "olmohybrid-rope"),
]
TOKENS, PROMPT_LEN = draw_tokens(30, seed=7), 20


def run(*stages: CausalLM) -> torch.Tensor:
    driver = PagedDriver(*stages)
    sequence = driver.add(PROMPT_LEN)
    pieces = (TOKENS[:PROMPT_LEN], TOKENS[PROMPT_LEN:29], TOKENS[29:])
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in pieces])


def expected(folder: Path) -> torch.Tensor:
    return reference_logits(load_reference(folder), TOKENS, PROMPT_LEN)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def further(checkpoints: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive) for name in checkpoints]


@pytest.mark.shows("tp")
@pytest.mark.parametrize("name", [*FAMILIES, *further(FURTHER)])
def test_tensor_parallel_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(load_model(folder))
    for logits in run_ranks(2, lambda tp: run(load_model(folder, make_context(tp=tp)))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


@pytest.mark.shows("pp")
@pytest.mark.parametrize("name", [*FAMILIES, *further(FURTHER)])
def test_pipeline_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    assert [len(stage.state_layers()) + len(stage.attention_layers()) for stage in stages] in ([1, 2], [2, 1])
    torch.testing.assert_close(run(*stages), run(load_model(folder)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "world_size", "words"),
    [
        ("qwen3next", 4, "2 key heads of model.layers.0.linear_attn cannot be shared evenly by 4 ranks"),
        ("qwen35", 4, "2 key heads of model.layers.0.linear_attn cannot be shared evenly by 4 ranks"),
        ("kimilinear", 8, "4 heads of model.layers.0.self_attn cannot be shared evenly by 8 ranks"),
        ("lfm2", 128, "64 channels of model.layers.0.conv cannot be shared evenly by 128 ranks"),
    ],
)
def test_ranks_that_do_not_divide_the_heads_are_refused(name: str, world_size: int, words: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match=words):
        load_model(folder, make_context(tp=fake_group("tp", 0, world_size)))


def test_the_state_of_a_rank_has_its_heads_only(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3next", tmp_path, tokenizer=False)
    for ranks, heads in ((1, 4), (2, 2)):
        model = load_model(folder, make_context(tp=fake_group("tp", 0, ranks)))
        assert len(model.attention_layers()) == 1
        for layer in model.state_layers():
            conv, delta = layer.spec.tensors
            assert conv.shape == ((2 * 2 * 16 + 4 * 12) // ranks, 3)
            assert (delta.shape, delta.dtype) == ((heads, 16, 12), "float32")


def test_projections_are_read_group_by_group_or_one_after_the_other() -> None:
    """Two key heads, one of them on this rank; two value heads each."""
    sizes = DeltaNetConfig(8, 2, 4, key_head_dim=3, value_head_dim=5, conv_kernel_size=4, eps=1e-6)
    ctx = make_context(tp=fake_group("tp", 1, 2))

    def rows(modules: DeltaNetNames) -> list[tuple[str, slice]]:
        layer = GatedDeltaNet(ctx, "x", sizes, modules)
        return [(part.name, part.source) for part in (*layer.qkvz.layout.parts, *layer.ba.layout.parts)]

    by_group = DeltaNetNames({"qkvz": "qkvz", "ba": "ba"}, by_group=True)
    starts = [("x.qkvz", 26, 3), ("x.qkvz", 29, 3), ("x.qkvz", 32, 10), ("x.qkvz", 42, 10)]
    starts += [("x.ba", 4, 2), ("x.ba", 6, 2)]
    assert rows(by_group) == [(name, slice(start, start + size)) for name, start, size in starts]
    stacked = DeltaNetNames({"qkv": "qkv", "z": "z", "b": "b", "a": "a"})
    starts = [("x.qkv", 3, 3), ("x.qkv", 9, 3), ("x.qkv", 22, 10), ("x.z", 10, 10), ("x.b", 2, 2), ("x.a", 2, 2)]
    assert rows(stacked) == [(name, slice(start, start + size)) for name, start, size in starts]


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_multi_token_prediction_layers_are_ignored(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    wanted, path = run(load_model(folder)), folder / "model.safetensors"
    tensors = load_file(path) | {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)}
    save_file(tensors, path, metadata={"format": "pt"})
    torch.testing.assert_close(run(load_model(folder)), wanted, atol=0, rtol=0)


def test_stacked_experts_equal_those_with_a_tensor_each(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen35moe", tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    gate_up, down = (tensors[f"model.language_model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert gate_up.shape == (6, 80, 64) and down.shape == (6, 64, 40)
    for rank, band in enumerate((slice(0, 20), slice(20, 40))):
        model = load_model(folder, make_context(tp=fake_group("tp", rank, 2)))
        found = next(module for module in model.modules() if isinstance(module, FusedMoE))
        halves = torch.cat((gate_up[:, :40][:, band], gate_up[:, 40:][:, band]), dim=1)
        assert torch.equal(found.gate_up, halves) and torch.equal(found.down, down[:, :, band])


def test_experts_that_are_stacked_and_single_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen35moe", tmp_path, tokenizer=False)
    path, name = folder / "model.safetensors", "model.language_model.layers.0.mlp.experts"
    tensors = load_file(path)
    for extra, words in (
        ({f"{name}.0.down_proj.weight": torch.ones(64, 40)}, "are both for"),
        ({f"{name}.down_proj": torch.ones(7, 64, 40)}, "unknown tensor"),
    ):
        save_file({**tensors, **extra}, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=words):
            load_model(folder)


@pytest.mark.shows("quantization", by="scheme")
@pytest.mark.parametrize(
    ("scheme", "name", "ranks"),
    [
        ("w8a16-rows", "qwen3next", 2),
        pytest.param("w8a16-rows", "olmohybrid", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_projections_give_the_logits_of_their_values(
    scheme: str, name: str, ranks: int, tmp_path: Path
) -> None:
    checkpoint = make_quantized(scheme, tmp_path, name)
    wanted = expected(checkpoint.plain)
    for logits in run_ranks(ranks, lambda tp: run(load_model(checkpoint.quantized, make_context(tp=tp)))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.shows("quantization", how="fp8")
@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "olmohybrid"])
def test_fp8_projections_give_the_logits_of_their_values(name: str, tmp_path: Path) -> None:
    checkpoint = make_float8("fp8-blocks", tmp_path, name)
    torch.testing.assert_close(run(load_model(checkpoint.quantized)), expected(checkpoint.plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.language_model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_ba"),
        ("language_model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("language_model.lm_head", "lm_head"),
        ("backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
    ],
)
def test_modules_that_are_not_quantized_have_the_names_of_the_checkpoint(name: str, ours: str) -> None:
    settings = HFConfig({"ignore": ["model.layers.3.mlp.gate", name]}, "config.json")
    assert {"model.layers.3.mlp.gate", name, ours} <= set(names(settings, "ignore"))


def test_kimi_linear_has_the_routed_scale_of_transformers_by_default(tmp_path: Path) -> None:
    folder = make_checkpoint("kimilinear", tmp_path, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    del config["routed_scaling_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(run(load_model(folder)), expected(folder), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen35moe", *further(["qwen3next", "lfm2moe", "kimilinear", "olmohybrid"])])
def test_quantization_on_load_stays_near_the_floats(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    wanted, found = run(load_model(folder)), run(load_model(folder, quantization="int8"))
    assert 0 < (found - wanted).pow(2).mean().sqrt() < 0.15 * wanted.std()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3next", {"layer_types": ["linear_attention"] * 2}, "should name full_attention or linear_attention for"),
        ("qwen3next", {"linear_num_value_heads": 5}, "5 value heads of model.layers.0.linear_attn do not form"),
        ("qwen3next", {"hidden_act": "gelu"}, "'gelu', but gated delta nets are supported with 'silu'"),
        ("lfm2moe", {"layer_types": ["conv", "mamba", "conv"]}, "should name full_attention or conv for each of the 3"),
        ("kimilinear", {"mla_use_nope": False}, "mla_use_nope is false"),
        ("kimilinear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax', but"),
        ("kimilinear", {"linear_attn_config": [1]}, "'linear_attn_config' should be a JSON object"),
        ("kimilinear", {"mlp_layer_types": ["dense"]}, "mlp_layer_types should name dense or sparse"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=words):
        load_model(folder)


def test_a_table_of_rotations_is_not_allocated_without_rotary_embedding(tmp_path: Path) -> None:
    for name in ("kimilinear", "olmohybrid"):
        folder = make_checkpoint(name, tmp_path / name, tokenizer=False)
        assert load_model(folder).rotary.max_len == 1
