"""Rare or contradictory settings of config.json: results as those of transformers, or a refusal that helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.errors import ModelError
from mvllm.layers.quantization.awq import AWQ
from mvllm.layers.quantization.interface import PackedFormat
from mvllm.models.registry import resolve_model_class
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model
from tests.unit.models.test_parity import draw_tokens, reference_logits, run_mixed

Tensors = dict[str, torch.Tensor]
TOKENS = draw_tokens(40, seed=3)


def edit_config(folder: Path, *removed: str, **settings: Any) -> None:
    """Removes and changes keys of config.json."""
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in removed}
    path.write_text(json.dumps({**config, **settings}))


def edit_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def logits(folder: Path, **settings: Any) -> torch.Tensor:
    (found,) = run_mixed(PagedDriver(load_model(folder, **settings)), [(TOKENS, 30, [17, 13])])
    return found


def check_against_transformers(folder: Path, **settings: Any) -> None:
    wanted = reference_logits(load_reference(folder), TOKENS)
    torch.testing.assert_close(logits(folder, **settings), wanted, atol=1e-4, rtol=0)


class TestTiedHeads:
    @staticmethod
    def make(folder: Path, factor: float) -> Path:
        """A tied checkpoint that has a head, too: the embedding times a factor."""
        make_checkpoint("llama-mha-tied", folder, tokenizer=False)
        edit_tensors(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] * factor})
        return folder

    def test_a_head_that_differs_from_the_embedding_is_refused_and_the_override_uses_it(self, tmp_path: Path) -> None:
        folder = self.make(tmp_path, -0.5)
        with pytest.raises(ModelError, match=r"'lm_head.weight'\) that differs from the token embedding.*hf_overrides"):
            load_model(folder)
        check_against_transformers(folder, hf_overrides={"tie_word_embeddings": False})  # transformers does not tie it

    def test_a_copy_of_the_embedding_is_allowed(self, tmp_path: Path) -> None:
        check_against_transformers(self.make(tmp_path, 1.0))


def test_a_window_that_is_not_in_effect_is_refused_where_layers_are_said_to_have_it(tmp_path: Path) -> None:
    folder = make_checkpoint("smollm3-window-biases", tmp_path, tokenizer=False)
    check_against_transformers(folder)
    edit_config(folder, use_sliding_window=False)
    with pytest.raises(ModelError, match="layer_types names sliding_attention, but no sliding_window is in effect"):
        load_model(folder)
    edit_config(folder, "layer_types")  # without a list, no layer has the window
    check_against_transformers(folder)


@pytest.mark.parametrize(
    "rope_scaling", [None, {"type": "dynamic", "alpha": 20.0, "factor": 1.0}], ids=["plain", "alpha"]
)
def test_dense_hunyuan_rotates_whole_heads(rope_scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    folder = make_checkpoint("hunyuan-mqa", tmp_path, tokenizer=False)
    edit_config(folder, "rope_parameters", partial_rotary_factor=0.5, rope_theta=1000.0, rope_scaling=rope_scaling)
    check_against_transformers(folder)


def test_cohere2_moe_has_a_rope_scaling_only_where_transformers_reads_it(tmp_path: Path) -> None:
    folder = make_checkpoint("cohere2moe", tmp_path, tokenizer=False)
    yarn = {"factor": 8.0, "original_max_position_embeddings": 32}
    edit_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, **yarn})
    check_against_transformers(folder)
    edit_config(folder, "rope_parameters", rope_theta=1000.0, rope_scaling=None)
    check_against_transformers(folder)
    edit_config(folder, rope_scaling={"type": "yarn", **yarn})
    with pytest.raises(ModelError, match="transformers ignores 'rope_scaling' in this family"):
        load_model(folder)


def test_rescale_prenorm_residual_of_mamba2_is_a_setting_of_the_initialisation(tmp_path: Path) -> None:
    """It does not change stored weights. transformers 5.23 divides them when it loads them, in this family alone."""
    folder = make_checkpoint("mamba2", tmp_path, tokenizer=False)
    wanted = reference_logits(load_reference(folder), TOKENS)
    edit_config(folder, rescale_prenorm_residual=True, residual_in_fp32=False)
    torch.testing.assert_close(logits(folder), wanted, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------ quantized checkpoints


def in_float8(tensors: Tensors, name: str) -> Tensors:
    """The tensor in FP8 with one scale, which is a power of two."""
    scale = 2.0 ** torch.ceil(torch.log2(tensors[name].abs().max() / 448))
    scale_name = f"{name}_scale" if name.endswith(".weight") else f"{name}_scale_inv"
    return {name: (tensors[name] / scale).to(torch.float8_e4m3fn), scale_name: scale.reshape(1)}


@pytest.mark.parametrize("name", ["mistral4", "qwen3moe"])
def test_quantized_experts_in_one_tensor_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    module = "model.layers.1.mlp.experts"

    def change(tensors: Tensors) -> Tensors:
        if f"{module}.down_proj" not in tensors:
            experts = [f"{module}.{e}.down_proj.weight" for e in range(6)]
            tensors[f"{module}.down_proj"] = torch.stack([tensors.pop(expert) for expert in experts])
        return {**tensors, **in_float8(tensors, f"{module}.down_proj")}

    edit_tensors(folder, change)
    edit_config(folder, quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "proj"]})
    with pytest.raises(
        ModelError, match=r"experts\.down_proj\w*' holds the quantized experts of a layer in one tensor"
    ):
        load_model(folder)


def test_modules_that_stay_floats_are_listed_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """LFM2, whose MLP and output projections have other names here: only queries, keys and values are quantized."""
    plain, folder = (make_checkpoint("lfm2", tmp_path / kind, tokenizer=False) for kind in ("plain", "quantized"))
    quantized = [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]

    def change(tensors: Tensors) -> Tensors:
        return {**tensors, **{key: value for name in quantized for key, value in in_float8(tensors, name).items()}}

    edit_tensors(folder, change)
    stored = load_file(folder / "model.safetensors")
    edit_tensors(plain, lambda t: {**t, **{n: stored[n].float() * stored[f"{n}_scale"] for n in quantized}})
    floats = ["conv", "feed_forward", "self_attn.out_proj", "lm_head"]
    edit_config(folder, quantization_config={"quant_method": "fp8", "modules_to_not_convert": floats})
    torch.testing.assert_close(logits(folder), logits(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "module", "listed"),
    [
        ("Lfm2MoeForCausalLM", "model.layers.2.mlp.experts.0.gate_proj", "model.layers.2.feed_forward.experts.0.w1"),
        ("KimiLinearForCausalLM", "model.layers.2.mlp.experts.0.down_proj", "layers.2.block_sparse_moe.experts.0.w2"),
        (
            "KimiLinearForCausalLM",
            "model.layers.2.mlp.shared_experts.up_proj",
            "block_sparse_moe.shared_experts.up_proj",
        ),
        ("KimiLinearForCausalLM", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("GraniteMoeHybridForCausalLM", "model.layers.0.shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
        ("BambaForCausalLM", "model.layers.0.mlp.gate_proj", "model.layers.0.feed_forward.gate_proj"),
        ("NemotronHForCausalLM", "model.layers.0.mixer.up_proj", "backbone.layers.0.mixer.up_proj"),
        ("MixtralForCausalLM", "model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.0.mlp.experts.0.w1"),
        ("MiniMaxM2ForCausalLM", "model.layers.0.block_sparse_moe.experts.0.w1", "model.layers.0.mlp.experts"),
        (
            "Llama4ForConditionalGeneration",
            "model.layers.0.self_attn.q_proj",
            "language_model.model.layers.0.self_attn",
        ),
        ("Qwen3_5ForConditionalGeneration", "model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"),
    ],
)
def test_a_module_is_listed_by_any_of_its_names(architecture: str, module: str, listed: str) -> None:
    method = AWQ(PackedFormat(4, 32, symmetric=False), (listed,))
    method.use_names(resolve_model_class(architecture).checkpoint_names)
    assert method._format_of(module) is None
    other = module.replace("layers.0", "layers.7").replace("layers.2", "layers.7")
    assert (method._format_of(other) is None) == ("layers." not in listed)
