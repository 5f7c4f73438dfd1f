"""Connectors that fetch blocks from the host memory of another engine: `tcp`, `shared_memory` and `nixl`.

    producer                                              consumer
    RemoteConnector ── HeldBlocks <── BlockServer  <══ Channel ══>  BlockClient <── RemoteConnector

The producer holds the host blocks of a finished request until the consumer has fetched them. The connectors differ only
in their transport: how a connection is made and authenticated, and how the bytes of a block move."""
