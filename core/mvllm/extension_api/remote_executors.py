"""For packages with executors whose workers run in processes that they start, on this machine or on others.

`mvllm-ray` is the example; docs/reference/executors.md groups the names by what they are for.
"""

from mvllm.executor.config_codec import decode_config as decode_config
from mvllm.executor.config_codec import encode_worker_configs as encode_worker_configs
from mvllm.executor.message_queue import MessageReader as MessageReader
from mvllm.executor.message_queue import MessageWriter as MessageWriter
from mvllm.executor.message_queue import PeerDiedError as PeerDiedError
from mvllm.executor.message_queue import QueueError as QueueError
from mvllm.executor.message_queue import ReaderHandle as ReaderHandle
from mvllm.executor.message_queue import RemoteReaderHandle as RemoteReaderHandle
from mvllm.executor.message_queue import StopSignal as StopSignal
from mvllm.executor.message_queue import WriterHandle as WriterHandle
from mvllm.executor.process.activity_table import Activity as Activity
from mvllm.executor.process.activity_table import ActivityTable as ActivityTable
from mvllm.executor.process.handshake import Handshake as Handshake
from mvllm.executor.process.message_frames import LENGTH as LENGTH
from mvllm.executor.process.message_frames import encode_frame as encode_frame
from mvllm.executor.process.message_frames import read_frame as read_frame
from mvllm.executor.process.process_utils import StackFile as StackFile
from mvllm.executor.process.process_utils import anonymous_file as anonymous_file
from mvllm.executor.process.process_utils import dump_stacks_to as dump_stacks_to
from mvllm.executor.process.process_utils import is_stopped as is_stopped
from mvllm.executor.process.process_utils import label_output as label_output
from mvllm.executor.process.process_utils import module_search_path as module_search_path
from mvllm.executor.process.process_utils import open_pidfd as open_pidfd
from mvllm.executor.process.process_utils import watch_parent as watch_parent
from mvllm.executor.rpc_executor import RpcExecutor as RpcExecutor
from mvllm.executor.rpc_executor import worker_names as worker_names
from mvllm.executor.rpc_messages import Reply as Reply
from mvllm.executor.rpc_messages import RPCRequest as RPCRequest
from mvllm.executor.rpc_queues import RemoteResponseQueue as RemoteResponseQueue
from mvllm.executor.rpc_queues import RpcQueues as RpcQueues
from mvllm.executor.worker_group import WorkerGroup as WorkerGroup
from mvllm.executor.worker_handle import WorkerHandle as WorkerHandle
from mvllm.executor.worker_proc import WorkerProc as WorkerProc
from mvllm.executor.worker_topology import devices_per_worker as devices_per_worker
from mvllm.executor.worker_topology import launch_topology as launch_topology
from mvllm.logging import log_level as log_level

__all__ = [
    "LENGTH",
    "Activity",
    "ActivityTable",
    "Handshake",
    "MessageReader",
    "MessageWriter",
    "PeerDiedError",
    "QueueError",
    "ReaderHandle",
    "RemoteReaderHandle",
    "RemoteResponseQueue",
    "Reply",
    "RPCRequest",
    "RpcExecutor",
    "RpcQueues",
    "StackFile",
    "StopSignal",
    "WorkerGroup",
    "WorkerHandle",
    "WorkerProc",
    "WriterHandle",
    "anonymous_file",
    "decode_config",
    "devices_per_worker",
    "dump_stacks_to",
    "encode_frame",
    "encode_worker_configs",
    "is_stopped",
    "label_output",
    "launch_topology",
    "log_level",
    "module_search_path",
    "open_pidfd",
    "read_frame",
    "watch_parent",
    "worker_names",
]
