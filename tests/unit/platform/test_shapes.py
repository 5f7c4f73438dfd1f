"""ShapePolicy: the smallest bucket that holds a size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.errors import ContractError
from mvllm.platform.shapes import ShapePolicy


@pytest.mark.parametrize(("size", "padded"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 32), (32, 32)])
def test_a_size_is_padded_to_the_smallest_bucket_that_holds_it(size, padded):
    assert ShapePolicy.pad(size, (4, 8, 32)) == padded


def test_free_shapes_are_not_padded():
    assert ShapePolicy.pad(13, None) == 13
    assert ShapePolicy() == ShapePolicy(tokens=None, requests=None, pages=None)


@pytest.mark.parametrize(("buckets", "largest"), [((4, 8), "8"), ((), "none")])
def test_more_than_the_largest_bucket_is_refused(buckets, largest):
    with pytest.raises(ValueError, match=f"No bucket holds 9: the largest is {largest}"):
        ShapePolicy.pad(9, buckets)


@given(st.sets(st.integers(1, 1000), min_size=1), st.integers(0, 1000))
def test_padding_gives_the_smallest_bucket_not_below_the_size(buckets, size):
    rising = tuple(sorted(buckets))
    fitting = [b for b in rising if b >= size]
    if fitting:
        assert ShapePolicy.pad(size, rising) == fitting[0]
        assert ShapePolicy.pad(fitting[0], rising) == fitting[0]


@pytest.mark.parametrize("buckets", [5, [4, 8], (8, 4), (4, 4), (0, 4), (-1,), ("a",), (True,)])
@pytest.mark.parametrize("dimension", ["tokens", "requests", "pages"])
def test_bucket_sizes_must_be_an_increasing_tuple(dimension, buckets):
    with pytest.raises(ContractError, match=f"{dimension} must be None or a tuple of rising sizes"):
        ShapePolicy(**{dimension: buckets})
