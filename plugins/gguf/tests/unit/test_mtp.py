"""Modules for multi-token prediction from GGUF files: those of the checkpoint, for the method `mtp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plugins.gguf.tests.unit.test_checkpoint import check_same
from plugins.gguf.tests.written_files import make_folder, write_gguf
from safetensors.torch import load_file, save_file

from mvllm import SamplingParams
from mvllm.config.mtp import default_speculative_config, mtp_heads
from mvllm.errors import ConfigError
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.tensor_names import packed_modules
from tests.helpers import parity
from tests.helpers.paged_driver import load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group
from tests.helpers.zoo_mtp import MTPReference, load_head, predict_from_the_last_token


@pytest.mark.parametrize("name", ["glm4moe", "deepseek3", "qwen3next", "qwen35-text-tied", "qwen35moe-text"])
def test_model_and_module_have_the_weights_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = MTPReference(name, tmp_path / "hf").folder
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    folder = make_folder(file, tmp_path / "derived", model_config(read_gguf(file)))
    check_same(load_model(folder), load_model(checkpoint))
    for rank in (0, 1):
        contexts = [make_context(tp=fake_group("tp", rank, 2)) for _ in range(2)]
        check_same(load_head(folder, contexts[0]), load_head(checkpoint, contexts[1]))


def test_an_engine_drafts_with_the_blocks_of_a_file(tmp_path: Path) -> None:
    checkpoint = MTPReference("qwen35moe-text", tmp_path / "hf", edit=predict_from_the_last_token).folder
    file = write_gguf(checkpoint, tmp_path / "model.gguf", lambda name: "Q8_0")
    model = read_gguf(file)
    types = packed_modules(model, 10_000)
    assert {"mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.experts.*.up_proj"} <= set(types)
    config = {**model_config(model), "dtype": "float32"}
    config["quantization_config"] = {"quant_method": "gguf", "tensors": types}
    folder = make_folder(file, tmp_path / "derived", config)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [5, 9, 7] * 6}
    found = []
    none: dict[str, Any] = {"method": "none"}
    for settings in (none, None, {"method": "mtp", "num_speculative_tokens": 3}):
        with parity.engine(folder, skip_tokenizer_init=True, speculative_config=settings) as llm:
            found.append(list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids))
            stats, speculative = llm.llm_engine.stats, llm.llm_engine.config.speculative
            assert (speculative is not None) == (settings is not none)  # by default, it is on
    assert found[0] == found[1] == found[2]
    assert stats is not None and stats.num_draft_tokens == stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["glm4moe", "qwen35-text-tied"])
def test_a_file_without_the_tensors_has_no_module(name: str, tmp_path: Path) -> None:
    checkpoint = MTPReference(name, tmp_path / "hf").folder
    path = checkpoint / "config.json"
    values = json.loads(path.read_text())
    layers = values["num_hidden_layers"]
    without = {key: value for key, value in values.items() if key not in _COUNT_KEYS}
    path.write_text(json.dumps(without))
    _drop_module(checkpoint, layers)
    arch = {"glm4moe": "glm4moe", "qwen35-text-tied": "qwen35"}[name]
    extra = {f"{arch}.block_count": layers + 1, f"{arch}.nextn_predict_layers": 1}
    file = write_gguf(checkpoint, tmp_path / "model.gguf", extra=extra)
    folder = make_folder(file, tmp_path / "derived", model_config(read_gguf(file)))
    with pytest.raises(ConfigError, match="this checkpoint has none"):
        mtp_heads(read_config(folder))
    assert default_speculative_config(read_config(folder)) is None


_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def _drop_module(folder: Path, layers: int) -> None:
    path = folder / "model.safetensors"
    prefixes = ("mtp.", f"model.layers.{layers}.")
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(prefixes)}
    save_file(kept, path, metadata={"format": "pt"})
