"""Models with sparse attention: what they cache, sharded, short sequences without an indexer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm.errors import ConfigError, ModelError
from tests.helpers.float8_zoo import make_float8
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_sparse_attention import SPARSE_ATTENTION
from tests.unit.models.test_moe_families import expected, run
from tests.unit.models.test_parity import draw_tokens, reference_logits, run_mixed

ALL = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "dsa")) for name in SPARSE_ATTENTION]


def make(name: str, folder: Path, **changes: object) -> Path:
    """A checkpoint with other settings in its config.json."""
    make_checkpoint(name, folder, tokenizer=False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.shows("tp", "pp")
@pytest.mark.parametrize("name", ALL)
def test_tensor_parallel_ranks_and_pipeline_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    alone = run(load_model(folder))
    for logits in run_ranks(2, lambda tp: run(load_model(folder, make_context(tp=tp)))):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(*stages), alone, atol=1e-5, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.shows("quantization", family="deepseek_v32", how="fp8")
def test_fp8_checkpoints_equal_the_dequantized_ones(tmp_path: Path) -> None:
    checkpoint = make_float8("fp8-blocks", tmp_path, "dsa")
    torch.testing.assert_close(run(load_model(checkpoint.quantized)), expected(checkpoint.plain), atol=1e-4, rtol=0)


def test_each_layer_with_an_indexer_caches_a_key_beside_the_latent(tmp_path: Path) -> None:
    for name, num_indexers, num_layers in (("dsa", 2, 2), ("glm5", 2, 4)):
        model = load_model(make(name, tmp_path / name))
        sizes = [layer.backend.kv_layout().bytes_per_token for layer in model.attention_layers()]
        assert sorted(sizes) == [16 * 4] * num_indexers + [(32 + 8) * 4] * num_layers
        assert {layer.spec.index_topk for layer in model.attention_layers()} == {8}


def test_the_selection_limits_what_a_token_sees(tmp_path: Path) -> None:
    """The first tokens have the logits of full attention, later ones do not."""
    sparse, dense = make("dsa", tmp_path / "sparse"), make("dsa", tmp_path / "dense", index_topk=256)
    tokens = draw_tokens(40, seed=3)
    found, full = (run_mixed(PagedDriver(load_model(folder)), [(tokens, 40, [40])])[0] for folder in (sparse, dense))
    torch.testing.assert_close(found[:8], full[:8], atol=1e-5, rtol=0)
    assert (found - full)[16:].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("name", ["dsa", pytest.param("glm5", marks=pytest.mark.exhaustive)])
def test_sequences_up_to_the_selection_need_no_indexer(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path, index_topk=64)
    model = load_model(folder, max_model_len=64)
    assert {layer.spec.index_topk for layer in model.attention_layers()} == {None}
    assert not [name for name in model.weight_targets() if "indexer" in name]
    tokens = draw_tokens(30, seed=4)
    (found,) = run_mixed(PagedDriver(model), [(tokens, 20, [9, 11])])
    torch.testing.assert_close(found, reference_logits(load_reference(folder), tokens, 20), atol=1e-4, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings", [{"index_topk_pattern": "FSFS"}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}]
)
def test_patterns_and_frequencies_say_which_layers_have_an_indexer(settings: dict[str, Any], tmp_path: Path) -> None:
    listed = load_model(make("glm5", tmp_path / "listed"))
    other = load_model(make("glm5", tmp_path / "other", indexer_types=None, **settings))
    assert torch.equal(run(other), run(listed))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("dsa", {"index_head_dim": 4}, "index_head_dim should be at least qk_rope_head_dim = 8, found 4"),
        ("dsa", {"q_lora_rank": None}, "the indexer reads the query latent, but q_lora_rank is not set"),
        ("glm5", {"indexer_types": ["full"]}, "indexer_types should name full or shared for each of the 4 layers"),
        ("glm5", {"indexer_types": ["shared"] + ["full"] * 3}, "indexer_types should begin with full"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(make(name, tmp_path, **changes))


def test_a_stage_cannot_begin_with_the_selection_of_an_earlier_one(tmp_path: Path) -> None:
    folder = make("glm5", tmp_path, indexer_types=["full", "full", "shared", "full"])
    second = make_context(pp=fake_group("pp", 1, 2))
    with pytest.raises(ConfigError, match=r"begins at layer 2.*stages begin at layers with an indexer \(0, 1, 3\)"):
        load_model(folder, second)
    assert load_model(folder, second, max_model_len=8).attention_layers()
