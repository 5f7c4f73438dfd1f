"""MoE and MLA models: sharded, quantized, with a small cache, and unsupported variants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError, ModelError
from mvllm.families.gpt_oss.experts import GptOssExperts
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mla_attention import MLAAttention
from mvllm.layers.quantization.mxfp4 import dequantize
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from tests.helpers.float8_zoo import make_float8
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.mxfp4 import pack_experts
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.quantized_zoo import make_quantized
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import draw_tokens, reference_logits

FAMILIES = ["mixtral", "qwen2moe-mixed", "qwen3moe", "gptoss", "deepseek2-groups", "deepseek3"]
TOKENS, PROMPT_LEN = draw_tokens(30, seed=7), 20


def run(*stages: CausalLM) -> torch.Tensor:
    driver = PagedDriver(*stages)
    sequence = driver.add(PROMPT_LEN)
    pieces = (TOKENS[:PROMPT_LEN], TOKENS[PROMPT_LEN:29], TOKENS[29:])
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in pieces])


def expected(folder: Path) -> torch.Tensor:
    return reference_logits(load_reference(folder), TOKENS, PROMPT_LEN)


@pytest.mark.shows("tp")
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(load_model(folder))
    for logits in run_ranks(2, lambda tp: run(load_model(folder, make_context(tp=tp)))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


@pytest.mark.shows("pp")
@pytest.mark.parametrize("name", FAMILIES)
def test_pipeline_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(*stages), run(load_model(folder)), atol=1e-5, rtol=0)


def test_the_mla_cache_has_one_latent_vector_per_token_on_every_rank(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek3", tmp_path, tokenizer=False)
    for tp in (None, fake_group("tp", 1, 2)):
        for layer in load_model(folder, make_context(tp=tp)).attention_layers():
            assert layer.backend.kv_layout().bytes_per_token == (32 + 8) * torch.float32.itemsize
            assert layer.spec.num_heads == (4 if tp is None else 2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """GPT-OSS with experts in MXFP4, and the same as floats; the ranks' shards of 48 end inside groups of 32."""
    folder = tmp_path_factory.mktemp("mxfp4")
    plain = make_checkpoint("gptoss", folder / "plain", tokenizer=False)
    pack_experts(plain, folder / "packed")
    return folder / "packed", plain


