"""Public names of log-probabilities."""

from mvllm.engine.frontend.flat_logprobs import FlatLogprobs
from mvllm.engine.frontend.outputs import Logprob

__all__ = ["FlatLogprobs", "Logprob"]
