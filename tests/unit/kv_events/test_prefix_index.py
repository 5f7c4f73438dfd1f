"""The index of prefixes: one walk along the keys of a prompt finds the longest prefix of every replica."""

from __future__ import annotations

import random

from mvllm.kv_events.prefix_index import PrefixIndex, RecentPrefixIndex, prefix_keys, root_key


def test_keys_name_all_tokens_before_them():
    tokens = list(range(100))
    keys = prefix_keys(tokens, 16)
    assert len(keys) == 6 and len(set(keys)) == 6
    assert prefix_keys(tokens[:64], 16) == keys[:4]
    assert prefix_keys(tokens[32:], 16, keys[1]) == keys[2:]  # goes on from a chunk
    changed = prefix_keys([99, *tokens[1:]], 16)
    assert not set(changed) & set(keys)
    assert prefix_keys(b"text" * 16, 16) == prefix_keys(list(b"text" * 16), 16)  # bytes are integers


def test_keys_of_other_salts_and_adapters_differ():
    roots = {root_key(pairs) for pairs in ([], [("cache_salt", "a")], [("cache_salt", "b")], [("lora_name", "a")])}
    assert len(roots) == 4 and root_key([]) == 0
    assert root_key([("a", "bc")]) != root_key([("ab", "c")])
    assert len({tuple(prefix_keys(range(32), 16, root)) for root in roots}) == 4


def test_the_longest_prefix_of_each_replica_is_found():
    index: PrefixIndex[str] = PrefixIndex()
    for name in "ABCD":
        index.add_replica(name)
    keys = prefix_keys(range(64), 16)
    index.store("A", keys[:3])
    index.store("B", keys[:1])
    index.store("C", [keys[0], keys[1], keys[3]])  # the third is missing: the fourth is no prefix
    assert index.match(keys) == {"A": 3, "B": 1, "C": 2}
    assert index.match(keys[:1]) == {"A": 1, "B": 1, "C": 1}
    assert index.match([]) == {} and index.match(prefix_keys(range(1, 65), 16)) == {}
    index.remove("A", keys[1:2])
    assert index.match(keys) == {"A": 1, "B": 1, "C": 2}
    index.clear("C")
    assert index.match(keys) == {"A": 1, "B": 1} and index.keys("C") == []


def test_two_indexes_together_know_what_one_of_them_knows():
    events: PrefixIndex[int] = PrefixIndex()
    sent: RecentPrefixIndex[int] = RecentPrefixIndex(100)
    for index in (events, sent):
        for replica in range(2):
            index.add_replica(replica)
    keys = prefix_keys(range(80), 16)
    events.store(0, keys[:2])
    sent.store(0, keys[2:4])
    sent.store(1, keys[:1])
    assert events.match(keys, sent) == {0: 4, 1: 1}


def test_a_removed_replica_leaves_nothing_and_its_place_is_used_again():
    index: PrefixIndex[str] = PrefixIndex()
    for name in "ABC":
        index.add_replica(name)
        index.store(name, [1, 2, 3])
    index.remove_replica("B")
    index.remove_replica("unknown")
    assert index.match([1, 2]) == {"A": 2, "C": 2} and index.replicas == ["A", "C"]
    index.add_replica("D")
    assert index.match([1]) == {"A": 1, "C": 1}  # D starts empty
    index.store("D", [1])
    assert index.match([1]) == {"A": 1, "C": 1, "D": 1}
    for name in "ACD":
        index.remove_replica(name)
    assert len(index) == 0


def test_an_estimate_keeps_the_most_recent_chunks_and_a_prompts_first_ones_longest():
    index: RecentPrefixIndex[int] = RecentPrefixIndex(4)
    index.add_replica(0)
    index.store(0, [1, 2, 3])
    index.store(0, [7, 8])
    assert sorted(index.keys(0)) == [1, 2, 7, 8]
    index.store(0, [1])
    index.store(0, [9])
    assert sorted(index.keys(0)) == [1, 7, 8, 9]  # 2 was the oldest
    index.remove(0, [7, 55])
    assert index.match([1]) == {0: 1} and index.match([7]) == {}


def test_it_agrees_with_sets_of_keys():
    rng = random.Random(0)
    index: PrefixIndex[int] = PrefixIndex()
    sets: dict[int, set[int]] = {}
    chains = [prefix_keys([rng.randrange(3) for _ in range(12)], 2) for _ in range(30)]
    for _ in range(3000):
        replica, chain = rng.randrange(70), rng.choice(chains)
        match rng.randrange(12):
            case 0:
                index.remove_replica(replica)
                sets.pop(replica, None)
            case 1:
                if replica in sets:
                    index.clear(replica)
                    sets[replica].clear()
            case 2 | 3 | 4:
                if replica in sets:
                    some = rng.sample(chain, 2)
                    index.remove(replica, some)
                    sets[replica] -= set(some)
            case _:
                index.add_replica(replica)
                some = chain[: rng.randrange(1, len(chain) + 1)]
                index.store(replica, some)
                sets.setdefault(replica, set()).update(some)
        lengths = {
            r: next((i for i, key in enumerate(chain) if key not in keys), len(chain)) for r, keys in sets.items()
        }
        assert index.match(chain) == {r: n for r, n in lengths.items() if n}
    assert all(set(index.keys(replica)) == keys for replica, keys in sets.items())


def common_prefix(chain: list[int], keys: set[int]) -> int:
    return next((i for i, key in enumerate(chain) if key not in keys), len(chain))
