"""Comparisons of tensors that say what differs, and where."""

from __future__ import annotations

import torch


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Fails where two tensors of the host differ in shape, dtype or any bit of their values.

    Raises:
        AssertionError: `what`, and the first place that differs.
    """
    for name in ("shape", "dtype"):
        one, other = getattr(found, name), getattr(wanted, name)
        one, other = (tuple(x) if name == "shape" else x for x in (one, other))
        assert one == other, f"{what}: the {name} is {one}, not {other}"
    different = found != wanted
    assert not different.any(), f"{what}: {_first(different, found, wanted)}"


def assert_close(found: torch.Tensor, wanted: torch.Tensor, allowed: float | torch.Tensor, what: str) -> None:
    """Fails where two tensors of the host differ by `allowed` or more (of one element, if it is a tensor), or are not
    finite.

    Raises:
        AssertionError: `what`, and the place that is furthest off.
    """
    assert found.shape == wanted.shape, f"{what}: the shape is {tuple(found.shape)}, not {tuple(wanted.shape)}"
    off = torch.where(torch.isfinite(found), (found.double() - wanted.double()).abs() / allowed, torch.inf)
    if not off.numel() or float(off.max()) < 1:
        return
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    limit = float(allowed if isinstance(allowed, float) else allowed[place])
    raise AssertionError(
        f"{what}: {float(found[place]):.6g} at {list(place)}, {float(wanted[place]):.6g} expected (allowed difference "
        f"{limit:.2g}); {int((off >= 1).sum())} of {off.numel()} elements differ"
    )


def _first(different: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> str:
    place = tuple(different.nonzero()[0].tolist())
    number = f"{int(different.sum())} of {different.numel()} elements differ"
    return f"{found[place].item()} at {list(place)}, {wanted[place].item()} expected; {number}"
