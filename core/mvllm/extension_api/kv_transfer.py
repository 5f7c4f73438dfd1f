"""For packages with KV connectors: stores of keys and values outside of an engine (docs/how-to/kv-connectors.md)."""

from mvllm.kv_transfer.connector import BlockKey as BlockKey
from mvllm.kv_transfer.connector import HostBlock as HostBlock
from mvllm.kv_transfer.connector import KVConnector as KVConnector
from mvllm.kv_transfer.connector import KVConnectorContext as KVConnectorContext
from mvllm.kv_transfer.connector import KVRequest as KVRequest
from mvllm.kv_transfer.connector import StoreChange as StoreChange
from mvllm.kv_transfer.connector import TransferResult as TransferResult
from mvllm.kv_transfer.host_kv_cache import HostKVCache as HostKVCache

__all__ = [
    "BlockKey",
    "HostBlock",
    "HostKVCache",
    "KVConnector",
    "KVConnectorContext",
    "KVRequest",
    "StoreChange",
    "TransferResult",
]
