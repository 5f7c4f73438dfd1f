"""One connection between two engines: frames with a length and, over TCP, a message authentication code.

    frame      length, 4 bytes | code, 32 bytes | body

Both ends prove that they have the key, without sending it, and derive from it and two random numbers a key for each
direction. The code of a frame is HMAC-SHA256 over its number in this direction, its length and its body: a frame that
was changed, repeated or left out is found. Contents are not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from mvllm_kv_transfer.remote.messages import MAX_MESSAGE_BYTES, Message, decode, encode

_Buffer = bytes | memoryview
_MessageType = TypeVar("_MessageType")

_MAGIC = b"mvllm-kv-1\n"
_LENGTH = struct.Struct("!I")
_COUNTED_LENGTH = struct.Struct("!QI")
_NONCE_BYTES = _MAC_BYTES = 32
_PIECE_BYTES = 1 << 20
"""What one timeout is for."""


class ChannelError(Exception):
    """The connection cannot be used any more. The message says why, as a clause that follows the peer's name."""


class Channel:
    """Sends and receives frames on a connected socket. Used by one task at a time.

    Args:
        sock: Connected and non-blocking; closed by `close`.
        seconds: Time that sending or receiving a piece of at most 1 MiB may take.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self.sock = sock
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._send_key = self._receive_key = b""
        self._num_sent = self._num_received = 0

    async def authenticate(self, key: bytes, *, is_server: bool) -> None:
        """Proves to each other that both ends have `key`.

        Raises:
            ChannelError: The peer has not, or is no engine.
        """
        own = os.urandom(_NONCE_BYTES)
        await self._send_bytes(_MAGIC + own)
        theirs = await self._receive_bytes(len(_MAGIC) + _NONCE_BYTES)
        if not theirs.startswith(_MAGIC):
            raise ChannelError("does not speak this protocol")
        nonces = own + theirs[len(_MAGIC) :] if is_server else theirs[len(_MAGIC) :] + own
        proof = {who: hmac.digest(key, who + nonces, "sha256") for who in (b"server", b"client")}
        mine, expected = (b"server", b"client") if is_server else (b"client", b"server")
        await self._send_bytes(proof[mine])
        try:
            received = await self._receive_bytes(_MAC_BYTES)
        except ChannelError as e:
            raise ChannelError("closed the connection while keys were compared; they probably differ") from e
        if not hmac.compare_digest(received, proof[expected]):
            raise ChannelError("has another key")
        self._send_key = hmac.digest(key, b"from " + mine + nonces, "sha256")
        self._receive_key = hmac.digest(key, b"from " + expected + nonces, "sha256")

    async def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            ChannelError: The connection has ended, or the peer is too slow.
        """
        await self.send_frame(encode(message))

    async def receive(self, expected: type[_MessageType], seconds: float | None = None) -> _MessageType:
        """The next message.

        Args:
            seconds: Time until it begins; by default that of a piece.

        Raises:
            ChannelError: As `send`, or it is another message.
        """
        message = await self.receive_any(seconds)
        if not isinstance(message, expected):
            raise ChannelError(f"sent {type(message).__name__} where {expected.__name__} was due")
        return message

    async def receive_any(self, seconds: float | None = None) -> Message:
        """The next message, of any type. See `receive`."""
        head = await self._receive_bytes(_LENGTH.size, seconds)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ChannelError(f"sent a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
        body = bytearray(length)
        await self._receive_body(memoryview(body))
        try:
            return decode(bytes(body))
        except msgspec.DecodeError as e:
            raise ChannelError(f"sent an invalid message: {e}") from e

    async def send_frame(self, body: _Buffer) -> None:
        """Sends the bytes of a message or a block. Raises as `send`."""
        head = _LENGTH.pack(len(body))
        if self._send_key:
            head += _mac(self._send_key, self._num_sent, body)
            self._num_sent += 1
        if len(body) <= _PIECE_BYTES:
            await self._send_bytes(head + body)
        else:
            await self._send_bytes(head)
            await self._send_bytes(body)

    async def receive_frame_into(self, target: memoryview) -> None:
        """Receives a frame with exactly the bytes of `target`. After an error `target` may be partly written.

        Raises:
            ChannelError: As `receive`.
        """
        (length,) = _LENGTH.unpack(await self._receive_bytes(_LENGTH.size))
        if length != len(target):
            raise ChannelError(f"sent a block of {length} bytes; {len(target)} were due")
        await self._receive_body(target)

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self.sock.close()

    # --- bytes

    async def _receive_body(self, target: memoryview) -> None:
        mac = await self._receive_bytes(_MAC_BYTES) if self._receive_key else b""
        await self._receive_into(target)
        if self._receive_key:
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received, target)):
                raise ChannelError("sent a frame that was changed on its way")
            self._num_received += 1

    async def _send_bytes(self, data: _Buffer) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            try:
                async with asyncio.timeout(self._seconds):
                    await self._loop.sock_sendall(self.sock, view[start : start + _PIECE_BYTES])
            except TimeoutError:
                raise ChannelError(f"has read nothing for {self._seconds:g} s") from None
            except OSError as e:
                raise ChannelError(f"closed the connection ({e.strerror or e})") from e

    async def _receive_bytes(self, length: int, seconds: float | None = None) -> bytes:
        data = bytearray(length)
        await self._receive_into(memoryview(data), seconds)
        return bytes(data)

    async def _receive_into(self, target: memoryview, seconds: float | None = None) -> None:
        seconds = self._seconds if seconds is None else seconds
        while target:
            try:
                async with asyncio.timeout(seconds):
                    count = await self._loop.sock_recv_into(self.sock, target[:_PIECE_BYTES])
            except TimeoutError:
                raise ChannelError(f"has sent nothing for {seconds:g} s") from None
            except OSError as e:
                raise ChannelError(f"closed the connection ({e.strerror or e})") from e
            if not count:
                raise ChannelError("closed the connection")
            target = target[count:]


def _mac(key: bytes, number: int, body: _Buffer) -> bytes:
    code = hmac.new(key, _COUNTED_LENGTH.pack(number, len(body)), "sha256")
    code.update(body)
    return code.digest()


async def send_descriptors(channel: Channel, descriptors: Sequence[int]) -> None:
    """Passes descriptors over a Unix socket, between two frames."""
    try:
        socket.send_fds(channel.sock, [b"d"], list(descriptors))
    except OSError as e:
        raise ChannelError(f"cannot be sent descriptors ({e.strerror or e})") from e


async def receive_descriptors(channel: Channel, count: int, seconds: float) -> list[int]:
    """Receives what `send_descriptors` sent; the caller closes them.

    Raises:
        ChannelError: There are not `count`.
    """
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(channel.sock, lambda: None if readable.done() else readable.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await readable
        _, descriptors, _, _ = socket.recv_fds(channel.sock, 1, count)
    except TimeoutError:
        raise ChannelError(f"has sent nothing for {seconds:g} s") from None
    except OSError as e:
        raise ChannelError(f"closed the connection ({e.strerror or e})") from e
    finally:
        loop.remove_reader(channel.sock)
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ChannelError(f"sent {len(descriptors)} descriptors; {count} were due")
    return descriptors
