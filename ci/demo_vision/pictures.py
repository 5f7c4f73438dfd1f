"""Pictures of coloured shapes, and conversations about them: an endless, deterministic stream.

One generator state per example, seeded with its split and number, so example 1,000 of the training split is the same on
every machine and in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 32
"""Pixels along a side of a picture."""

_SCALE = 4  # drawn larger and reduced, so that edges are smooth
PLACES_SIDE = SIDE * _SCALE

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
BACKGROUNDS = ("white", "black", "grey")
_GREY = (128, 128, 128)
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
_NUMBERS = ("no shapes", "one shape", "two shapes", "three shapes")
_PLACES = ("left", "middle", "right")


@dataclass(frozen=True)
class Shape:
    """One shape of a picture.

    Attributes:
        kind: One of SHAPES.
        colour: One of COLOURS.
    """

    kind: str
    colour: str

    def __str__(self) -> str:
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.kind}"


@dataclass(frozen=True)
class Example:
    """A conversation about pictures: what the user sends, and the answer.

    Attributes:
        images: The pictures, in the order in which the user sends them, before the question.
        question, answer: The two turns.
    """

    images: tuple[Image.Image, ...]
    question: str
    answer: str


def draw(
    shapes: Sequence[Shape],
    background: str = "white",
    rng: random.Random | None = None,
    places: Image.Image | None = None,
) -> Image.Image:
    """A picture with up to three shapes from left to right.

    Args:
        shapes: Their colours differ from the background's.
        background: One of BACKGROUNDS.
        rng: Varies sizes, places and shades; None draws shapes of a fixed size in their places.
        places: A picture of one channel and `PLACES_SIDE` pixels along each side, into which shape i is drawn with the
            value i + 1.
    """
    side = SIDE * _SCALE
    picture = Image.new("RGB", (side, side), _shade(_GREY if background == "grey" else COLOURS[background], rng, 6))
    pen = ImageDraw.Draw(picture)
    width = side / max(1, len(shapes))
    for i, shape in enumerate(shapes):
        most = min(width, side * 0.62) / 2 * 0.94
        radius = most * (0.8 if rng is None else rng.uniform(0.68, 1.0))
        slack_x, slack_y = width / 2 - radius, side / 2 - radius
        x = (i + 0.5) * width + (0 if rng is None else rng.uniform(-slack_x, slack_x) * 0.9)
        y = side / 2 + (0 if rng is None else rng.uniform(-slack_y, slack_y) * 0.9)
        _draw_shape(pen, shape.kind, x, y, radius, _shade(COLOURS[shape.colour], rng, 14))
        if places is not None:
            _draw_shape(ImageDraw.Draw(places), shape.kind, x, y, radius, i + 1)
    return picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def _shade(colour: tuple[int, int, int], rng: random.Random | None, most: int) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + (0 if rng is None else rng.randint(-most, most)))) for value in colour)


def _draw_shape(
    pen: ImageDraw.ImageDraw, kind: str, x: float, y: float, radius: float, colour: tuple[int, ...] | int
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        pen.ellipse(box, fill=colour)
    elif kind == "ring":
        pen.ellipse(box, outline=colour, width=max(2, round(radius * 0.38)))
    elif kind == "square":
        half = radius * 0.86
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif kind == "cross":
        bar = radius * 0.3
        pen.rectangle((x - radius, y - bar, x + radius, y + bar), fill=colour)
        pen.rectangle((x - bar, y - radius, x + bar, y + radius), fill=colour)
    else:
        corners = {"triangle": (-90, 30, 150), "diamond": (-90, 0, 90, 180)}[kind]
        points = [(x + radius * math.cos(math.radians(a)), y + radius * math.sin(math.radians(a))) for a in corners]
        pen.polygon(points, fill=colour)


def _draw_shapes(rng: random.Random, count: int, background: str) -> list[Shape]:
    colours = rng.sample([name for name in COLOURS if name != background], count)
    return [Shape(rng.choice(SHAPES), colour) for colour in colours]


def labelled_picture(split: str, index: int, patch: int) -> tuple[Image.Image, list[int], list[int]]:
    """The picture number `index` of a split, and what is in each of its patches of `patch` x `patch` pixels.

    Returns:
        The picture, and for each patch in row order the number of the kind and of the colour of the shape that covers
        most of it; the last number of either means that no shape does.
    """
    rng = random.Random(f"picture/{split}/{index}")
    background = rng.choice(BACKGROUNDS)
    shapes = _draw_shapes(rng, rng.choice(_COUNTS), background)
    places = Image.new("L", (PLACES_SIDE, PLACES_SIDE), 0)
    picture = draw(shapes, background, rng, places)
    kinds, colours = [], []
    size, names = patch * _SCALE, list(COLOURS)
    for top in range(0, PLACES_SIDE, size):
        for left in range(0, PLACES_SIDE, size):
            counts = places.crop((left, top, left + size, top + size)).histogram()[: len(shapes) + 1]
            found = max(range(1, len(shapes) + 1), key=counts.__getitem__)
            is_covered = counts[found] * 8 >= size * size
            kinds.append(SHAPES.index(shapes[found - 1].kind) if is_covered else len(SHAPES))
            colours.append(names.index(shapes[found - 1].colour) if is_covered else len(names))
    return picture, kinds, colours


def listing(shapes: Sequence[Shape]) -> str:
    """`a red circle, a blue square and a green ring`."""
    names = [str(shape) for shape in shapes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def describe(shapes: Sequence[Shape]) -> str:
    """A sentence that names the shapes, from left to right."""
    text = listing(shapes)
    return f"{text[0].upper()}{text[1:]}."


_WHAT = (
    *("What is in the picture?", "What is in this picture?", "What do you see?", "Describe the picture."),
    *("What is in the image?", "Describe this image.", "Describe the image.", "What does the picture show?"),
    *("What is this?", "What can you see?", "What shape is this?", "Name the shapes.", "What is shown here?", ""),
)
_HOW_MANY = ("How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?")
_BOTH = (
    "What is in the pictures?",
    "Describe the pictures.",
    "What do the two pictures show?",
    "Compare the pictures.",
)


def _ask_what(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    return rng.choice(_WHAT), describe(shapes)


def _ask_count(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    be = "is" if len(shapes) == 1 else "are"
    return rng.choice(_HOW_MANY), f"There {be} {_NUMBERS[len(shapes)]}: {listing(shapes)}."


def _ask_colour(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    kinds = [shape.kind for shape in shapes]
    unique = [shape for shape in shapes if kinds.count(shape.kind) == 1]
    if not unique:
        return _ask_what(rng, shapes, background)
    shape = rng.choice(unique)
    question = rng.choice(("What colour is the {}?", "What color is the {}?", "Which colour has the {}?"))
    return question.format(shape.kind), f"The {shape.kind} is {shape.colour}."


def _ask_shape(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    shape = rng.choice(shapes)
    question = rng.choice(("What shape is {}?", "Which shape is {}?", "What is {}?"))
    return question.format(shape.colour), f"The {shape.kind} is {shape.colour}."


def _ask_background(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    question = rng.choice(("What colour is the background?", "What color is the background?"))
    return question, f"The background is {background}."


def _ask_whether(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    kind = rng.choice(shapes).kind if rng.random() < 0.5 else rng.choice(SHAPES)
    found = [shape for shape in shapes if shape.kind == kind]
    question = rng.choice(("Is there a {}?", "Do you see a {}?", "Is a {} in the picture?")).format(kind)
    return question, f"Yes, {listing(found)}." if found else f"No, there is no {kind}."


def _ask_place(rng: random.Random, shapes: Sequence[Shape], background: str) -> tuple[str, str]:
    if len(shapes) == 1:
        return _ask_what(rng, shapes, background)
    places = _PLACES if len(shapes) == 3 else (_PLACES[0], _PLACES[2])
    i = rng.randrange(len(shapes))
    where = "in the middle" if places[i] == "middle" else f"on the {places[i]}"
    question = rng.choice(("What is {}?", "Which shape is {}?")).format(where)
    return question, f"{describe(shapes[i : i + 1])}"


Ask = Callable[[random.Random, Sequence[Shape], str], tuple[str, str]]
_ASK: tuple[tuple[Ask, int], ...] = (
    (_ask_what, 50),
    (_ask_count, 8),
    (_ask_colour, 10),
    (_ask_shape, 8),
    (_ask_background, 6),
    (_ask_whether, 10),
    (_ask_place, 8),
)
_COUNTS = (1, 1, 1, 2, 2, 3)
_SEVERAL = 0.15
"""Share of examples with two pictures."""


def example(split: str, index: int) -> Example:
    """The example number `index` of a split, `train` or `heldout`."""
    rng = random.Random(f"{split}/{index}")
    pictures = []
    for _ in range(2 if rng.random() < _SEVERAL else 1):
        background = rng.choice(BACKGROUNDS)
        shapes = _draw_shapes(rng, rng.choice(_COUNTS), background)
        pictures.append((draw(shapes, background, rng), shapes, background))
    images = tuple(picture for picture, _, _ in pictures)
    if len(pictures) == 2:
        first, second = (listing(shapes) for _, shapes, _ in pictures)
        return Example(
            images, rng.choice(_BOTH), f"The first picture shows {first}. The second picture shows {second}."
        )
    ask = rng.choices([ask for ask, _ in _ASK], weights=[weight for _, weight in _ASK])[0]
    return Example(images, *ask(rng, *pictures[0][1:]))
