"""Counts the tokens of an output that belong to its reasoning: all up to the end of the reasoning, tags included."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from mvllm.entrypoints.parsers.interface import ReasoningDelta, ReasoningStream


def count_reasoning_tokens(
    make_stream: Callable[[], ReasoningStream],
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    at_least: int = 0,
) -> int:
    """The number of tokens up to the end of the reasoning; 0 without reasoning.

    Decodes and parses beginnings of the output, a logarithmic number of times.

    Args:
        make_stream: Makes a parser for the output.
        decode: The text of tokens, as the parser gets it.
        token_ids: The output.
        at_least: A lower bound that is known.
    """

    def parse(num_tokens: int) -> tuple[bool, int]:
        """Whether the reasoning is open after that many tokens, and its length in characters."""
        stream = make_stream()
        deltas = stream.feed(decode(token_ids[:num_tokens]))
        return stream.in_reasoning, sum(len(delta.text) for delta in deltas if isinstance(delta, ReasoningDelta))

    is_open, length = parse(len(token_ids))
    if is_open:
        return len(token_ids)
    if not length:
        return 0
    return bisect.bisect_left(range(len(token_ids)), True, lo=at_least, key=lambda n: parse(n) == (False, length))
