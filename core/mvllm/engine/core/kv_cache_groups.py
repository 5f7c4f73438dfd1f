"""KV cache groups: layers with the same attention window share block tables.

One pool of blocks serves all groups, so a block has the same size in each, and all groups have about the same number of
layers. If a model has more layers with one window than with another, they form several groups.

    26 layers: 4 with full attention, 22 with a window of 512 tokens
    2 groups of up to 22    44 places for 26 layers
    7 groups of up to 4     28 places, two of them empty     <- few groups, little waste
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mvllm.platform.worker_protocol import KVCacheNeeds

_MAX_WASTE = Fraction(1, 8)
"""Accepted unused bytes of a block, as a share of its used bytes; each group costs time in each step."""


def choose_group_windows(needs: Sequence[KVCacheNeeds], max_model_len: int) -> tuple[int | None, ...]:
    """The window of each group in tokens, None for full attention; groups with full attention come first.

    Args:
        needs: One per worker. If one names no windows, there is one group.
        max_model_len: Longest sequence; a window of that length or more is full attention.
    """
    counts = [_count_layers_by_window(need, max_model_len) for need in needs]
    windows = sorted(
        {window for count in counts for window in count}, key=lambda window: (window is not None, -(window or 0))
    )
    if not all(counts):
        return (None,)
    if len(windows) == 1:
        return (windows[0],)
    least = None
    for groups in _possible_group_counts(counts, windows):
        waste = max(_waste(count, groups) for count in counts)
        if least is None or waste < least[0]:
            least = (waste, groups)
        if waste <= _MAX_WASTE:
            break
    assert least is not None
    return tuple(window for window in windows for _ in range(least[1][window]))


def layers_per_block(need: KVCacheNeeds, windows: Sequence[int | None], max_model_len: int) -> int:
    """The number of layers in a block on a worker: those of its largest group."""
    return _largest_group(_count_layers_by_window(need, max_model_len), Counter(windows))


def bytes_per_block(need: KVCacheNeeds, windows: Sequence[int | None], max_model_len: int, block_size: int) -> int:
    """Bytes of one block on a worker."""
    if len(windows) == 1:
        return need.bytes_per_token * block_size
    per_layer = need.bytes_per_token // len(need.layer_windows)
    return layers_per_block(need, windows, max_model_len) * per_layer * block_size


def _count_layers_by_window(need: KVCacheNeeds, max_model_len: int) -> Counter[int | None]:
    """The number of a worker's layers per window."""
    return Counter(window if window is not None and window < max_model_len else None for window in need.layer_windows)


def _possible_group_counts(
    counts: Sequence[Counter[int | None]], windows: Sequence[int | None]
) -> Iterator[dict[int | None, int]]:
    """Candidate numbers of groups per window, fewest groups first: with up to n layers each, for every possible n."""
    for size in range(max(max(count.values()) for count in counts), 0, -1):
        yield {window: max(-(-count[window] // size) for count in counts) for window in windows}


def _largest_group(count: Counter[int | None], groups: Counter[int | None] | dict[int | None, int]) -> int:
    return max(-(-number // groups[window]) for window, number in count.items())


def _waste(count: Counter[int | None], groups: dict[int | None, int]) -> Fraction:
    """Unused layer slots (each group has as many as the largest group has layers), relative to a worker's layers."""
    return Fraction(sum(groups.values()) * _largest_group(count, groups), count.total()) - 1
