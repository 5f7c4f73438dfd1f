"""The newer mixture-of-experts families: sharded, quantized, composite checkpoints, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.config.rope_parameters import RopeParameters, prompt_cache_key
from mvllm.errors import ModelError
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.quantization.rtn_matrix import rounded
from mvllm.models.causal_lm import CausalLM
from mvllm.ops.quantized_moe import quantized_moe
from mvllm.platform.op_provider import OpProvider
from tests.helpers.float8_zoo import make_float8
from tests.helpers.model_zoo import ZOO, load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_large_moe import LARGE_MOE
from tests.unit.models.test_moe_families import expected, run
from tests.unit.models.test_parity import draw_tokens, reference_logits, run_mixed

FIRST = [name for name in LARGE_MOE if not ZOO[name].exhaustive]
SHARDED = [pytest.param(name, marks=[pytest.mark.exhaustive] * ZOO[name].exhaustive) for name in LARGE_MOE]


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


@pytest.mark.shows("tp", "pp")
@pytest.mark.parametrize("name", SHARDED)
def test_tensor_parallel_ranks_and_pipeline_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(load_model(folder))
    for logits in run_ranks(2, lambda tp: run(load_model(folder, make_context(tp=tp)))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(*stages), alone, atol=1e-5, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.shows("quantization", how="fp8")
@pytest.mark.parametrize("name", ["glm4moe", "deepseek32"])
def test_fp8_checkpoints_equal_the_dequantized_ones(name: str, tmp_path: Path) -> None:
    """In blocks, like the published checkpoints."""
    checkpoint = make_float8("fp8-blocks", tmp_path, name)
    torch.testing.assert_close(run(load_model(checkpoint.quantized)), expected(checkpoint.plain), atol=1e-4, rtol=0)


def test_llama4_attends_in_chunks_beyond_the_first(tmp_path: Path) -> None:
    """A prompt of four chunks, whole and cut at other places than its chunks; another chunk size changes the logits."""
    folder = make_checkpoint("llama4", tmp_path, tokenizer=False)
    reference, tokens = load_reference(folder), draw_tokens(130, seed=8)
    wanted = reference_logits(reference, tokens, 110)
    for chunks in ([110], [31, 33, 1, 45]):
        (found,) = run_mixed(PagedDriver(load_model(folder)), [(tokens, 110, chunks)])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    _edit(folder, lambda config: config.update(attention_chunk_size=64))
    (other,) = run_mixed(PagedDriver(load_model(folder)), [(tokens, 110, [110])])
    assert (other - wanted)[40:].abs().max() > 0.1
    torch.testing.assert_close(other[:32], wanted[:32], atol=1e-4, rtol=0)


def test_llama4_layers_have_chunks_only_where_sequences_are_longer(tmp_path: Path) -> None:
    folder = make_checkpoint("llama4", tmp_path, tokenizer=False)
    chunks = [layer.chunk_size for layer in load_model(folder).attention_layers()]
    assert chunks == [32, 32, 32, None]
    assert {layer.chunk_size for layer in load_model(folder, max_model_len=32).attention_layers()} == {None}


def test_composite_llama4_checkpoints_equal_those_of_the_language_model(tmp_path: Path) -> None:
    plain = make_checkpoint("llama4", tmp_path / "plain", tokenizer=False)
    wanted = run(load_model(plain))
    folder = make_checkpoint("llama4", tmp_path / "composite", tokenizer=False)

    def composed(config: dict[str, Any]) -> None:
        text = dict(config)
        text.pop("architectures")
        config.clear()
        config.update(
            architectures=["Llama4ForConditionalGeneration"],
            model_type="llama4",
            text_config=text,
            vision_config={"hidden_size": 32},
        )

    def with_image_encoder(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        others = {"vision_model.class_embedding": torch.ones(8), "multi_modal_projector.linear_1.weight": torch.ones(8)}
        return {**{f"language_model.{name}": tensor for name, tensor in tensors.items()}, **others}

    _edit_tensors(_edit(folder, composed), with_image_encoder)
    model = load_model(folder)
    assert type(model).__name__ == "Llama4ForConditionalGeneration"
    torch.testing.assert_close(run(model), wanted, atol=0, rtol=0)


def _experts(model: CausalLM) -> list[FusedMoE]:
    return [module for module in model.modules() if isinstance(module, FusedMoE)]


def test_experts_of_llama4_are_read_from_one_tensor_of_all(tmp_path: Path) -> None:
    folder = make_checkpoint("llama4", tmp_path, tokenizer=False)
    tensors, (block, *_) = load_file(folder / "model.safetensors"), _experts(load_model(folder))
    name = "model.layers.0.feed_forward.experts"
    for matrix, found in (("gate_up_proj", block.gate_up), ("down_proj", block.down)):
        assert torch.equal(found.data, tensors[f"{name}.{matrix}"].transpose(1, 2))


def test_experts_of_llama4_are_rounded_while_they_are_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint("llama4", tmp_path, tokenizer=False)
    prepared: list[tuple[list[Any], list[Any]]] = []

    def prepare(pair: tuple[Any, Any]) -> Any:
        prepared.append((list(pair[0]), list(pair[1])))
        return prepared[-1]

    provider = OpProvider("quantized_moe", "experts", quantized_moe, lambda case: [], prepare=prepare)
    model = load_model(folder, make_context(providers=[provider]), quantization="int8")
    plain = _experts(load_model(folder))
    assert len(prepared) == len(plain) == 4 and all(block.stays_quantized for block in _experts(model))
    format = IntegerFormat(bits=8, group_size=None)
    for (gate_up, down), floats in zip(prepared, plain, strict=True):
        for stored, wanted in ((gate_up, floats.gate_up), (down, floats.down)):
            for weight, matrix in zip(stored, wanted.data, strict=True):
                expected_weight = rounded(matrix, format)
                assert torch.equal(weight.values, expected_weight.values)
                assert torch.equal(weight.scales, expected_weight.scales)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4moe", "model.layers.2.eh_proj.weight"),
        ("glm4moelite", "model.layers.2.eh_proj.weight"),
        ("ernie45moe", "model.mtp_block.0.mlp.gate_proj.weight"),
        ("exaonemoe", "mtp.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_multi_token_prediction_layers_are_ignored(name: str, tensor: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    wanted = run(load_model(folder))
    _edit(folder, lambda config: config.update(num_nextn_predict_layers=1))
    _edit_tensors(folder, lambda tensors: {**tensors, tensor: torch.ones(3, 3)})
    torch.testing.assert_close(run(load_model(folder)), wanted, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("name", "key", "second"),
    [
        ("hunyuanmoe", "moe_topk", "num_experts_per_tok"),
        ("hunyuanmoe", "num_experts", "num_local_experts"),
        ("minimaxm2", "num_local_experts", "num_experts"),
        ("glm4moe", "n_routed_experts", "num_local_experts"),
        ("deepseek32", "n_routed_experts", "num_experts"),
    ],
)
def test_keys_have_the_second_names_of_transformers(name: str, key: str, second: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    _edit(folder, lambda config: config.update({second: config.pop(key)}))
    torch.testing.assert_close(run(load_model(folder)), expected(folder), atol=1e-4, rtol=0)


def test_hunyuans_alpha_is_independent_of_the_length(tmp_path: Path) -> None:
    """Cached keys are shared between prompts of all lengths, though the type is `dynamic`."""
    folder = make_checkpoint("hunyuanmoe-alpha", tmp_path, tokenizer=False)
    config = read_config(folder)
    assert RopeParameters.from_config(config.hf_config, config.head_size).rope_type == "ntk_alpha"
    assert {prompt_cache_key(config)(length) for length in (1, 100, 100_000)} == {0}


def _set(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("glm4moe", _set(mlp_layer_types=["dense"]), "mlp_layer_types should name dense or sparse"),
        ("glm4moe", _set(n_shared_experts=-1), "'n_shared_experts' should be an integer >= 0, found -1"),
        ("ernie45moe", _set(use_bias=True), "use_bias is set: heads with a bias are not supported"),
        ("ernie45moe", _set(moe_layer_start_index="one"), "should be layer numbers, found 'one'"),
        ("hunyuanmoe", _set(use_cla=True), "use_cla is set: attention across layers is not supported"),
        ("hunyuanmoe", _set(moe_topk=[2]), "'moe_topk' should be a positive integer, or one for each of the 2 layers"),
        ("llama4", _set(layer_types=["sliding_attention"] * 4), "'layer_types' should have one of 'full_attention'"),
        ("llama4", _set(no_rope_layers=[1, 0]), "'no_rope_layers' should have one of 0, 1 for each of the 4 layers"),
        ("llama4", _set(moe_layers="all"), "'moe_layers' should be a list of layer numbers, found 'all'"),
    ],
)
def test_unsupported_settings_are_refused(
    name: str, change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    folder = _edit(make_checkpoint(name, tmp_path, tokenizer=False), change)
    with pytest.raises(ModelError, match=words):
        load_model(folder)
