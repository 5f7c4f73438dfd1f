"""Models that generate images: logits of text and of images, and pixels, as transformers computes them."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path

import pytest
import torch

from mvllm.layers.context import BuildContext
from mvllm.models.causal_lm import CausalLM
from tests.helpers.host_sync import ForbidSynchronizingOps
from tests.helpers.image_zoo import NUM_CODES, load_janus, make_janus
from tests.helpers.model_zoo import VOCAB_SIZE
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.unit.models.test_parity import TOLERANCE, draw_tokens

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
