"""Sizes to which steps are padded, so that a few captured graphs serve the steps of up to 512 tokens.

Such a step is bound by reading the weights and the cache, so a few rows of padding are free; small sizes are dense
because padding costs most there. A larger step is compute-bound: it is never captured, and its padding stays below a
sixteenth of its size.

    kind     sizes of its graphs
    decode   as many tokens as requests: 1, 2, 4, 8, 16, 24 ... 512
    verify   requests with num_speculative_tokens + 1 tokens each
    mixed    numbers of tokens, each with few, with some and with as many requests as tokens; padding requests cost
             only rows of logits
"""

from __future__ import annotations

from mvllm.plugin_api import CaptureShapes, ShapePolicy

LARGEST_CAPTURE = 512
"""Maximum tokens of a captured step. Larger steps compute long enough for the host to stay ahead of the device."""

MIXED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, LARGEST_CAPTURE)
MIXED_REQUESTS = (8, 64)
VERIFY_REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)

_LARGEST_STEP = 1 << 22
"""Upper bound of the tokens and requests of a step."""


def decode_sizes() -> tuple[int, ...]:
    """Numbers of rows for which a graph is captured."""
    return (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE + 1, 16))


def mixed_sizes() -> tuple[tuple[int, int], ...]:
    """Tokens and requests of the steps with prompt tokens for which a graph is captured."""
    return tuple(
        (tokens, requests)
        for tokens in MIXED_TOKENS
        for requests in (*(size for size in MIXED_REQUESTS if size < tokens), tokens)
    )


def policy() -> ShapePolicy:
    """The buckets. Block tables have any width, because kernels read only the entries of a sequence."""
    sizes = [*decode_sizes()]
    while sizes[-1] < _LARGEST_STEP:
        step = max(16, 1 << (sizes[-1].bit_length() - 5))
        sizes.append(sizes[-1] + step)
    capture = CaptureShapes(
        decode=decode_sizes(), verify=VERIFY_REQUESTS, mixed=mixed_sizes(), max_tokens=LARGEST_CAPTURE
    )
    return ShapePolicy(tokens=tuple(sizes), requests=tuple(sizes), capture=capture)
