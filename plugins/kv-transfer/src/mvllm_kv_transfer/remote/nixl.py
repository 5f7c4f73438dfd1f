"""The connector `nixl`: blocks are read out of the producer's memory by the library NIXL.

NIXL chooses the path: shared memory, RDMA, or TCP. Requests and answers go over the authenticated connection of the
connector `tcp`, whose options it has; what NIXL itself moves is neither authenticated nor encrypted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mvllm.extension_api import ConfigError, install_command
from mvllm.extension_api.kv_transfer import HostBlock, KVConnectorContext
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.leasing_transport import LeasingTransport
from mvllm_kv_transfer.remote.messages import AgentMetadata, Welcome
from mvllm_kv_transfer.remote.remote_connector import RemoteConnector
from mvllm_kv_transfer.remote.tcp import TCPOptions, TCPTransport
from mvllm_kv_transfer.remote.transport import Connection

_MEMORY = "DRAM"
_POLL_SECONDS = 0.0005


class NixlConnector(RemoteConnector):
    """Reads blocks by NIXL; see TCPOptions."""

    def __init__(self, context: KVConnectorContext) -> None:
        options = TCPOptions.read(context.options, "nixl")
        super().__init__(context, options, NixlTransport(context, options))


class NixlTransport(LeasingTransport, TCPTransport):
    """Connections over TCP, with blocks over NIXL.

    Args:
        context, options: See TCPTransport.

    Raises:
        ConfigError: NIXL is not installed or cannot be used; or as TCPTransport.
    """

    def __init__(self, context: KVConnectorContext, options: TCPOptions) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as e:
            command = install_command("mvllm-kv-transfer[nixl]")
            raise ConfigError(f"The KV connector 'nixl' needs the library NIXL ({e}). Run: {command}") from e
        super().__init__(context, options)
        caches = [cache for cache in (context.blocks, context.states) if cache is not None]
        self._addresses = [int(cache.block(0).ctypes.data) for cache in caches]
        self._num_connections: dict[str, int] = {}  # by the name of the producer's agent
        try:
            self._agent: Any = nixl_agent(f"{context.engine_id}-{os.urandom(8).hex()}", nixl_agent_config())
            regions = [
                (address, each.num_blocks * each.block_bytes, 0, "")
                for address, each in zip(self._addresses, caches)
                if each.block_bytes
            ]
            self._registered = self._agent.register_memory(regions, _MEMORY)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except Exception as e:  # the library's own exceptions
            super().close()
            raise ConfigError(f"NIXL cannot be used for the KV connector: {type(e).__name__}: {e}") from e

    async def after_welcome(self, channel: Channel) -> None:
        """Says how this engine's memory is read."""
        await channel.send(AgentMetadata(self._metadata, self._addresses))

    async def open(self, channel: Channel, welcome: Welcome) -> Connection:
        """Learns how the producer's memory is read."""
        remote = await channel.receive(AgentMetadata)
        if len(remote.addresses) != len(self._addresses):
            raise ChannelError(f"has {len(remote.addresses)} kinds of blocks; {len(self._addresses)} were due")
        try:
            name = self._agent.add_remote_agent(remote.metadata)
        except Exception as e:  # the library's own exceptions
            raise ChannelError(f"cannot be reached by NIXL ({type(e).__name__}: {e})") from e
        name = name.decode() if isinstance(name, bytes) else name
        self._num_connections[name] = self._num_connections.get(name, 0) + 1
        return _NixlConnection(channel, self, name, remote.addresses, [welcome.num_blocks, welcome.num_states])

    async def copy_blocks(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray], indices: Sequence[int]
    ) -> None:
        """See LeasingTransport. It does not end before NIXL has ended writing to the targets."""
        assert isinstance(connection, _NixlConnection)
        sources = []
        for block, target, index in zip(blocks, targets, indices):
            if index >= connection.sizes[block.is_state]:
                raise ChannelError(f"named the host block {index}, which it does not have")
            sources.append((connection.addresses[block.is_state] + index * target.nbytes, target.nbytes, 0))
        own = [(target.ctypes.data, target.nbytes, 0) for target in targets]
        try:
            local, remote = (self._agent.get_xfer_descs(each, _MEMORY) for each in (own, sources))
            handle = self._agent.initialize_xfer("READ", local, remote, connection.name, b"")
        except Exception as e:  # the library's own exceptions
            raise ChannelError(f"cannot be read by NIXL ({type(e).__name__}: {e})") from e
        was_cancelled = False
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                try:
                    await asyncio.sleep(_POLL_SECONDS)
                except asyncio.CancelledError:
                    was_cancelled = True
                state = self._agent.check_xfer_state(handle)
        except Exception as e:  # the library's own exceptions
            raise ChannelError(f"cannot be read by NIXL ({type(e).__name__}: {e})") from e
        finally:
            self._agent.release_xfer_handle(handle)
        if was_cancelled:
            raise asyncio.CancelledError
        if state != "DONE":
            raise ChannelError(f"was not read by NIXL, which ended with {state}")

    def forget(self, name: str) -> None:
        """A connection to a producer has ended."""
        self._num_connections[name] -= 1
        if not self._num_connections[name]:
            del self._num_connections[name]
            self._agent.remove_remote_agent(name)

    def close(self) -> None:
        """See Transport."""
        super().close()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.deregister_memory(self._registered)


class _NixlConnection(Connection):
    """A connection to a producer whose memory NIXL reads."""

    def __init__(
        self, channel: Channel, transport: NixlTransport, name: str, addresses: list[int], sizes: list[int]
    ) -> None:
        super().__init__(channel)
        self.name = name
        self.addresses = addresses
        self.sizes = sizes
        self._transport: NixlTransport | None = transport

    def close(self) -> None:
        """See Connection."""
        super().close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.forget(self.name)
