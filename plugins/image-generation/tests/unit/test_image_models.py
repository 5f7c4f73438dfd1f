"""Models that generate images: logits of text and of images, and pixels, as transformers computes them."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.config.model_builder import load_hf_config, transformer_shape
from mvllm.config.token_spaces import TokenSpace
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.models.causal_lm import CausalLM
from mvllm.models.checkpoint_support import check_architecture
from mvllm_image_generation.formats import shorten_vocabulary_map
from mvllm_image_generation.models.pixel_decoder import pixel_statistics
from tests.helpers.host_sync import ForbidSynchronizingOps
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import TOLERANCE, draw_tokens

zoo = importlib.import_module("plugins.image-generation.tests.image_zoo")
EMU3_FIRST_CODE = zoo.EMU3_FIRST_CODE
NUM_CODES = zoo.NUM_CODES
load_emu3 = zoo.load_emu3
load_janus = zoo.load_janus
make_emu3 = zoo.make_emu3
make_janus = zoo.make_janus


GRID = 6


@functools.cache
def janus() -> Path:
    return make_janus(Path(tempfile.mkdtemp(prefix="mvllm-janus-")), grid=GRID, tokenizer=False)


def draw_codes(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, NUM_CODES, (count,), generator=torch.Generator().manual_seed(seed))


class HiddenDriver(PagedDriver):
    """Returns hidden states in place of logits."""

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        last = self.stages[-1]
        last.compute_logits = lambda hidden: hidden  # type: ignore[method-assign]
        (result,) = self.step([(self.add(len(tokens)), tokens)])
        return result


def image_logits(*stages: CausalLM, prompt: list[int], codes: torch.Tensor) -> torch.Tensor:
    space = stages[-1].config.token_spaces["image"]
    hidden = HiddenDriver(*stages).hidden([*prompt, *(codes + space.first).tolist()])
    with torch.inference_mode():
        return stages[-1].compute_space_logits(hidden[len(prompt) - 1 :], space)


@torch.no_grad()
def reference_image_logits(prompt: list[int], codes: torch.Tensor) -> torch.Tensor:
    model = load_janus(janus())
    text = model.get_input_embeddings()(torch.tensor([prompt]))
    embeddings = torch.cat([text, model.prepare_embeddings_for_image_generation(codes.unsqueeze(0))], dim=1)
    hidden = model.model.language_model(inputs_embeds=embeddings).last_hidden_state[0, len(prompt) - 1 :]
    return model.model.generation_head(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_text_logits_of_janus_are_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    folder = make_janus(tmp_path, grid=2, tied=tied, tokenizer=False)
    tokens = draw_tokens(40, seed=1)
    driver = PagedDriver(load_model(folder))
    (ours,) = driver.step([(driver.add(len(tokens)), tokens)])
    with torch.no_grad():
        wanted = load_janus(folder)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)


def test_image_logits_of_janus_are_those_of_transformers() -> None:
    prompt, codes = draw_tokens(11, seed=2), draw_codes(GRID * GRID)
    wanted = reference_image_logits(prompt, codes)
    assert wanted.std() > 0.5
    torch.testing.assert_close(image_logits(load_model(janus()), prompt=prompt, codes=codes), wanted, atol=1e-4, rtol=0)


@pytest.mark.shows("tp", "pp", family="janus")
def test_ranks_and_stages_of_janus_give_the_logits_of_one() -> None:
    prompt, codes = draw_tokens(7, seed=4), draw_codes(12)
    wanted = image_logits(load_model(janus()), prompt=prompt, codes=codes)

    def on_rank(ctx: BuildContext) -> torch.Tensor:
        model = load_model(janus(), ctx)
        assert (model.pixel_decoder is not None) == ctx.tp.is_first
        return image_logits(model, prompt=prompt, codes=codes)

    for logits in run_ranks(2, lambda tp: on_rank(make_context(tp=tp))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    stages = [load_model(janus(), make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    assert [stage.pixel_decoder is not None for stage in stages] == [False, True]
    torch.testing.assert_close(image_logits(*stages, prompt=prompt, codes=codes), wanted, atol=1e-5, rtol=0)


def test_pixels_of_janus_are_those_of_transformers() -> None:
    codes = torch.stack([draw_codes(GRID * GRID, seed) for seed in range(2)])
    decoder = load_model(janus()).pixel_decoder
    assert decoder is not None
    with torch.inference_mode():
        wanted = load_janus(janus()).decode_image_tokens(codes)
        ours = decoder.decode(codes.view(2, GRID, GRID))
    assert wanted.std() > 0.3
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
    pixels = decoder.to_pixels(codes.view(2, GRID, GRID))
    assert pixels.dtype == torch.uint8 and pixels.shape == (2, 2 * GRID, 2 * GRID, 3)
    away_from_integers = ((wanted + 1) * 127.5).frac().sub(0.5).abs() < 0.49
    expected = ((wanted + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    assert torch.equal(pixels[away_from_integers], expected[away_from_integers])


def test_the_vision_tower_is_left_out_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mvllm"):
        model = load_model(janus())
    said = [record for record in caplog.records if "vision tower" in record.getMessage()]
    assert len(said) == 1
    assert not any("vision_model" in name or "encoder" in name for name, _ in model.named_parameters())


def test_codes_are_behind_the_vocabulary() -> None:
    model = load_model(janus())
    (space,) = model.token_spaces.values()
    assert (space.name, space.first, space.size, space.num_tokens) == ("image", VOCAB_SIZE, NUM_CODES, GRID * GRID)
    assert model.config.num_token_ids == VOCAB_SIZE + NUM_CODES


def test_codes_are_embedded_without_a_wait_for_the_device() -> None:
    model = load_model(janus())
    with ForbidSynchronizingOps():
        image_logits(model, prompt=draw_tokens(3, seed=1), codes=draw_codes(4))


@functools.cache
def emu3() -> Path:
    return make_emu3(Path(tempfile.mkdtemp(prefix="mvllm-emu3-")), tokenizer=False)


@pytest.mark.shows("tp", "pp", family="emu3")
def test_logits_of_emu3_are_those_of_transformers_on_ranks_and_stages_too() -> None:
    model = load_model(emu3())
    assert model.token_spaces["image"] == TokenSpace("image", EMU3_FIRST_CODE, NUM_CODES, has_own_head=False)
    tokens = [*draw_tokens(20, seed=1), *(EMU3_FIRST_CODE + draw_codes(20)).tolist()]
    with torch.no_grad():
        wanted = load_emu3(emu3())(torch.tensor([tokens])).logits[0]

    def run(*stages: CausalLM) -> torch.Tensor:
        driver = PagedDriver(*stages)
        return driver.step([(driver.add(len(tokens)), tokens)])[0]

    torch.testing.assert_close(run(model), wanted, atol=1e-4, rtol=0)
    for logits in run_ranks(2, lambda tp: run(load_model(emu3(), make_context(tp=tp)))):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    stages = [load_model(emu3(), make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    assert [stage.pixel_decoder is not None for stage in stages] == [False, True]
    torch.testing.assert_close(run(*stages), wanted, atol=1e-4, rtol=0)


def test_pixels_of_emu3_are_those_of_transformers() -> None:
    codes = torch.stack([draw_codes(15, seed) for seed in range(2)]).view(2, 3, 5)
    decoder = load_model(emu3()).pixel_decoder
    assert decoder is not None
    with torch.inference_mode():
        wanted = load_emu3(emu3()).model.vqmodel.decode(codes).permute(0, 2, 3, 1)
        ours = decoder.decode(codes)
    assert wanted.std() > 0.05
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_names_of_older_checkpoints_of_emu3_are_known(tmp_path: Path) -> None:
    folder = make_emu3(tmp_path, tokenizer=False)
    path = folder / "model.safetensors"
    older = {}
    for name, tensor in load_file(path).items():
        name = name.replace("model.text_model.", "text_model.model.").replace("model.vqmodel.", "vqmodel.")
        older["text_model." + name if name == "lm_head.weight" else name] = tensor
    save_file(older, path, metadata={"format": "pt"})
    tokens = draw_tokens(5, seed=1)
    drivers = [PagedDriver(load_model(each)) for each in (emu3(), folder)]
    new, old = (driver.step([(driver.add(5), tokens)])[0] for driver in drivers)
    assert torch.equal(new, old)


def test_pixels_use_the_mean_and_deviation_of_the_image_processor(tmp_path: Path) -> None:
    assert pixel_statistics(tmp_path) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}')
    assert pixel_statistics(tmp_path) == ([0.1, 0.2, 0.3], [1, 2, 3])
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"image_mean": [1], "image_std": [1]}}')
    with pytest.raises(ModelError, match="three numbers, found"):
        pixel_statistics(tmp_path)


def test_codes_of_emu3_need_contiguous_ids() -> None:
    config = {
        "model_type": "emu3",
        "vocabulary_map": {"a": 1, **{f"<|visual token {i:06d}|>": 9 + i for i in range(3)}},
    }
    shorten_vocabulary_map(config, "x")
    assert config == {"model_type": "emu3", "vocabulary_map": {}, "visual_tokens": [9, 3]}
    config["vocabulary_map"] = {"<|visual token 000000|>": 4, "<|visual token 000001|>": 6}
    with pytest.raises(ModelError, match="not contiguous"):
        shorten_vocabulary_map(config, "x")


def test_original_checkpoints_of_janus_are_refused_with_the_name_of_converted_ones(tmp_path: Path) -> None:
    make_janus(tmp_path, grid=2, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MultiModalityCausalLM"]}))
    with pytest.raises(ModelError, match="deepseek-community/Janus-Pro-1B"):
        check_architecture(read_config(tmp_path))


def test_transformers_class_is_not_used_for_models_of_images() -> None:
    with pytest.raises(ModelError, match="'JanusForConditionalGeneration' is not supported"):
        check_architecture(read_config(janus(), model_impl="transformers"))


def test_values_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "emu3", "text_config": {"num_hidden_layers": 3}}')
    shape = transformer_shape(load_hf_config(tmp_path))
    assert (shape.num_layers, shape.num_kv_heads, shape.vocab_size, shape.head_size) == (3, 8, 184622, 128)
    assert load_hf_config(tmp_path).get("rope_theta") == 1e6
    outer = {"model_type": "janus", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = load_hf_config(tmp_path)
    assert found.get("tie_word_embeddings") is True and found.get("intermediate_size") == 11008
