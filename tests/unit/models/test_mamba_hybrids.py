"""Granite 4, Falcon-H1, Nemotron-H and Bamba: sharded, decoded in captured form, in bfloat16, and misconfigured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm.errors import ConfigError, ModelError
from mvllm.layers.mamba2_mixer import Mamba2Config, Mamba2Mixer
from tests.helpers.host_sync import ForbidSynchronizingOps
from tests.helpers.model_zoo import ZOO, load_reference, make_checkpoint, marked
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_hybrid import HYBRID
from tests.unit.models.test_parallel import build, check_every_element_is_read, run
from tests.unit.models.test_parity import PROMPT_LEN, draw_tokens, reference_logits

QUICK = [name for name in HYBRID if not ZOO[name].exhaustive]
MIXER = Mamba2Config(hidden_size=32, num_heads=8, head_size=4, num_groups=2, state_size=6)


@pytest.mark.shows("tp", "pp")
@pytest.mark.parametrize("name", marked(HYBRID))
def test_ranks_and_stages_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(PagedDriver(load_model(folder)))
    sizes = (2,) if name.startswith("falconh1") else (2, 4)  # 6 heads
    for world_size in sizes:
        together = run_ranks(world_size, lambda tp: run(PagedDriver(load_model(folder, make_context(tp=tp)))))
        for logits in together:
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    torch.testing.assert_close(run(PagedDriver(*stages)), alone, atol=1e-5, rtol=0)
    for tp_size in sizes:
        check_every_element_is_read(folder, tp_size, 1)
    check_every_element_is_read(folder, 2, 2)


def test_a_stage_holds_states_of_its_own_layers_only(tmp_path: Path) -> None:
    folder = make_checkpoint("granitehybrid", tmp_path, tokenizer=False)
    first, last = (load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2))
    assert (len(first.state_layers()), len(first.attention_layers())) == (1, 1)
    assert (len(last.state_layers()), len(last.attention_layers())) == (1, 0)


def test_the_state_of_a_rank_has_its_heads_and_groups(tmp_path: Path) -> None:
    folder = make_checkpoint("nemotronh", tmp_path, tokenizer=False)
    for world_size, channels in ((1, 128 + 2 * 2 * 12), (2, 64 + 2 * 12), (4, 32 + 2 * 12)):
        (layer,) = load_model(folder, make_context(tp=fake_group("tp", 0, world_size))).state_layers()
        conv, matrices = layer.spec.tensors
        assert (conv.shape, conv.dtype) == ((channels, 3), "float32")
        assert (matrices.shape, matrices.dtype) == ((8 // world_size, 16, 12), "float32")


@pytest.mark.parametrize(
    ("changes", "world_size", "words"),
    [
        ({"num_heads": 6}, 4, "6 Mamba heads of layer cannot be shared evenly by 4 ranks"),
        ({"num_heads": 6, "num_groups": 3}, 2, "tensor_parallel_size=2 neither divides the 3 groups"),
        ({"num_groups": 3}, 1, "8 Mamba heads do not form 3 equal groups"),
        (
            {"num_heads": 12, "num_groups": 12, "norm_groups": 3},
            2,
            "3 normalised parts of 48 elements cannot be shared",
        ),
    ],
)
def test_ranks_that_do_not_divide_a_mixer_are_refused(changes: dict[str, Any], world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Mamba2Mixer(make_context(tp=fake_group("tp", 0, world_size)), "layer", replace(MIXER, **changes))


def test_a_mixer_with_another_activation_than_silu_is_refused() -> None:
    with pytest.raises(ModelError, match="activation of a Mamba layer is 'gelu'"):
        Mamba2Mixer(make_context(), "layer", replace(MIXER, activation="gelu"))


@pytest.mark.parametrize("name", QUICK)
def test_decoding_does_not_synchronize_with_the_device(name: str, tmp_path: Path) -> None:
    driver = PagedDriver(load_model(make_checkpoint(name, tmp_path, tokenizer=False)))
    sequences = [driver.add(2), driver.add(3)]
    driver.step([(sequences[0], [5, 6]), (sequences[1], [7, 8, 9])])
    model = driver.stages[0]
    forward = model.forward

    def checked(*arguments: Any) -> torch.Tensor:
        with ForbidSynchronizingOps():
            return forward(*arguments)

    model.forward = checked
    driver.step([(sequence, [4]) for sequence in sequences])


@pytest.mark.parametrize("name", QUICK)
def test_the_time_step_is_limited(name: str, tmp_path: Path) -> None:
    """In a prompt: transformers does not limit the time step of single tokens."""
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    tokens = draw_tokens(PROMPT_LEN, seed=8)
    model = load_model(folder)
    free = PagedDriver(model)
    (unlimited,) = free.step([(free.add(PROMPT_LEN), tokens)])
    change_config(folder, time_step_limit=[0.05, 0.3])
    driver = PagedDriver(load_model(folder))
    (ours,) = driver.step([(driver.add(PROMPT_LEN), tokens)])
    assert (ours - unlimited).abs().max() > 0.1
    if name != "nemotronh":  # transformers' model does not read this key
        torch.testing.assert_close(
            ours, reference_logits(load_reference(folder), tokens, PROMPT_LEN), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("name", QUICK)
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    driver = PagedDriver(load_model(folder, make_context(dtype=torch.bfloat16)))
    tokens = draw_tokens(PROMPT_LEN, seed=6)
    sequence = driver.add(30)
    ours = torch.cat([driver.step([(sequence, piece)])[0] for piece in (tokens[:30], *([t] for t in tokens[30:]))])
    wanted = reference_logits(load_reference(folder), tokens, 30)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).pow(2).mean().sqrt() < 0.1 * wanted.std()


# (checkpoint, keys of config.json that a family would have if it ignored them).
FORGOTTEN: list[tuple[str, dict[str, Any]]] = [
    ("granitehybrid", {"position_embedding_type": "rope"}),
    ("granitehybrid", {"embedding_multiplier": 1.0}),
    ("granitehybrid", {"attention_multiplier": 0.25}),
    ("granitehybrid", {"residual_multiplier": 1.0}),
    ("granitehybrid", {"logits_scaling": 1.0}),
    *(
        ("falconh1", {f"{key}_multiplier": 1.0})
        for key in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    ),
    *(("falconh1", {"ssm_multipliers": [1.3 if i == each else 1.0 for i in range(5)]}) for each in range(5)),
    ("falconh1", {"mlp_multipliers": [1.0, 1.3]}),
    ("falconh1", {"mlp_multipliers": [0.9, 1.0]}),
    ("nemotronh", {"n_group": 1}),
    ("nemotronh", {"routed_scaling_factor": 2.0}),
    ("nemotronh", {"mlp_hidden_act": "relu"}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "without"), FORGOTTEN, ids=lambda value: str(value))
def test_every_setting_of_a_family_changes_the_logits(name: str, without: dict[str, Any], tmp_path: Path) -> None:
    """The parity tests cannot detect settings that do not change the outputs of these weights."""
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    right = run(PagedDriver(load_model(folder)))
    change_config(folder, **without)
    assert (run(PagedDriver(load_model(folder))) - right).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "granitehybrid",
            {"layer_types": ["mamba", "attention"]},
            "layer_types should name full_attention or linear_attention for each of the 3",
        ),
        ("granitehybrid", {"layer_types": ["mamba", "attention", "moe"]}, "layer_types should name.*found.*'moe'"),
        ("granitehybrid", {"mamba_d_head": 12}, "8 Mamba heads of 12 elements .* inner size of a Mamba layer, 128"),
        ("granitehybrid", {"time_step_limit": [1.0, 0.0]}, "'time_step_limit' should be two ascending numbers"),
        ("granitehybrid", {"hidden_act": "gelu"}, "activation of a Mamba layer is 'gelu'"),
        ("falconh1", {"ssm_multipliers": [1.0]}, "'ssm_multipliers' should be a list of 5 numbers"),
        ("falconh1", {"mamba_n_heads": 5, "mamba_d_head": "auto"}, "5 Mamba heads of 19 elements"),
        ("nemotronh", {"hybrid_override_pattern": "M-X*"}, "'hybrid_override_pattern' should have one of"),
        ("nemotronh", {"hybrid_override_pattern": "M-*"}, "'hybrid_override_pattern'.*each of the 4 layers"),
        ("nemotronh", {"moe_latent_size": 24, "mlp_bias": True}, "'moe_latent_size' is not supported together with"),
        ("nemotronh", {"mlp_hidden_act": "gelu"}, "'gelu' is not supported in experts without a gate. Supported: relu"),
        ("bamba", {"attn_layer_indices": "1"}, "'attn_layer_indices' should be a list of layer numbers"),
    ],
)
def test_wrong_settings_are_refused_with_their_key(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = ZOO[name].config()
    config.architectures = [ARCHITECTURES[name]]
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    if (edit := ZOO[name].edit_config) is not None:
        edit(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        build(tmp_path)


ARCHITECTURES = {
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "falconh1": "FalconH1ForCausalLM",
    "nemotronh": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
}


def test_prediction_layers_of_nemotron_are_ignored(tmp_path: Path) -> None:
    model = build(make_checkpoint("nemotronh", tmp_path, tokenizer=False))
    assert model.ignores("mtp.layers.0.mixer.q_proj.weight")
    assert not model.ignores("backbone.layers.0.mixer.q_proj.weight")
    assert read_config(tmp_path).num_layers == 4


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
