"""Hit rate of prefix-aware routing beside others, with replicas on three nodes of a Ray cluster on this machine.

Requests of several groups arrive in random order; all of a group begin with the same text. The cache of a replica holds
the beginnings of about a third of the groups. Run:

    python -m tests.perf.ray_serve [--prefixes 9] [--requests 6] [--seeds 7]

Prints, for each way of routing, the share of prompt tokens that were in a cache: the median of several seeds, each with
groups and an order of its own. The replicas run on, so that the caches are full from the second seed on; the first one
is left out. Counts, not times: other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from tests.helpers.ray_serve import OPTIONS, run_all, serve_cluster

WORDS = ("the", "small", "brave", "cat", "and", "kind", "old", "mouse", "went", "far", "into", "dark", "wood", "ball")
PREFIX_WORDS = 120
CACHE_BYTES = 2 << 20


def hit_rate(url: str, *, num_prefixes: int, requests_per_prefix: int, seed: int = 0) -> float:
    """The share of prompt tokens that were in the cache of the replica that answered."""
    draw = random.Random(seed)
    prefixes = [" ".join(draw.choices(WORDS, k=PREFIX_WORDS)) for _ in range(num_prefixes)]
    bodies: list[dict[str, Any]] = [
        {"prompt": f"{prefix} {' '.join(draw.choices(WORDS, k=4))}", "max_tokens": 4}
        for prefix in prefixes
        for _ in range(requests_per_prefix)
    ]
    draw.shuffle(bodies)
    outcomes = run_all(url, bodies, concurrency=9)
    failed = [each for each in outcomes if not each.is_complete]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed, the first one with {failed[0]}")
    return sum(each.num_cached for each in outcomes) / sum(each.num_prompt for each in outcomes)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefixes", type=int, default=9)
    parser.add_argument("--requests", type=int, default=6, help="requests for each prefix")
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--routing", nargs="+", default=["round_robin", "power_of_two", "prefix"])
    args = parser.parse_args()
    with serve_cluster() as cluster:
        for routing in args.routing:
            options = {**OPTIONS, "kv_cache_memory_bytes": CACHE_BYTES}
            cluster.deploy(num_replicas=3, routing=routing, options=options)
            cluster.wait_for_replicas(3)
            rates = [
                hit_rate(cluster.url, num_prefixes=args.prefixes, requests_per_prefix=args.requests, seed=seed)
                for seed in range(args.seeds + 1)
            ][1:]
            each = ", ".join(f"{rate:.1%}" for rate in sorted(rates))
            median = statistics.median(rates)
            print(f"{routing:>12}: median {median:.1%} of prompt tokens were cached ({each})", flush=True)
            cluster.delete()


if __name__ == "__main__":
    main()