@pytest.mark.shows("quantization", family="gpt_oss", how="mxfp4")
@pytest.mark.parametrize("ranks", [1, 2])
def test_mxfp4_experts_equal_those_of_the_dequantized_checkpoint(packed: tuple[Path, Path], ranks: int) -> None:
    in_blocks, plain = packed
    wanted = expected(plain)
    assert wanted.std() > 0.5
    for logits in run_ranks(ranks, lambda tp: run(load_model(in_blocks, make_context(tp=tp)))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    model, other = load_model(in_blocks), load_model(plain)
    for mine, others in zip(_experts_of(model), _experts_of(other), strict=True):
        assert torch.equal(mine.gate_up, others.gate_up) and torch.equal(mine.down, others.down)


def _experts_of(model: CausalLM) -> list[GptOssExperts]:
    return [module for module in model.modules() if isinstance(module, GptOssExperts)]


def test_mxfp4_values_equal_the_specification() -> None:
    """All sixteen codes with three scales."""
    codes = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    blocks = torch.tensor([[[2 * i | (2 * i + 1) << 4 for i in range(8)] * 2] * 3], dtype=torch.uint8)
    floats = dequantize(blocks[0].unsqueeze(0), torch.tensor([[127, 130, 120]], dtype=torch.uint8))
    assert floats.tolist() == [[code * scale for scale in (1, 8, 2**-7) for code in codes * 2]]


@pytest.mark.shows("quantization", by="scheme")
@pytest.mark.parametrize(
    ("scheme", "name", "ranks"),
    [("gptq", "qwen3moe", 1), ("w8a16-rows", "qwen3moe", 2), ("awq-latent", "deepseek3", 1)],
)
def test_quantized_experts_and_mla_projections_are_dequantized(
    scheme: str, name: str, ranks: int, tmp_path: Path
) -> None:
    checkpoint = make_quantized(scheme, tmp_path, name)
    assert any(".experts." in matrix for matrix in checkpoint.matrices)
    wanted = expected(checkpoint.plain)
    for logits in run_ranks(ranks, lambda tp: run(load_model(checkpoint.quantized, make_context(tp=tp)))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.shows("quantization", how="fp8")
@pytest.mark.parametrize(("name", "ranks"), [("deepseek3", 1), ("deepseek3", 2), ("qwen3moe", 2)])
def test_fp8_experts_and_mla_projections_are_dequantized(name: str, ranks: int, tmp_path: Path) -> None:
    """In blocks, like DeepSeek's published checkpoints."""
    checkpoint = make_float8("fp8-blocks", tmp_path, name)
    wanted = expected(checkpoint.plain)
    for logits in run_ranks(ranks, lambda tp: run(load_model(checkpoint.quantized, make_context(tp=tp)))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gptoss", "deepseek2"])
def test_quantization_on_load_skips_experts_and_routers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    rounded, plain = load_model(folder, quantization="int8"), load_model(folder)
    kinds = (FusedMoE, GptOssExperts)
    pairs = [
        (mine, others)
        for mine, others in zip(rounded.modules(), plain.modules(), strict=False)
        if isinstance(mine, kinds) and isinstance(others, kinds)
    ]
    assert pairs and all(torch.equal(mine.gate_up, others.gate_up) for mine, others in pairs)
    wanted = run(plain)
    assert (run(rounded) - wanted).pow(2).mean().sqrt() < 0.15 * wanted.std()
    names = {type(module).__name__ for module in rounded.modules()}
    assert ("MLAAttention" in names) == (name == "deepseek2")


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek3", tmp_path, tokenizer=False)
    wanted, path = run(load_model(folder)), folder / "model.safetensors"
    tensors = load_file(path)
    for further in (2, 3):
        tensors[f"model.layers.{further}.eh_proj.weight"] = torch.ones(3, 3)
        save_file(tensors, path, metadata={"format": "pt"})
        if further == 2:  # num_nextn_predict_layers is 1
            torch.testing.assert_close(run(load_model(folder)), wanted, atol=0, rtol=0)
        else:
            with pytest.raises(ModelError, match=r"unknown tensor 'model\.layers\.3\.eh_proj"):
                load_model(folder)


@pytest.mark.parametrize("name", ["gptoss", "deepseek3"])
def test_dummy_weights_are_those_of_one_model_on_every_rank(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    (folder / "model.safetensors").unlink()

    def logits(tp: GroupCoordinator) -> torch.Tensor:
        config = read_config(folder)
        model = resolve_model_class(config.architecture)(config, make_context(tp=tp))
        load_weights(model, folder, load_format="dummy", use_tqdm=False)
        model.after_load()
        return run(model)

    [alone] = run_ranks(1, logits)
    assert alone.std() > 0
    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


def _set(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("mixtral", _set(hidden_act="gelu"), ModelError, "'gelu', but experts are supported with 'silu' only"),
        ("mixtral", _set(num_experts_per_tok=5), ModelError, "a token visits 5 experts, of 4"),
        ("qwen2moe", _set(mlp_only_layers="all"), ModelError, "'mlp_only_layers' should be a list"),
        ("deepseek2", _set(topk_method="noaux_tc"), ModelError, "'topk_method' should be 'greedy' or"),
        ("deepseek3", _set(n_group=3), ModelError, "8 experts do not stand in 3 groups"),
        (
            "gptoss",
            _set(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
            ConfigError,
            "quantization AWQ is not supported for the experts",
        ),
    ],
)
def test_unsupported_settings_are_refused(
    name: str, change: Callable[[dict[str, Any]], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load_model(folder)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    ctx = make_context(tp=fake_group("tp", 0, 16))
    with pytest.raises(ConfigError, match="inner elements of experts"):
        FusedMoE(ctx, "experts", 64, 40, num_experts=4, top_k=2)


def test_deepseek_models_use_mla(tmp_path: Path) -> None:
    model = load_model(make_checkpoint("deepseek2", tmp_path, tokenizer=False))
    assert sum(isinstance(module, MLAAttention) for module in model.modules()) == 2
