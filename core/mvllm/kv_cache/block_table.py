"""The blocks of one request, in the order of its tokens."""

from __future__ import annotations

from mvllm.kv_cache.block_hash import BlockHash


class BlockTable:
    """Which blocks hold the keys and values of one request. Made and changed by the KVCacheManager only.

    Attributes:
        token_ids: The request's own list of known tokens; it grows under the table's eyes.
        block_ids: Position p of the request stands in block `block_ids[p // block_size]`.
        num_slots: Tokens for which there are blocks: `len(block_ids) * block_size`.
        root: Where the chain of block names begins; None if no block of this request may be shared.
        num_shareable_tokens: Only full blocks within this many leading tokens get a name.
        block_hashes: Names of the leading full blocks, as far as they were needed; kept when the blocks are given back.
        num_named_blocks: Leading blocks that are done with: found by name, or offered under their name.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "num_named_blocks",
        "num_shareable_tokens",
        "num_slots",
        "root",
        "token_ids",
    )

    def __init__(self, token_ids: list[int], root: BlockHash | None, num_shareable_tokens: int) -> None:
        self.token_ids = token_ids
        self.root = root
        self.num_shareable_tokens = num_shareable_tokens
        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_slots = 0
        self.num_named_blocks = 0
