"""Random numbers as a function of a request's seed and the position of the token.

There is no generator state, so other requests, row assignment, preemption and repeated steps cannot change a sample.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): its state is a
counter, so number i of stream s is `mix(mix(s) + (i + 1) * GAMMA)`, computed directly for any i.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_24_BITS = np.uint64(0xFFFFFF)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two independent uniforms in [0, 1) for each (seed, position), both multiples of 2**-24.

    Args:
        seeds: uint64 [n], from `stream_seed`.
        positions: int [n], >= 0: tokens that the request has generated before.

    Returns:
        Two float32 arrays [n], exact in float32, from different bits of one 64-bit hash.
    """
    hashed = _mix(_mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    scale = np.float32(2.0**-24)
    coarse = (hashed >> np.uint64(40)).astype(np.float32) * scale
    fine = ((hashed >> np.uint64(16)) & _24_BITS).astype(np.float32) * scale
    return coarse, fine


def stream_seed(seed: int | None, *, engine_seed: int, request_id: str) -> int:
    """The 64-bit seed of a request's stream.

    A request's own seed is used as it is. Otherwise the stream depends on the engine's seed and the request's number
    among the engine's requests, which is the part of its id before the first colon. So it differs between requests,
    stays the same when a request resumes after preemption, and repeats in an engine with the same seed and the same
    requests. The part of the id after the colon is the caller's name for the request, which a server draws at random.
    """
    if seed is not None:
        return seed & 0xFFFFFFFFFFFFFFFF
    digest = hashlib.sha256(f"{engine_seed}:{request_id.partition(':')[0]}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: a bijection in which every input bit reaches every output bit."""
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
