"""Requests go to the replica with the lowest cost: waiting tokens plus the uncached tokens of the prompt."""

from __future__ import annotations

import random
from collections import Counter

from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.kv_events.routing_cost import EXPECTED_OUTPUT_TOKENS, OUTPUT_TOKEN_WEIGHT, choose_spread


def test_requests_are_distributed_evenly():
    choice = DPLoadBalancer(3, chunk=4)
    sent = [choice.choose([i], None, 1) for i in range(9)]
    assert sorted(sent) == [0, 0, 0, 1, 1, 1, 2, 2, 2] and choice.loads == [3, 3, 3]
    for _ in range(3):
        choice.finish_sequence(1)
    assert [choice.choose([i], None, 1) for i in range(3)] == [1, 1, 1]


def test_the_sequences_of_a_request_count_each():
    choice = DPLoadBalancer(2, chunk=4)
    first = choice.choose([1], None, 3)
    assert [choice.choose([1], None, 1) for _ in range(3)] == [1 - first] * 3
    assert choice.loads == [3, 3]


def test_idle_replicas_are_chosen_in_turn():
    choice = DPLoadBalancer(2, chunk=4)
    seen = set()
    for i in range(4):
        replica = choice.choose([i], None, 1)
        choice.finish_sequence(replica)
        seen.add(replica)
    assert seen == {0, 1}


def test_a_prompt_follows_one_with_the_same_prefix():
    choice = DPLoadBalancer(4, chunk=4)
    shared = list(range(100, 140))
    homes = {}
    for user in range(4):
        homes[user] = choice.choose([user] * 4 + shared, None, 1)
    assert sorted(homes.values()) == [0, 1, 2, 3]
    for user in (2, 0, 3, 1):
        assert choice.choose([user] * 4 + shared + [7, 7, 7, 7], None, 1) == homes[user]


def test_the_longest_common_prefix_wins():
    choice = DPLoadBalancer(2, chunk=2)
    short = choice.choose([1, 2], None, 1)
    long = choice.choose([9, 9, 1, 2], None, 1)
    assert short != long
    choice.choose([1, 2, 3, 4], None, 1)  # goes to the replica of [1, 2]
    choice.finish_sequence(short)
    assert choice.choose([1, 2, 3, 4, 5], None, 1) == short


def test_a_prompt_is_compared_up_to_its_end():
    """Conversations that begin with the same long text each return to their replica."""
    choice = DPLoadBalancer(4)
    shared = list(range(8192))
    texts = {user: shared + [user] * 128 for user in range(8)}
    homes = {user: choice.choose(text, None, 1) for user, text in texts.items()}
    for replica in homes.values():
        choice.update_load(replica, 0, 8)
        choice.finish_sequence(replica)
    assert {list(homes.values()).count(replica) for replica in range(4)} == {2}
    for user in (3, 0, 7, 5, 1, 2, 6, 4):
        replica = choice.choose(texts[user] + [9] * 200, None, 1)
        assert replica == homes[user]
        choice.update_load(replica, 0, 99)
        choice.finish_sequence(replica)


def test_a_cached_prefix_outweighs_a_load_of_as_many_tokens_and_no_more():
    choice = DPLoadBalancer(2)
    short = [choice.choose(list(range(128)), None, 1) for _ in range(40)]
    assert short.count(0) == short.count(1) == 20
    choice = DPLoadBalancer(2)
    num_tokens = int(16 * EXPECTED_OUTPUT_TOKENS * OUTPUT_TOKEN_WEIGHT)
    sent = []
    for i in range(40):
        sent.append(choice.choose(list(range(num_tokens)), None, 1))
        choice.update_load(sent[-1], 0, i + 1)  # computed
    assert sent[:16] == [sent[0]] * 16 and abs(sent.count(0) - sent.count(1)) <= 2


def test_a_prefix_of_all_requests_starves_no_replica():
    choice = DPLoadBalancer(4)
    shared = list(range(8192))
    for i in range(400):
        replica = choice.choose(shared + [i] * 64, None, 1)
        choice.update_load(replica, 0, i + 1)
    assert min(choice.loads) >= 90


def test_waiting_prompts_count_by_their_length_until_they_are_computed():
    choice = DPLoadBalancer(2)
    long = choice.choose(list(range(50_000)), None, 1)
    others = [choice.choose([i] * 1000, None, 1) for i in range(20)]
    assert others == [1 - long] * 20
    choice.update_load(long, 0, 1)  # computed; and the tokens that still wait at the other replica
    assert choice.choose([77], None, 1) == long
    choice.update_load(1 - long, 0, 19)  # all except the last one, which it had not received
    assert [choice.choose([88 + i], None, 1) for i in range(17)] == [long] * 17
    choice.update_load(long, 100_000, 99)  # of other front ends
    assert choice.choose([99], None, 1) == 1 - long


