"""The text-to-image example: its checker, its decoder, its trainer and a short run."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[4] / "docs" / "examples" / "t2i_r1"


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of the example, by name. They are imported by the names that they have beside each other."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    sys.path.insert(0, str(FOLDER))
    try:
        modules: dict[str, ModuleType] = {name: __import__(name) for name in names}
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


def painted(example: SimpleNamespace, codes: list[int]) -> np.ndarray:
    """The pixels of codes, uint8 [16, 16, 3]."""
    squares = example.shapes.RGB[np.array(codes).reshape(8, 8)].astype(np.uint8)
    return squares.repeat(2, axis=0).repeat(2, axis=1)


class TestTheChecker:
    def test_a_picture_of_the_scene_gets_the_full_reward(self, example: SimpleNamespace) -> None:
        shapes = example.shapes
        for colour in shapes.COLOURS:
            for shape in shapes.SHAPES:
                for place in shapes.PLACES:
                    scene = shapes.Scene(colour, shape, place)
                    assert shapes.check(painted(example, scene.draw()), scene).correct

    @pytest.mark.parametrize(
        ("drawn", "scores"),
        [
            (("green", "ring", "top left"), (0.0, 1.0, 1.0)),
            (("red", "square", "top left"), (1.0, 0.0, 1.0)),
            (("red", "ring", "bottom right"), (1.0, 1.0, 0.0)),
            (("red", "ring", "middle"), (1.0, 1.0, 0.25)),
        ],
    )
    def test_each_part_is_scored_alone(
        self, example: SimpleNamespace, drawn: tuple[str, str, str], scores: tuple[float, float, float]
    ) -> None:
        asked = example.shapes.Scene("red", "ring", "top left")
        score = example.shapes.check(painted(example, example.shapes.Scene(*drawn).draw()), asked)
        assert (score.colour, score.shape, score.place) == scores
        assert score.reward == pytest.approx(sum(scores) / 3)
        assert not score.correct

    def test_an_empty_picture_gets_no_reward(self, example: SimpleNamespace) -> None:
        scene = example.shapes.Scene("red", "ring", "top left")
        assert example.shapes.check(painted(example, [0] * 64), scene).reward == 0.0


def test_the_written_decoder_paints_the_colour_of_each_code(example: SimpleNamespace) -> None:
    model = example.tiny_janus.make_model()
    codes = torch.randint(len(example.shapes.RGB), (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = (model.decode_image_tokens(codes).numpy() + 1) * 127.5
    for row in range(2):
        assert np.abs(pixels[row] - painted(example, codes[row].tolist())).max() < 0.5


def test_held_out_prompts_are_not_trained_on(example: SimpleNamespace) -> None:
    trained, held_out = example.shapes.all_tasks()
    assert not set(trained) & set(held_out)
    assert len(trained) + len(held_out) == 10 * 4 * 5


def test_the_trainer_raises_the_probability_of_the_better_samples_of_a_group(example: SimpleNamespace) -> None:
    shapes, train = example.shapes, example.train
    model = example.tiny_janus.make_model()
    tasks = shapes.all_tasks()[0][:2]
    samples = []
    for task in tasks:
        for colour in list(shapes.COLOURS)[:4]:
            scene = shapes.Scene(colour, task.shape, task.place)
            score = shapes.check(painted(example, scene.draw()), task.scene)
            samples.append(train.Sample(task, scene.plan(), scene.draw(), [], None, score))

    def totals(level: int) -> torch.Tensor:
        with torch.no_grad():
            found = example.tiny_janus.log_probs(model, [(s.task.prompt(), s.plan, s.codes) for s in samples])
        for row, sample in enumerate(samples):
            sample.old = found[0][row][found[1][row] | found[2][row]].tolist()
        return (found[0] * found[level]).sum(dim=1)

    better = torch.tensor([sample.score.reward > 0.999 for sample in samples])
    before = [totals(level) for level in (1, 2)]
    difference = train.Trainer(model, lr=1e-3).step(samples, group=4, updates=1)
    after = [totals(level) for level in (1, 2)]
    assert difference < 1e-5
    assert better.any()
    assert not better.all()
    for old, new in zip(before, after, strict=True):
        gained = new - old
        assert gained[better].mean() > gained[~better].mean()


@pytest.mark.exhaustive
def test_a_short_run_raises_the_reward_and_the_engine_follows_the_trainer(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    settings = example.train.SHORT
    result = example.train.run(settings, tmp_path)
    assert len(result.rewards) == settings.steps
    assert result.after > result.before + 0.02  # prompts that were not trained on, with the same seeds
    # The trainer compares the engine's log-probabilities of every step with those of the weights that it wrote.
    assert 0 < result.difference < 1e-3
    assert ElementTree.parse(tmp_path / "t2i_r1_reward.svg").getroot().tag.endswith("svg")
    before, after = ((tmp_path / f"t2i_r1_{when}.png").read_bytes() for when in ("before", "after"))
    for png in (before, after):
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">II", png[16:24]) == (8 * 54 + 6, 6 * 54 + 6)  # 8 pictures of 6 prompts
    assert before != after
