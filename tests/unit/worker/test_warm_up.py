"""The warm-up runs every shape that a step can have, and few others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.warm_up import dynamic_compile_shapes, sample_sizes, step_shapes

BLOCK_SIZE = 4
SHAPES = ShapePolicy(tokens=(2, 8, 16, 64), requests=(1, 4, 8, 99), pages=(1, 3, 8, 50))
LIMITS = {"max_tokens": 16, "max_rows": 6, "max_pages": 5}


def warmed(shapes=SHAPES):
    return list(step_shapes(shapes, **LIMITS, block_size=BLOCK_SIZE))


@given(
    st.lists(
        st.tuples(st.integers(1, LIMITS["max_tokens"]), st.integers(0, LIMITS["max_pages"] * BLOCK_SIZE)),
        min_size=1,
        max_size=LIMITS["max_rows"],
    )
)
def test_every_step_within_the_limits_has_a_warmed_up_shape(requests):
    """Requests are pairs of new tokens and computed tokens."""
    longest = LIMITS["max_pages"] * BLOCK_SIZE
    steps, room = [], LIMITS["max_tokens"]
    for new, before in requests:
        new = min(new, room)
        if new == 0 or new + before > longest:
            continue
        room -= new
        steps.append((new, new + before))
    if not steps:
        return
    shape = (
        ShapePolicy.pad(sum(new for new, _ in steps), SHAPES.tokens),
        ShapePolicy.pad(len(steps), SHAPES.requests),
        ShapePolicy.pad(max(-(-length // BLOCK_SIZE) for _, length in steps), SHAPES.pages),
    )
    assert shape in {(s.tokens, s.requests, s.pages) for s in warmed()}


def test_each_shape_comes_once_with_a_step_that_fits_it():
    shapes = warmed()
    assert len({(s.tokens, s.requests, s.pages) for s in shapes}) == len(shapes)
    for s in shapes:
        assert 1 <= s.num_requests <= min(s.requests, s.num_tokens) and s.num_tokens <= s.tokens
        assert -(-s.num_tokens // s.num_requests) <= s.pages * BLOCK_SIZE


def test_steps_with_states_run_with_one_token_and_with_several_tokens_of_a_request():
    """Where token i may belong to request i, the two are different programs."""
    plain, found = warmed(), list(step_shapes(SHAPES, **LIMITS, block_size=BLOCK_SIZE, with_states=True))
    assert [s for s in found if s in plain] == plain
    more = [s for s in found if s not in plain]
    assert {(s.tokens, s.requests) for s in more} == {(8, 8)} and {s.pages for s in more} == {1, 3, 8}
    for s in more:
        assert 1 < -(-s.num_tokens // s.num_requests) <= s.pages * BLOCK_SIZE and s.num_tokens <= s.tokens


def test_shapes_that_no_step_can_have_are_left_out():
    found = {(s.tokens, s.requests, s.pages) for s in warmed()}
    assert not any(tokens > 16 or requests > 8 or pages > 8 for tokens, requests, pages in found), "above the limits"
    assert (2, 8, 1) not in found, "more than four requests have more than two tokens"
    assert (16, 1, 1) not in found, "one request of one page has at most four new tokens"


def test_a_free_dimension_has_its_largest_size():
    shapes = warmed(ShapePolicy(tokens=(8, 16)))
    assert {(s.tokens, s.requests, s.pages) for s in shapes} == {(8, 6, 5), (16, 6, 5)}


def test_logits_are_computed_for_as_many_rows_as_requests_are_padded_to():
    assert sample_sizes(SHAPES, max_rows=6) == [8, 4, 1]
    assert sample_sizes(ShapePolicy(), max_rows=6) == [6]


def test_a_dynamic_shape_compiler_gets_size_one_and_two_other_sizes_of_each_dimension():
    limits = {"max_tokens": 2048, "max_rows": 256, "max_pages": 512, "block_size": 16}
    shapes = list(dynamic_compile_shapes(ShapePolicy(), **limits))
    for size in ("tokens", "requests", "pages"):
        seen = {getattr(shape, size) for shape in shapes}
        assert (1 in seen and len(seen) >= 3) or (size == "pages" and seen == {1, 2}), size
    assert max(shape.tokens for shape in shapes) < 100, "they are run for what they compile, not for their size"


@given(*(st.integers(1, 40) for _ in range(4)))
def test_those_steps_are_within_the_limits(max_tokens, max_rows, max_pages, block_size):
    shapes = list(
        dynamic_compile_shapes(
            SHAPES, max_tokens=min(max_tokens, 64), max_rows=max_rows, max_pages=max_pages, block_size=block_size
        )
    )
    assert (shapes[0].num_tokens, shapes[0].num_requests) == (1, 1)
    for s in shapes:
        assert 1 <= s.num_requests <= min(s.requests, max_rows, s.num_tokens) and s.num_tokens <= min(
            s.tokens, max_tokens
        )
        assert -(-s.num_tokens // s.num_requests) <= s.pages * block_size
        assert s.pages <= ShapePolicy.pad(max_pages, SHAPES.pages)
