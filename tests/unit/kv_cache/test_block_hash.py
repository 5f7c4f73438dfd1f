"""Hashes of block contents."""

from hypothesis import given
from hypothesis import strategies as st

from mvllm.kv_cache.block_hash import hash_block, make_root_hash, request_root_hash

ROOT = make_root_hash(0)
text = st.text(alphabet="ab|,:\0\ud800é", max_size=4)
keys = st.lists(st.tuples(text, text), max_size=3)
tokens = st.lists(st.integers(0, 2**33), min_size=1, max_size=4)


def test_the_root_is_random_unless_a_seed_is_given():
    assert make_root_hash() != make_root_hash()
    assert make_root_hash(3) == make_root_hash(3)
    assert make_root_hash(3) != make_root_hash(4)
    assert len(make_root_hash()) == len(make_root_hash(3)) == 32


def test_the_hash_chain_of_a_request_without_keys_begins_at_the_root():
    assert request_root_hash(ROOT, []) == ROOT


@given(keys, keys)
def test_two_lists_of_keys_have_the_same_initial_hash_only_if_they_are_equal(one, other):
    assert (request_root_hash(ROOT, one) == request_root_hash(ROOT, other)) == (one == other)


@given(st.lists(tokens, min_size=1, max_size=3), st.lists(tokens, min_size=1, max_size=3))
def test_two_chains_end_in_the_same_hash_only_if_all_their_blocks_are_equal(one, other):
    def name(blocks):
        block_hash = ROOT
        for block in blocks:
            block_hash = hash_block(block_hash, block)
        return block_hash

    assert (name(one) == name(other)) == (one == other)


def test_a_hash_depends_on_the_order_of_the_tokens_and_on_the_parent():
    assert hash_block(ROOT, [1, 2]) != hash_block(ROOT, [2, 1])
    assert hash_block(ROOT, [1, 2]) != hash_block(make_root_hash(1), [1, 2])
    assert hash_block(ROOT, [1, 2]) == hash_block(ROOT, [1, 2])


def test_seeded_hashes_are_stable():
    """Seeded hashes are guaranteed to be the same in every run."""
    name = hash_block(request_root_hash(ROOT, [("cache_salt", "tenant")]), [1, 2, 3, 4])
    assert name.hex() == "3c37e9246c7173d2beacd357d099a15423789eb36c03945bce3011bc349e7dc1"
