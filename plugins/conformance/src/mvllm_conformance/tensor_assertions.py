"""Tensor comparisons whose messages name the differing elements."""

from __future__ import annotations

import torch


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fails if two host tensors differ in shape, dtype or values.

    Raises:
        AssertionError: Names `what` and the first differing element.
    """
    for name in ("shape", "dtype"):
        one, other = getattr(found, name), getattr(wanted, name)
        one, other = (tuple(x) if name == "shape" else x for x in (one, other))
        assert one == other, f"{what}: {name} is {one}, expected {other}"
    different = found != wanted
    assert not different.any(), f"{what}: {_describe_first_difference(different, found, wanted)}"


def assert_close(found: torch.Tensor, wanted: torch.Tensor, allowed: float | torch.Tensor, what: str) -> None:
    """Fails if two host tensors differ by `allowed` or more (per element, if it is a tensor), or are not finite.

    Raises:
        AssertionError: Names `what` and the element with the largest error.
    """
    assert found.shape == wanted.shape, f"{what}: the shape is {tuple(found.shape)}, not {tuple(wanted.shape)}"
    error_ratio = torch.where(torch.isfinite(found), (found.double() - wanted.double()).abs() / allowed, torch.inf)
    if not error_ratio.numel() or float(error_ratio.max()) < 1:
        return
    index = tuple(int(i) for i in torch.unravel_index(error_ratio.argmax(), error_ratio.shape))
    limit = float(allowed if isinstance(allowed, float) else allowed[index])
    raise AssertionError(
        f"{what}: {float(found[index]):.6g} at {list(index)}, {float(wanted[index]):.6g} expected (allowed difference "
        f"{limit:.2g}); {int((error_ratio >= 1).sum())} of {error_ratio.numel()} elements differ"
    )


def _describe_first_difference(different: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> str:
    index = tuple(different.nonzero()[0].tolist())
    number = f"{int(different.sum())} of {different.numel()} elements differ"
    return f"{found[index].item()} at {list(index)}, {wanted[index].item()} expected; {number}"
