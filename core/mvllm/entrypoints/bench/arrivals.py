"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math

from mvllm.errors import ConfigError


def request_arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent, rising.

    Gaps are drawn from a gamma distribution with shape `burstiness`: at 1 arrivals are a Poisson process, below that
    they come in bursts, above that more evenly. The times are then scaled so that the last one is at count / rate:
    runs with other seeds last equally long, and a Poisson process given its length and count is just that.

    Args:
        count: Number of requests.
        rate: Requests per second; infinite for all at once.
        burstiness: Above 0.
        seed: The same gives the same times.

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
