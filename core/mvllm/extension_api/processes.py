"""For packages that start child processes as the engine does: they end with their parent, and report how they fail."""

from __future__ import annotations

from mvllm.engine.process.core_handshake import CoreHandshake as CoreHandshake
from mvllm.engine.process.launch import ChildProcess as ChildProcess
from mvllm.engine.process.launch import CoreHandle as CoreHandle
from mvllm.engine.process.message_socket import MessageSocket as MessageSocket
from mvllm.engine.process.message_socket import message_socket_pair as message_socket_pair
from mvllm.executor.process.activity_table import IDLE as IDLE
from mvllm.executor.process.activity_table import ActivityTable as ActivityTable
from mvllm.executor.process.child_startup import run_child as run_child
from mvllm.executor.process.handshake import ChildStartArgs as ChildStartArgs
from mvllm.executor.process.handshake import send_message as send_message

__all__ = [
    "IDLE",
    "ActivityTable",
    "ChildProcess",
    "ChildStartArgs",
    "CoreHandle",
    "CoreHandshake",
    "MessageSocket",
    "message_socket_pair",
    "run_child",
    "send_message",
]
