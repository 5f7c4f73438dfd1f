"""For routers and other readers of the events of KV caches: the events, indices of what is cached, and costs."""

from __future__ import annotations

from mvllm.kv_events.block_index import KVBlockIndex as KVBlockIndex
from mvllm.kv_events.prefix_index import PrefixIndex as PrefixIndex
from mvllm.kv_events.prefix_index import RecentPrefixIndex as RecentPrefixIndex
from mvllm.kv_events.prefix_index import Replica as Replica
from mvllm.kv_events.prefix_index import item_id as item_id
from mvllm.kv_events.prefix_index import prefix_keys as prefix_keys
from mvllm.kv_events.prefix_index import root_key as root_key
from mvllm.kv_events.routing_cost import EXPECTED_OUTPUT_TOKENS as EXPECTED_OUTPUT_TOKENS
from mvllm.kv_events.routing_cost import choose_spread as choose_spread
from mvllm.kv_events.routing_cost import routing_cost as routing_cost
from mvllm.kv_events.subscriber import KVEventSubscriber as KVEventSubscriber
from mvllm.messages.kv_events import AllBlocksCleared as AllBlocksCleared
from mvllm.messages.kv_events import BlockRemoved as BlockRemoved
from mvllm.messages.kv_events import BlockStored as BlockStored
from mvllm.messages.kv_events import KVCacheEvent as KVCacheEvent
from mvllm.messages.kv_events import item_of_text as item_of_text
from mvllm.messages.kv_events import root_of_text as root_of_text

__all__ = [
    "EXPECTED_OUTPUT_TOKENS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVBlockIndex",
    "KVCacheEvent",
    "KVEventSubscriber",
    "PrefixIndex",
    "RecentPrefixIndex",
    "Replica",
    "choose_spread",
    "item_id",
    "item_of_text",
    "prefix_keys",
    "root_key",
    "root_of_text",
    "routing_cost",
]
