"""Random request bodies: known fields with likely and unlikely values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st

NUMBERS = st.integers(-(2**64), 2**64) | st.integers(-3, 30) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(st.characters(codec="utf-8"), max_size=20)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("demo"),
    "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 5000), max_size=5) | st.lists(st.text(max_size=5)),
    "messages": st.lists(st.fixed_dictionaries({"role": st.text(max_size=9), "content": ANYTHING}), max_size=3),
    "input": st.text(max_size=30) | st.lists(st.fixed_dictionaries({"role": st.text(max_size=9), "content": ANYTHING})),
    "max_output_tokens": st.integers(-1, 5),
    "max_tokens": st.integers(-1, 5),
    "max_completion_tokens": st.integers(-1, 5),
    "n": st.integers(0, 4),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "tokens": st.lists(st.integers(-1, 5000), max_size=5),
}


@st.composite
def random_requests(draw: st.DrawFn, bodies: Mapping[str, type[msgspec.Struct]]) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it.

    Args:
        bodies: The type of the body of each path.
    """
    path = draw(st.sampled_from(sorted(bodies)))
    names = [name for name in bodies[path].__struct_fields__ if name != "model"]
    body: dict[str, Any] = {name: 3 for name in ("max_tokens", "max_output_tokens") if name in names}
    if "options" in names:
        body["options"] = {"num_predict": 3}
    for name in sorted({"input"} & set(names) or {"prompt", "messages", "tokens"} & set(names)):
        body[name] = draw(LIKELY[name])
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        body[name] = draw(LIKELY.get(name, ANYTHING) | ANYTHING)
    return path, body
