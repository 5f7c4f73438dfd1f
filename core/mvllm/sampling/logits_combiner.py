"""LogitsCombiner: how the logits of a request pair become those that its token is sampled from.

An entry point of the group `mvllm.logits_combiners` names a subclass; a request names the entry point
(`RequestPair.combiner`). The worker imports it when the first such pair starts.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import torch

from mvllm import plugin_groups


class LogitsCombiner(ABC):
    """One way to combine logits. Created without arguments once in each worker, so it keeps no state of requests."""

    @abstractmethod
    def weight(self, settings: bytes) -> float:
        """The number that `combine` gets for a pair.

        Args:
            settings: `RequestPair.settings`, as the front end of the same package has encoded them.
        """

    @abstractmethod
    def combine(self, primary: torch.Tensor, companion: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The combined logits of pairs, on the device, without waiting for it. May run for padding, too.

        Tokens whose logit of the primary is -inf stay excluded, whatever is returned for them.

        Args:
            primary: float32 [n, vocab]: the logits of the requests. Not to be changed.
            companion: float32 [n, vocab]: those of their companions.
            weights: float32 [n, 1]: the numbers of `weight`.

        Returns:
            float32 [n, vocab].
        """


@functools.cache
def load_combiner(name: str) -> LogitsCombiner:
    """The installed combiner of that name.

    Raises:
        ConfigError: There is none, it is not allowed or cannot be loaded, or it is not a LogitsCombiner.
    """
    source = plugin_groups.require(plugin_groups.LOGITS_COMBINERS, name)
    return plugin_groups.load_class(plugin_groups.LOGITS_COMBINERS, source, LogitsCombiner, "LogitsCombiner")()
