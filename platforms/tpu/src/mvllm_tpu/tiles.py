"""Divides a step's tokens into tiles of a static shape, independent of the requests' lengths.

Attention gathers the keys of a request for queries of that request. Tokens of a request are adjacent, so they are
divided into tiles of a fixed number of queries; the last tile of a request is padded:

    tokens   a a a a a b b c c c c . .          3 requests, 13 tokens with padding, tiles of 4
    tiles    [a a a a] [a - - -] [b b - -] [c c c c] [- - - -] [- - - -]

T tokens of R requests fit into T // size + R tiles, so shapes depend only on T and R. With size = T // R there are at
most 2 R tiles and 2 T queries: keys are gathered for at most twice the requests, and scores are computed for at most
twice the tokens. If there are no more tokens than requests, each token is a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST_TILE = 128
NOWHERE = np.iinfo(np.int32).max
"""A slot outside of every cache: XLA drops writes to it."""


@dataclass(frozen=True)
class TileShape:
    """Tiles of a step.

    Attributes:
        size: Queries of each tile.
        count: Number of tiles.
    """

    size: int
    count: int


def tile_shape(num_tokens: int, num_requests: int) -> TileShape:
    """The tiles of every step with these numbers of tokens and requests, both after padding."""
    if num_tokens <= num_requests:
        return TileShape(1, num_tokens)
    size = min(LARGEST_TILE, num_tokens // num_requests)
    return TileShape(size, min(num_tokens, num_tokens // size + num_requests))


@dataclass(frozen=True)
class Tiles:
    """The queries of each tile. All arrays are int32.

    Attributes:
        shape: Number and size of the tiles.
        request: [count]: index of the request; 0 for unused tiles.
        first_token: [count]: index of the first query among the step's tokens.
        first_position: [count]: its position in the sequence.
        length: [count]: number of real queries; at least 1, so that no tile is empty.
        place: [T]: index of each token among the count * size queries; that of the first token for padding.
    """

    shape: TileShape
    request: np.ndarray
    first_token: np.ndarray
    first_position: np.ndarray
    length: np.ndarray
    place: np.ndarray


def cut(query_start_loc: np.ndarray, seq_lens: np.ndarray, num_tokens: int) -> Tiles:
    """The tiles of a step; BatchLayout describes the arguments."""
    num_requests = len(seq_lens)
    shape = tile_shape(num_tokens, num_requests)
    starts, lengths = query_start_loc[:-1], np.diff(query_start_loc)
    per_request = -(-lengths // shape.size)
    used = int(per_request.sum())
    request = np.repeat(np.arange(num_requests, dtype=np.int32), per_request)
    within = np.arange(used) - np.repeat(per_request.cumsum() - per_request, per_request)
    offset = (within * shape.size).astype(np.int32)
    real = int(query_start_loc[-1])
    owner = np.repeat(np.arange(num_requests), lengths)
    in_request = np.arange(real) - starts[owner]
    first_tile = (per_request.cumsum() - per_request)[owner]
    return Tiles(
        shape=shape,
        request=_filled(request, shape.count, 0),
        first_token=_filled(starts[request] + offset, shape.count, 0),
        first_position=_filled((seq_lens - lengths)[request] + offset, shape.count, 0),
        length=_filled(np.minimum(lengths[request] - offset, shape.size), shape.count, 1),
        place=_filled(first_tile * shape.size + in_request, num_tokens, 0),
    )


def _filled(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32 [size]: the values, then `fill`."""
    filled = np.full(size, fill, dtype=np.int32)
    filled[: len(values)] = values
    return filled