def test_prefixes_are_separate_per_salt_and_adapter():
    choice = DPLoadBalancer(3, chunk=2)
    first = choice.choose([1, 2], "a", 1)
    second = choice.choose([1, 2], "b", 1)
    third = choice.choose([1, 2], "a", 1, adapter_keys=[("lora_name", "1")])
    assert {first, second, third} == {0, 1, 2}
    assert choice.choose([1, 2], "b", 1) == second
    assert choice.choose([1, 2], "a", 1, adapter_keys=[("lora_name", "1")]) == third
    assert choice.choose([1, 2], "a", 1) == first


def test_the_number_of_estimated_chunks_is_that_of_the_cache():
    choice = DPLoadBalancer(2)
    choice.set_cache_size(64, 64 * 64)
    rng = random.Random(0)
    for _ in range(500):
        choice.finish_sequence(choice.choose([rng.randrange(1000) for _ in range(640)], None, 1))
        assert max(len(choice._sent.keys(replica)) for replica in range(2)) <= 64
    assert not any(choice._new_prefixes) and not any(choice._unreported)  # no replica is notified
    assert choice.loads == [0, 0]
    choice = DPLoadBalancer(2)
    choice.set_cache_size(64, 0)  # nothing is cached
    assert {choice.choose([1] * 640, None, 1) for _ in range(4)} == {0, 1}


def test_prefixes_are_removed_when_caches_are_reset():
    choice = DPLoadBalancer(2, chunk=2)
    sent = []
    for _ in range(4):
        choice.clear_prefixes()
        sent.append(choice.choose([1, 2, 3, 4], None, 1))
    assert sorted(sent) == [0, 0, 1, 1]


class FrontEnds:
    """Front ends of the same replicas, which report their loads after every `period` requests of each."""

    def __init__(self, num_front_ends: int, num_replicas: int, *, knows_others: bool) -> None:
        self.balancers = [
            DPLoadBalancer(num_replicas, chunk=4, draw=random.Random(number).random) for number in range(num_front_ends)
        ]
        for balancer in self.balancers:
            balancer.num_other_front_ends = num_front_ends - 1 if knows_others else 0
        self.waiting = [0] * num_replicas
        self.received = [[0] * num_replicas for _ in range(num_front_ends)]
        self.most = 0

    def run(self, num_rounds: int, period: int, rate: int) -> None:
        """Each replica computes `rate` tokens between two reports."""
        dice = random.Random(1)
        for number in range(num_rounds):
            for turn in range(period):
                for index, balancer in enumerate(self.balancers):
                    length = dice.choice([20, 100, 400])
                    name = f"{number} {turn} {index}"
                    replica = balancer.choose([dice.randrange(1000)] * length, None, 1, request_ids=[name])
                    self.waiting[replica] += length
                    self.received[index][replica] += 1
                    balancer.finish_sequence(replica, name)
            self.most = max(self.most, max(self.waiting))
            self.waiting = [max(0, tokens - rate) for tokens in self.waiting]
            for index, balancer in enumerate(self.balancers):
                for replica, tokens in enumerate(self.waiting):
                    balancer.update_load(replica, tokens, self.received[index][replica])


def test_front_ends_with_the_same_reports_do_not_choose_the_same_replica():
    queues = {}
    for knows_others in (False, True):
        front_ends = FrontEnds(8, 16, knows_others=knows_others)
        front_ends.run(100, 2, rate=200)
        queues[knows_others] = front_ends.most
    assert queues[True] < 0.75 * queues[False], queues


def test_a_front_end_alone_chooses_the_cheapest_replica():
    assert FrontEnds(1, 4, knows_others=True).balancers[0].num_other_front_ends == 0
    assert choose_spread([5.0, 3.0, 4.0], 0.0, random.random) == 1


def test_what_others_send_fills_up_the_cheapest_replicas():
    dice = random.Random(0)
    costs = [9.0, 2.0, 7.0, 3.0, float("inf")]
    chosen = Counter(choose_spread(costs, 7.0, dice.random) for _ in range(7000))
    assert set(chosen) == {1, 3} and abs(chosen[1] - 4000) < 200  # up to a level of 6
    chosen = Counter(choose_spread(costs, 1e6, dice.random) for _ in range(4000))
    assert set(chosen) == {0, 1, 2, 3} and min(chosen.values()) > 850
    assert choose_spread([float("inf"), 8.0], 5.0, dice.random) == 1
    assert {choose_spread([4.0, 4.0], 1.0, lambda: 0.0), choose_spread([4.0, 4.0], 1.0, lambda: 0.999)} == {0, 1}


def test_a_long_cached_prefix_outweighs_what_others_send():
    balancer = DPLoadBalancer(8, chunk=4, draw=random.Random(3).random)
    prompt = list(range(4000))
    home = balancer.choose(prompt, None, 1, request_ids=["first"])
    balancer.update_load(home, 0, 1)
    balancer.num_other_front_ends = 3
    assert all(balancer.choose([*prompt, i], None, 1, request_ids=[str(i)]) == home for i in range(3))
