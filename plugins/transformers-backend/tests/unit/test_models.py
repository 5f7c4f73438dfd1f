"""The transformers backend gives transformers' logits for chunks, batches and single tokens."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mvllm.config.families import is_native
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.models.causal_lm import CausalLM
from mvllm.models.checkpoint_support import check_architecture
from mvllm.models.registry import resolve_model_class
from mvllm_transformers_backend.dry_run import UnsupportedModelError, window_of
from mvllm_transformers_backend.replacement_modules import LinearReplacement
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import draw_tokens, reference_logits, run_mixed

zoo = importlib.import_module("plugins.transformers-backend.tests.text_zoo")
TOLERANCE = 1e-4
TOKENS, PROMPT_LEN = draw_tokens(40, seed=1), 24
EVERY_DAY = ("cohere2", "gpt_neox", "phi", "olmo2")
SHARED = [
    name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, family in zoo.ZOO.items()
    if family.ranks > 1
]


def load(folder: Path, *args: Any, **settings: Any) -> CausalLM:
    return load_model(folder, *args, model_impl="transformers", **settings)


def run(model: CausalLM) -> torch.Tensor:
    """One prompt in chunks, in a batch with another prompt."""
    plans = [(TOKENS, PROMPT_LEN, [7, 7, 10]), (draw_tokens(12, seed=2), 9, [9])]
    return run_mixed(PagedDriver(model), plans)[0]


def edit_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("name", zoo.ZOO)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = zoo.make_checkpoint(name, tmp_path)
    model, expected = load(folder), reference_logits(load_reference(folder), TOKENS, PROMPT_LEN)
    assert expected.std() > 0.5, "logits too close together to tell right from wrong"
    torch.testing.assert_close(run(model), expected, atol=TOLERANCE, rtol=0)
    assert any(isinstance(module, LinearReplacement) for module in model.modules())


@pytest.mark.shows("tp", impl="transformers")
@pytest.mark.parametrize("name", SHARED)
def test_tensor_parallel_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = zoo.make_checkpoint(name, tmp_path)
    alone = run(load(folder))
    for logits in run_ranks(2, lambda tp: run(load(folder, make_context(tp=tp)))):
        torch.testing.assert_close(logits, alone, atol=TOLERANCE, rtol=0)


def test_ranks_load_only_their_shard(tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("llama", tmp_path)
    alone, half = load(folder), load(folder, make_context(tp=fake_group("tp", 1, 2)))
    size, of_half = (sum(p.numel() for p in model.parameters()) for model in (alone, half))
    assert of_half < 0.52 * size
    assert [layer.spec.num_kv_heads for layer in half.attention_layers()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("hunyuan_v1_dense", 2, r"tensor_parallel_size is 2, but transformers has no tensor parallel plan"),
        ("llama", 4, r"cannot be shared by 4 ranks: .*Use tensor_parallel_size=1, with data_parallel_size"),
        ("cohere", 2, r"cannot be shared by 2 ranks"),
    ],
)
def test_indivisible_shards_are_refused(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    folder = zoo.make_checkpoint(name, tmp_path)
    (folder / "model.safetensors").unlink()  # no weight is read
    with pytest.raises(ConfigError, match=words):
        load(folder, make_context(tp=fake_group("tp", 0, ranks)))
    with pytest.raises(ConfigError, match=r"not cut into stages here. Use pipeline_parallel_size=1"):
        load(folder, make_context(pp=fake_group("pp", 0, 2)))


def test_each_layers_attention_settings_become_its_spec(tmp_path: Path) -> None:
    specs = [layer.spec for layer in load(zoo.make_checkpoint("gemma2", tmp_path / "g")).attention_layers()]
    assert [spec.sliding_window for spec in specs] == [9, None, 9]
    assert {(spec.soft_cap, spec.scale, spec.sinks, spec.num_kv_heads) for spec in specs} == {(2.0, 0.25, False, 2)}
    specs = [layer.spec for layer in load(zoo.make_checkpoint("gpt_oss", tmp_path / "o")).attention_layers()]
    assert [spec.sliding_window for spec in specs] == [9, None, 9] and all(spec.sinks for spec in specs)


def test_a_window_longer_than_any_sequence_is_ignored(tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("mistral", tmp_path)
    assert [layer.spec.sliding_window for layer in load(folder, max_model_len=8).attention_layers()] == [None] * 3


@pytest.mark.shows("quantization", by="quantization", family="llama", impl="transformers")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_on_load_equals_that_of_native_models(quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama-mha-tied", tmp_path, tokenizer=False)
    native = load_model(folder, quantization=quantization)
    torch.testing.assert_close(run(load(folder, quantization=quantization)), run(native), atol=TOLERANCE, rtol=0)


@pytest.mark.shows("quantization", how="fp8", family="llama", impl="transformers")
def test_quantized_checkpoints_give_the_logits_of_the_dequantized_weights(tmp_path: Path) -> None:
    from tests.helpers.float8_zoo import make_float8

    checkpoint = make_float8("fp8-blocks", tmp_path)
    expected = reference_logits(load_reference(checkpoint.plain), TOKENS, PROMPT_LEN)
    torch.testing.assert_close(run(load(checkpoint.quantized)), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("cohere2", tmp_path)
    found = run(load(folder, make_context(dtype=torch.bfloat16)))
    expected = reference_logits(load_reference(folder), TOKENS, PROMPT_LEN)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).pow(2).mean().sqrt() < 0.06 * expected.std()


# ------------------------------------------------------------------------------------------------------------- refusals


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        load(folder, **settings)
    return str(caught.value)


def save_config(folder: Path, config: str, **settings: Any) -> Path:
    """A model folder without weights."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = getattr(transformers, f"{config}Config")(**{**sizes, "max_position_embeddings": 256, **settings})
    made.architectures = [f"{config.removesuffix('Text')}ForCausalLM"]
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ("Bloom", {}, "computes its attention itself"),
        ("Jamba", {"num_key_value_heads": 2}, "keeps a state between tokens"),
        (
            "Lfm2",
            {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
            "keeps more than keys and values",
        ),
        ("DiffLlama", {}, "is not supported:"),
        ("JetMoe", {"num_key_value_heads": 4}, "depends on the values of its tensors"),
        ("XGLM", {"d_model": 64, "attention_heads": 4, "num_layers": 2}, "computes its attention itself"),
        ("BertGeneration", {}, "is not supported:"),
    ],
)
def test_models_that_a_paged_cache_cannot_serve_are_refused_before_weights_are_read(
    config: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save_config(tmp_path, config, **settings)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    if config == "BertGeneration":
        edit_config(folder, architectures=["BertGenerationDecoder"])
    assert reason in refusal(folder), architecture


@pytest.mark.parametrize(("rope_type", "native"), [("dynamic", 256), ("longrope", 64)])
def test_batch_dependent_rope_limits_max_model_len(rope_type: str, native: int, tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("llama", tmp_path)
    rope = {"rope_type": rope_type, "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": native}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0] * 8}
    edit_config(folder, rope_parameters=rope)
    assert f"Set max_model_len to {native}" in refusal(folder)
    found = run(load(folder, max_model_len=native))
    expected = reference_logits(load_reference(folder), TOKENS, PROMPT_LEN)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 5, 99, 100])
