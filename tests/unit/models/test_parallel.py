"""Sharded models compute the logits of one rank, and every checkpoint element has a target."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mvllm.config.model import ModelConfig
from mvllm.config.model_limits import check_parallel_sizes
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.safetensors_file import SafetensorsReader, read_header
from mvllm.models.weight_loader import load_weights
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import draw_tokens

NAMES = [
    "llama-gqa",
    "llama-mha-tied",
    "llama-mqa-biases",
    "llama-odd-vocabulary-tied",
    "mistral-window-yarn",
    "qwen2-window",
    "qwen3-biases-window",
    "opt-norm-after-projected",
    "opt",
    "gpt2",
    "gpt2-untied",
    "mamba2",
]
TOKENS = draw_tokens(30, seed=7)


def run(driver: PagedDriver) -> torch.Tensor:
    sequence = driver.add(20)
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in (TOKENS[:20], TOKENS[20:29], TOKENS[29:])])


def build(folder: Path, tp: GroupCoordinator | None = None, pp: GroupCoordinator | None = None) -> CausalLM:
    config = read_config(folder)
    return resolve_model_class(config.architecture)(config, make_context(tp=tp, pp=pp))


@pytest.mark.shows("tp")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_ranks_give_the_logits_of_one(name: str, world_size: int, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(PagedDriver(load_model(folder)))
    together = run_ranks(world_size, lambda tp: run(PagedDriver(load_model(folder, make_context(tp=tp)))))
    for logits in together:
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


@pytest.mark.shows("pp")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_stages_give_the_logits_of_one(name: str, world_size: int, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    alone = run(PagedDriver(load_model(folder)))
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, world_size))) for rank in range(world_size)]
    torch.testing.assert_close(run(PagedDriver(*stages)), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", [*NAMES, "gpt2-first-names"])
def test_the_ranks_together_read_every_element_once_or_in_equal_copies(
    name: str, tp_size: int, pp_size: int, tmp_path: Path
) -> None:
    check_every_element_is_read(make_checkpoint(name, tmp_path, tokenizer=False), tp_size, pp_size)


def check_every_element_is_read(folder: Path, tp_size: int, pp_size: int) -> None:
    read: dict[str, torch.Tensor] = {}
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            model = build(folder, fake_group("tp", tp_rank, tp_size), fake_group("pp", pp_rank, pp_size))
            filled = {id(parameter): torch.zeros(parameter.shape) for parameter in model.parameters()}
            for tensor_name, targets in model.weight_targets().items():
                for target in targets:
                    counts = read.setdefault(tensor_name, torch.zeros(target.source_shape))
                    counts[target.source] += 1
                    filled[id(target.parameter)][target.destination] += 1
                    shape = [s.stop - s.start for s in target.source]
                    assert filled[id(target.parameter)][target.destination].numel() == math.prod(shape)
            for parameter_name, parameter in model.named_parameters():
                times = filled[id(parameter)]
                if re.search("lm_head|embed_tokens|wte|word_embeddings", parameter_name):
                    assert times.max() <= 1  # padding rows of the vocabulary stay empty
                else:
                    assert (times == 1).all(), f"{parameter_name} is filled {times.unique().tolist()} times"
    for tensor_name, counts in read.items():
        assert counts.min() >= 1, f"nobody reads some elements of {tensor_name}"
        copied = re.search(r"\.([kv]|qkv)_proj|k_norm|query_key_value|(mamba|mixer)\.(in_proj|conv1d)", tensor_name)
        assert counts.max() == counts.min() or copied


def test_a_stage_ignores_only_the_weights_of_other_stages(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-gqa", tmp_path, tokenizer=False)
    first, last = (build(folder, pp=fake_group("pp", rank, 2)) for rank in range(2))
    assert first.ignores("model.norm.weight") and first.ignores("lm_head.weight")
    assert first.ignores("model.layers.2.mlp.up_proj.weight") and not first.ignores("model.layers.0.mlp.up.weight")
    assert last.ignores("model.embed_tokens.weight") and not last.ignores("lm_head.weight")
    assert not first.ignores("model.layers.3.mlp.up_proj.weight"), "the model has three layers"


def test_a_tied_lm_head_is_ignored_and_the_last_stage_reads_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-mha-tied", tmp_path, tokenizer=False)
    last = build(folder, pp=fake_group("pp", 1, 2))
    assert last.ignores("lm_head.weight")
    assert "model.embed_tokens.weight" in last.weight_targets()
    whole = build(folder)
    assert whole.lm_head.weight is whole.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "tp_size", "words"),
    [("llama-gqa", 3, "attention heads"), ("qwen3", 8, "attention heads"), ("llama-gqa", 64, "attention heads")],
)
def test_ranks_that_do_not_divide_the_model_are_refused(name: str, tp_size: int, words: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match=words):
        build(folder, tp=fake_group("tp", 0, tp_size))


@pytest.mark.parametrize(
    "name",
    [
        "mamba2",
        "falconh1-norm",
        "bamba-groups",
        "granitehybrid",
        "granitehybrid-dense",
        "nemotronh",
        "nemotronh-latent",
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "kimilinear",
        "lfm2",
        "olmohybrid",
        "gptoss",
        "deepseek3",
        "mistral4-dense-biases",
    ],
)
@pytest.mark.parametrize("num_heads", [None, 24])
def test_sizes_that_ranks_cannot_share_are_found_from_the_config_alone(
    name: str, num_heads: int | None, tmp_path: Path
) -> None:
    config = write_config(name, tmp_path, num_heads)
    for tp_size in (2, 3, 4, 6, 8):
        found = shares = None
        try:
            resolve_model_class(config.architecture)(config, make_context(tp=fake_group("tp", 0, tp_size)))
        except ConfigError as e:
            shares = e
        try:
            check_parallel_sizes(config, tp_size, 1)
        except ConfigError as e:
            found = e
        assert (found is None) == (shares is None), f"{tp_size} ranks: {found} / {shares}"


def write_config(name: str, folder: Path, num_heads: int | None) -> ModelConfig:
    """The config of a checkpoint of the zoo, with so many heads of attention."""
    entry = ZOO[name]
    config = entry.config()
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_bytes())
    if entry.edit_config is not None:
        entry.edit_config(values)
    text = values.get("text_config", values)
    if num_heads is not None:
        text.update({key: num_heads for key in ("num_attention_heads", "num_key_value_heads") if key in text})
        if "kv_lora_rank" not in text:
            text.setdefault("head_dim", 8)
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt2", tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the model's 3 layers"):
        build(folder, pp=fake_group("pp", 0, 4))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", [*NAMES, "llama-many-files"])
def test_no_rank_reads_more_bytes_than_its_parameters_take(
    name: str, tp_size: int, pp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 in the checkpoint and in memory, so bytes read equal the parameter bytes, except for padding rows."""
    num_read = 0
    read_into = SafetensorsReader.read_into

    def counted(self, target, entry, offset):
        nonlocal num_read
        num_read += len(target)
        read_into(self, target, entry, offset)

    monkeypatch.setattr(SafetensorsReader, "read_into", counted)
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            model = build(folder, fake_group("tp", tp_rank, tp_size), fake_group("pp", pp_rank, pp_size))
            held = sum(parameter.nbytes for parameter in model.parameters())
            num_read = 0
            load_weights(model, folder, use_tqdm=False)
            assert 0 < num_read <= held


