"""The families of `zoo_recent`: sharded, quantized, as part of multimodal checkpoints, and misconfigured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.errors import ConfigError, ModelError
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.registry import resolve_model_class
from tests.helpers.model_zoo import load_reference, make_checkpoint, marked
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_recent import QUICK, RECENT
from tests.unit.models.test_parallel import build, check_every_element_is_read, run
from tests.unit.models.test_parity import TOLERANCE, draw_tokens, reference_logits, run_mixed
from tests.unit.models.test_quantized import check_quantized_on_load

NO_STAGES = ("gemma4", "gemma4-biases")
"""Models whose later layers need more than the residual stream."""


@pytest.mark.parametrize("name", [*QUICK, "gemma4-experts"])
def test_logits_of_a_batch_in_chunks_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    plans = [(draw_tokens(44, seed=1), 40, [40]), (draw_tokens(37, seed=3), 33, [7, 11, 11, 4])]
    reference = load_reference(folder)
    for ours, (tokens, prompt_len, _) in zip(run_mixed(PagedDriver(load_model(folder)), plans), plans, strict=True):
        expected = reference_logits(reference, tokens, prompt_len)
        assert expected.std() > 0.5, "logits too close together to tell right from wrong"
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.shows("tp", "pp")
@pytest.mark.parametrize("name", marked(name for name in RECENT if name not in NO_STAGES))
def test_ranks_and_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = check_ranks(folder)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(PagedDriver(*stages)), alone, atol=1e-5, rtol=0)
    check_every_element_is_read(folder, 2, 2)


@pytest.mark.shows("tp")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NO_STAGES)
def test_ranks_give_the_logits_of_one_and_stages_are_refused(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    check_ranks(folder)
    check_every_element_is_read(folder, 2, 1)
    with pytest.raises(ConfigError, match="Use pipeline_parallel_size=1"):
        build(folder, pp=fake_group("pp", 1, 2))


def check_ranks(folder: Path) -> torch.Tensor:
    """The logits of one rank, which two ranks give, too."""
    alone = run(PagedDriver(load_model(folder)))
    for logits in run_ranks(2, lambda tp: run(PagedDriver(load_model(folder, make_context(tp=tp))))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    return alone


# (checkpoint, config options with the values that a family would have if it ignored its own).
FORGOTTEN: list[tuple[str, dict[str, Any]]] = [
    ("smollm3", {"nope_layers": frozenset()}),
    ("smollm3-window-biases", {"windows": ()}),
    ("olmo3", {"windows": ()}),
    ("olmo3", {"local_rope": None}),
    ("exaone4", {"nope_layers": frozenset()}),
    ("exaone4", {"windows": ()}),
    ("cohere2", {"nope_layers": frozenset()}),
    ("cohere2", {"interleaved_rotary": False}),
    ("cohere2", {"logits_scale": 1.0}),
    ("ministral3", {"query_scaling": None}),
    ("mistral4", {"query_scaling": None}),
    ("ernie45", {"interleaved_rotary": False}),
    ("hunyuan", {"qk_norm_last": False}),
    ("gemma4", {"logits_soft_cap": None}),
    ("gemma4", {"embedding_scale": 1.0}),
]


@pytest.mark.exhaustive
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


@pytest.mark.shows("quantization", by="quantization")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in QUICK if name != "mistral4"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_quantized_on_load_give_the_logits_of_transformers_with_them(
    name: str, quantization: str, tmp_path: Path
) -> None:
    check_quantized_on_load(make_checkpoint(name, tmp_path, tokenizer=False), quantization)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", QUICK)
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    driver, tokens = PagedDriver(load_model(folder, make_context(dtype=torch.bfloat16))), draw_tokens(40, seed=6)
    (ours,) = driver.step([(driver.add(len(tokens)), tokens)])
    wanted = reference_logits(load_reference(folder), tokens, len(tokens))
    assert (ours.float() - wanted).pow(2).mean().sqrt() < 0.06 * wanted.std()


# ----------------------------------------------------------------------------- the text part of multimodal checkpoints

# (checkpoint, architecture, name of a tensor: its name in a multimodal checkpoint).
MULTIMODAL = [
    ("ministral3", "Mistral3ForConditionalGeneration", "model.language_model.", "model."),
    ("mistral4-dense-biases", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model."),
    ("mistral-window", "Mistral3ForConditionalGeneration", "language_model.model.", "language_model."),
    ("gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", "model."),
]


@pytest.mark.parametrize(("name", "architecture", "prefix", "others"), MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint_gives_the_logits_of_the_text_model(
    name: str, architecture: str, prefix: str, others: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    right = run(PagedDriver(load_model(folder)))
    _make_multimodal(folder, architecture, prefix, others)
    assert torch.equal(run(PagedDriver(load_model(folder))), right)


def _make_multimodal(folder: Path, architecture: str, prefix: str, others: str) -> None:
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": [architecture], "model_type": "some", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": text.get("tie_word_embeddings")}))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."
    renamed = {
        head + key.removeprefix("lm_head.")
        if key.startswith("lm_head.")
        else prefix + key.removeprefix("model."): value
        for key, value in tensors.items()
    }
    vision = {f"{others.replace('language_model.', '')}vision_tower.layers.0.weight": torch.zeros(2)}
    save_file({**renamed, **vision, "multi_modal_projector.linear_1.weight": torch.zeros(2)}, file)


def test_layers_that_share_keys_and_values_have_no_cache(tmp_path: Path) -> None:
    model = load_model(make_checkpoint("gemma4", tmp_path, tokenizer=False))
    assert [layer.spec.sliding_window for layer in model.attention_layers()] == [9, None, 9]
    assert [layer.spec.head_size for layer in model.attention_layers()] == [16, 32, 16]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers should be a list of 1 .RoPE. or 0 .none. for each"),
        ("exaone4", {"sliding_window_pattern": "LX", "layer_types": None}, "a text such as 'LLLG', found 'LX'"),
        (
            "gemma4-experts",
            {"hidden_activation": "silu"},
            "hidden_activation is 'silu', but experts are supported with 'gelu_pytorch_tanh' only",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (
            "gemma4-keys-are-values",
            {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}},
            "per_layer_config should give the layers without a window .1, 3. the same 'head_dim'",
        ),
        (
            "gemma4-keys-are-values",
            {"per_layer_config": {"0": {"head_dim": 32}}},
            "per_layer_config should give the layers without a window .1, 3. the same 'head_dim'",
        ),
        ("exaone4", {"per_layer_config": {"0": {"sliding_window": 5}}}, "per_layer_config gives single layers other"),
        ("gemma4", {"num_kv_shared_layers": 6}, "'num_kv_shared_layers' should be less than .* 6, found 6"),
        ("gemma4", {"num_kv_shared_layers": 5}, "no earlier layer has the same entry in layer_types"),
    ],
)
def test_unsupported_settings_are_refused_with_their_key(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=words):
        build(folder)


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_without_rope_settings_the_scaling_is_that_of_the_family(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config))
    tokens = draw_tokens(40, seed=1)
    right = reference_logits(load_reference(folder), tokens, 40)
    ours = run_mixed(PagedDriver(load_model(folder, max_model_len=256)), [(tokens, 40, [40])])[0]
    torch.testing.assert_close(ours, right, atol=TOLERANCE, rtol=0)
    with pytest.raises(AssertionError):
        plain = load_model(folder, max_model_len=256, hf_overrides={"rope_parameters": {"rope_type": "default"}})
        torch.testing.assert_close(run_mixed(PagedDriver(plain), [(tokens, 40, [40])])[0], right, atol=1e-2, rtol=0)


def test_a_pattern_of_letters_names_the_layers_with_windows(tmp_path: Path) -> None:
    folder = make_checkpoint("exaone4", tmp_path, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": None, "sliding_window_pattern": "LLG"}))
    assert [layer.spec.sliding_window for layer in build(folder).attention_layers()] == [9, 9, None, None]
