"""The task: prompts that ask for a coloured shape, plans, pictures as codes, and the checker that gives the reward.

A picture has 8 x 8 codes, each a square of 2 x 2 pixels of one colour. A shape is 4 x 4 codes in one of five places. A
prompt names the colour by a thing that has it ("like a lemon"); the plan, which the model writes before it draws, names
the colour itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

GRID = 8  # codes per side
CELL = 2  # pixels per side of a code's square
NUM_CODES = GRID * GRID

COLOURS = {  # code 1 and on; code 0 is the background
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 90, 220),
    "yellow": (240, 215, 60),
    "black": (40, 40, 40),
}
RGB = np.array([(245, 245, 240), *COLOURS.values()])
"""The colour of each code, [6, 3]."""

THINGS = {
    "cherry": "red",
    "tomato": "red",
    "leaf": "green",
    "frog": "green",
    "sea": "blue",
    "sky": "blue",
    "lemon": "yellow",
    "sun": "yellow",
    "coal": "black",
    "crow": "black",
}
_ROWS_OF_SHAPES = {
    "square": ("####", "####", "####", "####"),
    "circle": (".##.", "####", "####", ".##."),
    "ring": (".##.", "#..#", "#..#", ".##."),
    "triangle": ("#...", "##..", "###.", "####"),
}
SHAPES = {name: np.array([[cell == "#" for cell in row] for row in rows]) for name, rows in _ROWS_OF_SHAPES.items()}
"""The painted codes of each shape, bool [4, 4]."""

PLACES = {"top left": (0, 0), "top right": (0, 4), "bottom left": (4, 0), "bottom right": (4, 4), "middle": (2, 2)}
"""The row and column of a shape's first code."""

PAD, BOS, EOS, PLAN, BEGIN_IMAGE = SPECIAL = ("<pad>", "<bos>", "<eos>", "<plan>", "<begin_of_image>")
WORDS = (*SPECIAL, "a", "like", *THINGS, *COLOURS, *SHAPES, "top", "bottom", "left", "right", "middle")
WORD_ID = {word: index for index, word in enumerate(WORDS)}


def word_ids(*words: str) -> list[int]:
    """The ids of words."""
    return [WORD_ID[word] for word in words]


@dataclass(frozen=True)
class Scene:
    """One coloured shape in one place."""

    colour: str
    shape: str
    place: str

    def plan(self) -> list[int]:
        """Ids of the plan that describes the scene. The token that begins the picture ends it."""
        return word_ids("a", self.colour, self.shape, *self.place.split(), BEGIN_IMAGE)

    def draw(self) -> list[int]:
        """The codes of a picture of the scene, row by row."""
        codes = np.zeros((GRID, GRID), dtype=np.int64)
        row, column = PLACES[self.place]
        codes[row : row + 4, column : column + 4] = SHAPES[self.shape] * (1 + list(COLOURS).index(self.colour))
        return codes.ravel().tolist()


@dataclass(frozen=True)
class Task:
    """A prompt and the scene that it asks for."""

    thing: str
    shape: str
    place: str

    @property
    def scene(self) -> Scene:
        """What the picture should show."""
        return Scene(THINGS[self.thing], self.shape, self.place)

    @property
    def text(self) -> str:
        """The prompt as a text."""
        return f"a {self.shape} like a {self.thing} {self.place}"

    def prompt(self) -> list[int]:
        """Ids of the prompt. The last one asks for a plan."""
        return word_ids(BOS, *self.text.split(), PLAN)


def all_tasks() -> tuple[list[Task], list[Task]]:
    """Prompts to train on, and prompts that no training sees: one in five."""
    tasks = [Task(thing, shape, place) for thing in THINGS for shape in SHAPES for place in PLACES]
    random.Random(0).shuffle(tasks)
    return tasks[40:], tasks[:40]


# --------------------------------------------------------------------------------------------------------- the checker


@dataclass(frozen=True)
class Score:
    """How much of what was asked a picture shows, each from 0 to 1."""

    colour: float
    shape: float
    place: float

    @property
    def reward(self) -> float:
        """The mean of the three."""
        return (self.colour + self.shape + self.place) / 3

    @property
    def correct(self) -> bool:
        """Whether the picture shows exactly what was asked."""
        return self.reward > 0.999


def check(pixels: np.ndarray, scene: Scene) -> Score:
    """Scores a picture by its pixels alone.

    Args:
        pixels: uint8 [16, 16, 3].
        scene: What it should show.

    Returns:
        `colour`: the share of painted pixels whose nearest colour is the right one. `place`: the share of painted
        pixels in the right place. `shape`: the overlap (intersection over union) of the painted pixels with the shape
        where it fits best, or 0 if another shape fits better.
    """
    nearest = ((pixels[:, :, None] - RGB.astype(np.float32)) ** 2).sum(-1).argmin(-1)
    painted = nearest > 0
    if not painted.any():
        return Score(0.0, 0.0, 0.0)
    colour = (nearest[painted] == 1 + list(COLOURS).index(scene.colour)).mean()
    row, column = (CELL * start for start in PLACES[scene.place])
    place = painted[row : row + 4 * CELL, column : column + 4 * CELL].sum() / painted.sum()
    overlaps = {name: _best_overlap(painted, mask) for name, mask in SHAPES.items()}
    shape = overlaps[scene.shape]
    return Score(float(colour), shape if shape == max(overlaps.values()) else 0.0, float(place))


def _best_overlap(painted: np.ndarray, mask: np.ndarray) -> float:
    """The greatest intersection over union of painted pixels and a mask of codes, at any position."""
    pixels = mask.repeat(CELL, axis=0).repeat(CELL, axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(painted, pixels.shape)[::CELL, ::CELL]
    common = (windows & pixels).sum((-2, -1))
    return float((common / (painted.sum() + pixels.sum() - common)).max())
