"""Arrival times of the requests of a serving benchmark."""

from __future__ import annotations

import math

from mvllm.extension_api import ConfigError


def request_arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """The send time of each request, in seconds after the start, ascending.

    Gaps are drawn from a gamma distribution with shape `burstiness`: 1 gives a Poisson process, smaller values give
    bursts, larger values more even gaps. The times are scaled so that the last one is at count / rate, which makes runs
    with different seeds equally long. A Poisson process conditioned on length and count stays one.

    Args:
        count: Number of requests.
        rate: Requests per second; infinite for all at once.
        burstiness: Shape of the gaps; above 0.
        seed: Equal seeds give equal times.

    Raises:
        ConfigError: rate or burstiness is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"The request rate is {rate}; it must be above 0, or 'inf' for all at once.")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"The burstiness is {burstiness}; it must be above 0 and finite, 1 for a Poisson process.")
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    import numpy as np

    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled
