"""Replica groups of XLA's collectives."""

from __future__ import annotations

import pytest

from mvllm.plugin_api import PlatformError
from mvllm_tpu.communicator import replica_groups


@pytest.mark.parametrize(
    ("ranks", "world_size", "groups"),
    [
        ((0, 1), 2, [[0, 1]]),
        ((2, 3), 4, [[0, 1], [2, 3]]),
        ((1, 3), 4, [[0, 2], [1, 3]]),
        ((4, 6), 8, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_every_rank_lists_all_groups_of_the_world(ranks, world_size, groups):
    assert replica_groups(ranks, world_size) == groups
    assert all(replica_groups(tuple(group), world_size) == groups for group in groups)


@pytest.mark.parametrize(("ranks", "world_size"), [((0, 1, 3), 4), ((1, 0), 2), ((0, 1, 2), 4)])
def test_other_groups_are_rejected(ranks, world_size):
    with pytest.raises(PlatformError, match="equal distances"):
        replica_groups(ranks, world_size)
