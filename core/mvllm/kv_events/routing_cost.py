"""What a request costs on one of several replicas, counted in tokens.

    cost of a replica = prompt tokens that wait there
                        + OUTPUT_TOKEN_WEIGHT * output tokens still expected of its sequences
                        + RUNNING_TOKEN_WEIGHT * tokens of its running sequences
                        + tokens of this prompt that are not in its cache
                        + tokens that do not fit into its free KV blocks

A cached prefix is worth the tokens that it saves. If its replica is busier than another one by more than that, the
other one computes the prefix too, and has it cached from then on: a replica that holds a popular prefix does not get a
queue, and none stays idle. The data parallel load balancer and routers of other packages choose by this cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

EXPECTED_OUTPUT_TOKENS = 512
"""Output tokens expected of a sequence, unless it may have fewer."""

OUTPUT_TOKEN_WEIGHT = 0.25
"""What an output token that is still expected costs, in prompt tokens: it is computed later, beside others."""

RUNNING_TOKEN_WEIGHT = 0.05
"""What a token in the KV cache of a running sequence costs, in prompt tokens: each later step reads it. Both weights
are among those with the shortest 99th percentile of the time to first token in `tests/perf/scaling_simulation.py`, out
of 0 to 1 and 0 to 0.25."""


def routing_cost(waiting: int, output: float, running: float, uncached: int, free: int | None = None) -> float:
    """The cost of a request on one replica, in prompt tokens.

    Args:
        waiting: Prompt tokens that wait there.
        output: Output tokens still expected of its sequences.
        running: Tokens in the KV cache of its running sequences.
        uncached: Tokens of the request's prompt that are not in its cache.
        free: Tokens that fit into KV blocks that no request uses; None if that is not known.
    """
    cost = waiting + OUTPUT_TOKEN_WEIGHT * output + RUNNING_TOKEN_WEIGHT * running + uncached
    if free is not None:
        cost += max(0, waiting + uncached - free)  # each of them waits until a running sequence has freed its place
    return cost


def choose_spread(costs: Sequence[float], unseen: float, draw: Callable[[], float]) -> int:
    """Chooses a replica by costs that others change: several routers that know the same do not all choose the same.

    What others send, and no report contains yet, fills up the cheapest replicas to a common level, as water does:

        cost       |  2  |  3  |  7  |  9  |       unseen 7: the level is 6, so the first gets 4 and the second 3
        chosen     | 4/7 | 3/7 |  0  |  0  |

    A router takes part in that: it chooses each replica as often as the replica gets a share. With little unseen this
    is the cheapest one, with much it is any. (Dahlin, Interpreting Stale Load Information, IEEE TPDS 11 (10), 2000.)

    Args:
        costs: Of the request, by replica; infinite where it must not go. At least one is finite.
        unseen: Cost of what others have sent and no report contains; 0 without others.
        draw: Returns a random number in [0, 1).

    Returns:
        The index of the chosen replica; of the cheapest one if nothing is unseen.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    if unseen <= 0:
        return order[0]
    lowest, total = costs[order[0]], 0.0
    for count, index in enumerate(order, start=1):
        total += costs[index] - lowest
        level = (total + unseen) / count
        if count == len(order) or level <= costs[order[count]] - lowest:
            break
    left = draw() * unseen
    for index in order[:count]:
        left -= level - (costs[index] - lowest)
        if left < 0:
            return index
    return order[0]
