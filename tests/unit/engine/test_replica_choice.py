"""Requests go to the replica with the least to do, unless another has their beginning cached and is not much busier."""

from __future__ import annotations

import random

from mvllm.engine.replica_choice import ReplicaChoice


def test_requests_are_dealt_out_evenly():
    choice = ReplicaChoice(3, chunk=4)
    sent = [choice.choose([i], None, 1) for i in range(9)]
    assert sorted(sent) == [0, 0, 0, 1, 1, 1, 2, 2, 2] and choice.loads == [3, 3, 3]
    for _ in range(3):
        choice.end(1)
    assert [choice.choose([i], None, 1) for i in range(3)] == [1, 1, 1]


def test_the_sequences_of_a_request_count_each():
    choice = ReplicaChoice(2, chunk=4)
    first = choice.choose([1], None, 3)
    assert [choice.choose([1], None, 1) for _ in range(3)] == [1 - first] * 3
    assert choice.loads == [3, 3]


def test_a_replica_at_rest_gets_its_turn_though_others_rest_too():
    choice = ReplicaChoice(2, chunk=4)
    seen = set()
    for i in range(4):
        replica = choice.choose([i], None, 1)
        choice.end(replica)
        seen.add(replica)
    assert seen == {0, 1}


def test_a_prompt_follows_the_one_that_it_begins_like():
    choice = ReplicaChoice(4, chunk=4)
    shared = list(range(100, 140))
    homes = {}
    for user in range(4):
        homes[user] = choice.choose([user] * 4 + shared, None, 1)
    assert sorted(homes.values()) == [0, 1, 2, 3]
    for user in (2, 0, 3, 1):
        assert choice.choose([user] * 4 + shared + [7, 7, 7, 7], None, 1) == homes[user]


def test_the_longest_common_beginning_wins():
    choice = ReplicaChoice(2, chunk=2)
    short = choice.choose([1, 2], None, 1)
    long = choice.choose([9, 9, 1, 2], None, 1)
    assert short != long
    choice.choose([1, 2, 3, 4], None, 1)  # goes where [1, 2] is
    choice.end(short)
    assert choice.choose([1, 2, 3, 4, 5], None, 1) == short


def test_a_cache_is_not_worth_a_queue():
    choice = ReplicaChoice(2, chunk=2)
    sent = [choice.choose([1, 2, 3, 4], None, 1) for _ in range(40)]
    assert min(sent.count(0), sent.count(1)) >= 15
    assert max(choice.loads) <= min(choice.loads) * 1.25 + 3


def test_salts_share_nothing():
    choice = ReplicaChoice(2, chunk=2)
    first = choice.choose([1, 2], "a", 1)
    assert choice.choose([1, 2], "b", 1) != first
    assert choice.choose([1, 2], "a", 1) == first


def test_what_is_remembered_is_bounded():
    choice = ReplicaChoice(2, chunk=1)
    rng = random.Random(0)
    for _ in range(2000):
        choice.end(choice.choose([rng.randrange(1000) for _ in range(64)], None, 1))
    assert max(len(names) for names in choice._names) <= 16384
    assert not any(choice._sent)  # nobody is to be told
    assert choice.loads == [0, 0]
