"""For packages with request pairs: requests with a second prompt whose logits are combined with their own.

Importing it loads no torch. The combiner's base class is `mvllm.extension_api.LogitsCombiner`.
"""

from __future__ import annotations

from mvllm.engine.frontend.request_pairs import PairContext as PairContext
from mvllm.engine.frontend.request_pairs import PairRequests as PairRequests
from mvllm.engine.tokenizer.tokenizer import Tokenizer as Tokenizer
from mvllm.messages.sampling_params import TEXT as TEXT

__all__ = ["TEXT", "PairContext", "PairRequests", "Tokenizer"]
