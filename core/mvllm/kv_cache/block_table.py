"""The block table of one request: its blocks in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.request_state_slots import NO_STATE, RequestStateSlots
from mvllm.messages.multimodal import ItemSpan


class GroupBlocks:
    """The blocks of one request in one group of layers.

    Attributes:
        block_ids: Position p of the request is in block `block_ids[p // block_size]`.
        num_dropped: Leading entries of `block_ids` that are not held: no later token attends to these positions.
    """

    __slots__ = ("block_ids", "num_dropped")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_dropped = 0

    @property
    def held(self) -> list[int]:
        """The blocks that the request uses."""
        return self.block_ids[self.num_dropped :] if self.num_dropped else self.block_ids


class BlockTable:
    """The blocks with the keys and values of one request. Created and changed only by the KVCacheManager.

    Attributes:
        token_ids: The request's own list of known tokens, which grows.
        groups: The blocks, by group of layers.
        num_slots: Leading tokens that have, or had, blocks in every group.
        root: Root of the chain of block hashes; None if no block of this request may be shared.
        num_shareable_tokens: Only full blocks within this many leading tokens get a hash.
        keys: (kind, value) pairs of what, besides the tokens, decides whether its blocks may be shared.
        items: Spans of the images, audio and embeddings among the tokens, by rising offset.
        prefix_keys: Keys of leading chunks, as far as the KVCacheEventRecorder has computed them.
        block_hashes: Hashes of the leading full blocks, as far as computed; kept when the blocks are freed.
        num_hashed_blocks: Leading blocks that were found in the cache or offered to it.
        state: Its state slots; NO_STATE in models without sequence states.
    """

    __slots__ = (
        "block_hashes",
        "groups",
        "items",
        "keys",
        "num_hashed_blocks",
        "num_shareable_tokens",
        "num_slots",
        "prefix_keys",
        "root",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: list[int],
        root: BlockHash | None,
        num_shareable_tokens: int,
        num_groups: int = 1,
        keys: Sequence[tuple[str, str]] = (),
        items: Sequence[ItemSpan] = (),
    ) -> None:
        self.token_ids = token_ids
        self.root = root
        self.num_shareable_tokens = num_shareable_tokens
        self.groups = tuple(GroupBlocks() for _ in range(num_groups))
        self.keys = keys
        self.items = items
        self.prefix_keys: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_slots = 0
        self.num_hashed_blocks = 0
        self.state: RequestStateSlots = NO_STATE

    @property
    def block_ids(self) -> list[int]:
        """The blocks of the first group."""
        return self.groups[0].block_ids

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that the request uses, in the order of its tokens."""
        if len(self.groups) == 1:
            return self.groups[0].held
        placed = [
            (place, block) for group in self.groups for place, block in enumerate(group.held, start=group.num_dropped)
        ]
        placed.sort(key=itemgetter(0))
        return [block for _, block in placed]
