"""Groups of layers that see alike and share block tables.

One pool of blocks serves all groups, so a block must be as large in each: all have about equally many layers. Where a
model has more layers of one kind than of another, the former make up several groups.

    26 layers, every sixth sees all: 4 see all, 22 see 512 tokens
    2 groups of up to 22    44 places for 26 layers
    7 groups of up to 4     28 places, two of them empty     <- few groups, little waste
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mvllm.platform.worker_protocol import KVCacheNeeds

_MAX_WASTE = Fraction(1, 8)
"""Bytes of a block that no layer uses, as a share of those in use; each group costs time in each step."""


def choose_group_windows(needs: Sequence[KVCacheNeeds], max_model_len: int) -> tuple[int | None, ...]:
    """What the layers of each group see, in tokens, or None for all; those that see all first.

    Args:
        needs: Of each worker. Where one names no windows, there is one group.
        max_model_len: Longest sequence; a layer that sees as much sees all.
    """
    counts = [_count_layers_by_window(need, max_model_len) for need in needs]
    kinds = sorted({kind for count in counts for kind in count}, key=lambda kind: (kind is not None, -(kind or 0)))
    if not all(counts):
        return (None,)
    if len(kinds) == 1:
        return (kinds[0],)
    least = None
    for groups in _possible_group_counts(counts, kinds):
        waste = max(_waste(count, groups) for count in counts)
        if least is None or waste < least[0]:
            least = (waste, groups)
        if waste <= _MAX_WASTE:
            break
    assert least is not None
    return tuple(kind for kind in kinds for _ in range(least[1][kind]))


def layers_per_block(need: KVCacheNeeds, windows: Sequence[int | None], max_model_len: int) -> int:
    """How many of a worker's layers a block has room for: those of its largest group."""
    return _largest_group(_count_layers_by_window(need, max_model_len), Counter(windows))


def bytes_per_block(need: KVCacheNeeds, windows: Sequence[int | None], max_model_len: int, block_size: int) -> int:
    """Bytes of one block on a worker."""
    if len(windows) == 1:
        return need.bytes_per_token * block_size
    per_layer = need.bytes_per_token // len(need.layer_windows)
    return layers_per_block(need, windows, max_model_len) * per_layer * block_size


def _count_layers_by_window(need: KVCacheNeeds, max_model_len: int) -> Counter[int | None]:
    """How many layers of a worker see how much."""
    return Counter(window if window is not None and window < max_model_len else None for window in need.layer_windows)


def _possible_group_counts(
    counts: Sequence[Counter[int | None]], kinds: Sequence[int | None]
) -> Iterator[dict[int | None, int]]:
    """Numbers of groups by kind, the fewest groups first: of up to n layers for each n that there can be."""
    for size in range(max(max(count.values()) for count in counts), 0, -1):
        yield {kind: max(-(-count[kind] // size) for count in counts) for kind in kinds}


def _largest_group(count: Counter[int | None], groups: Counter[int | None] | dict[int | None, int]) -> int:
    return max(-(-number // groups[kind]) for kind, number in count.items())


def _waste(count: Counter[int | None], groups: dict[int | None, int]) -> Fraction:
    """Places of a worker's layers that stay empty, in relation to the layers."""
    return Fraction(sum(groups.values()) * _largest_group(count, groups), count.total()) - 1
