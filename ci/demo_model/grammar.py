"""The two-line template language in which the demo corpus is written.

``[a|b|c]`` picks one alternative (they nest), ``{slot}`` is filled from keyword arguments::

    expand(rng, "[Once|Long ago], {name} [ran|walked [home|away]].", name="Mia")

Choices are made innermost first, from left to right, so the same generator state always gives the same text.
"""

from __future__ import annotations

import random
import re

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(rng: random.Random, template: str, **slots: str) -> str:
    """Resolve every choice of ``template``, then fill its slots.

    Raises KeyError when the template names a slot that was not given.
    """
    text, num_replaced = template, 1
    while num_replaced:
        text, num_replaced = _CHOICE.subn(lambda match: rng.choice(match.group(1).split("|")), text)
    return text.format(**slots)


def with_article(noun: str) -> str:
    """``"owl"`` → ``"an owl"``; good enough for the words of this corpus."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capitalized(sentence: str) -> str:
    """Upper-case the first letter and leave the rest alone."""
    return sentence[:1].upper() + sentence[1:]


def join_words(words: list[str]) -> str:
    """``["a", "b", "c"]`` → ``"a, b and c"``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def invented_name(rng: random.Random) -> str:
    """A name that no list holds, so that it can only be copied from what was said."""
    return capitalized("".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))))