# Tensors that several ranks may replicate, by checkpoint name: small, or impossible to shard.
REPLICATED = re.compile(
    r"norm|\.ln_|ln_f|embed_positions|wpe|project_(in|out)"  # norms, positions, OPT's outer projections
    r"|(o_proj|down_proj|out_proj|fc2|c_proj)\.bias"  # added once, after the sum
)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_reads_only_its_shard_of_every_sharded_tensor(
    name: str, tp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes read from the file per tensor: an even shard, or one key/value head if there are more ranks than heads."""
    num_read: Counter[str] = Counter()
    read_into = SafetensorsReader.read_into

    def counted(self, target, entry, offset):
        num_read[entry.name] += len(target)
        read_into(self, target, entry, offset)

    monkeypatch.setattr(SafetensorsReader, "read_into", counted)
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    sizes = {entry.name: entry for entry in read_header(folder / "model.safetensors")}
    config = read_config(folder)
    for rank in range(tp_size):
        num_read.clear()
        load_weights(build(folder, fake_group("tp", rank, tp_size)), folder, use_tqdm=False)
        cut = [entry for tensor, entry in sizes.items() if not REPLICATED.search(tensor)]
        assert len(cut) > len(sizes) // 3
        for entry in cut:
            copies = max(1, tp_size // config.num_kv_heads) if re.search(r"\.[kv]_proj\.", entry.name) else 1
            rows = entry.shape[0]
            most = (
                entry.num_bytes * copies // tp_size + entry.num_bytes // rows
            )  # an indivisible vocabulary: one row more
            assert num_read[entry.name] <= most, f"rank {rank} reads too much of {entry.name}"
        assert sum(num_read.values()) < sum(entry.num_bytes for entry in sizes.values())