def test_mask_functions_are_recognized(window: int) -> None:
    def rule(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key > query - window)

    assert window_of(rule, 100) == (None if window >= 100 else window)


@pytest.mark.parametrize(
    "rule",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & (key // 16 == query // 16),
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
        lambda batch, head, query, key: (key <= query) & ((key > query - 9) | (key < 4)),
        lambda batch, head, query, key: key < query,
    ],
    ids=["both ways", "chunks", "holes", "sinks", "not itself"],
)
def test_mask_functions_other_than_windows_are_refused(rule: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor those of a sliding window"):
        window_of(rule, 100)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    folder = zoo.make_checkpoint("smollm3", tmp_path)
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    text = refusal(folder)
    assert "unknown tensor 'model.layers.0.extra.weight'" in text and "missing tensor 'model.norm.weight'" in text


# --------------------------------------------------------------------------------------------------------------- choice


def config_of(folder: Path, model_impl: str) -> ModelConfig:
    return read_config(folder, model_impl=model_impl)


def test_auto_uses_the_native_class_if_there_is_one(tmp_path: Path) -> None:
    native = make_checkpoint("llama-gqa", tmp_path / "l", tokenizer=False)
    assert resolve_model_class("LlamaForCausalLM").__name__ == "LlamaForCausalLM"
    assert resolve_model_class("LlamaForCausalLM", "transformers").__name__ == "TransformersForCausalLM"
    check_architecture(config_of(native, "native"))
    other = zoo.make_checkpoint("phi", tmp_path / "s")
    assert not is_native("PhiForCausalLM"), "this test needs another architecture"
    assert resolve_model_class("PhiForCausalLM").__name__ == "TransformersForCausalLM"
    check_architecture(config_of(other, "auto"))
    with pytest.raises(ModelError, match=r"'PhiForCausalLM' is not supported.*model_impl is 'native'"):
        check_architecture(config_of(other, "native"))
    with pytest.raises(ConfigError, match="model_impl"):
        config_of(other, "vllm")


def test_folders_with_remote_code_use_the_transformers_class(tmp_path: Path) -> None:
    folder = edit_config(zoo.make_checkpoint("smollm3", tmp_path), auto_map={"AutoModelForCausalLM": "m.M"})
    check_architecture(config_of(folder, "auto"))
    expected = reference_logits(load_reference(zoo.make_checkpoint("smollm3", tmp_path / "x")), TOKENS, PROMPT_LEN)
    torch.testing.assert_close(run(load(folder)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["Acme", "AutoModelForCausalLM", "_Private", "a b", "T5ForConditionalGeneration"])
def test_names_that_are_no_causal_language_model_are_refused(name: str, tmp_path: Path) -> None:
    folder = edit_config(zoo.make_checkpoint("llama", tmp_path), architectures=[name])
    with pytest.raises(ModelError, match=rf"'{name}' is not supported. Transformers has no causal language model"):
        check_architecture(config_of(folder, "auto"))
