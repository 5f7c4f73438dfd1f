"""The Ray actor that runs one worker. Its methods, in the order in which the executor calls them:

    identify     reports node and devices; the executor assigns ranks by the results
    initialize   sets name, rank and environment, opens the queues
    build        loads the platform, builds the worker             torch is imported here
    run          serves requests until the stop request            the same WorkerProc as in a worker process
    report       returns activity and stacks; may run beside any other method

Ray pickles arguments and results, so all of them are bytes: msgpack of the structs below.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import os
import socket
import sys

import msgspec
import psutil  # type: ignore[import-untyped]
import ray
import ray.util

from mvllm.extension_api import (
    WorkerContext,
)
from mvllm.extension_api.remote_executors import (
    ActivityTable,
    Handshake,
    MessageWriter,
    QueueError,
    ReaderHandle,
    RemoteReaderHandle,
    RemoteResponseQueue,
    WorkerProc,
    WriterHandle,
    anonymous_file,
    decode_config,
    dump_stacks_to,
    label_output,
    watch_parent,
)
from mvllm_ray.fd_server import FileDescriptorServerAddress, fetch_descriptors


class RayWorkerIdentity(msgspec.Struct, frozen=True):
    """Node, process and devices of an actor, before it has a rank.

    Attributes:
        node_id, node_ip: Ray's name and address of its node.
        pid: Its process id, on that node.
        device_ids: The devices that Ray assigned to it; empty for resources that Ray does not number.
        port: A reserved port of `node_ip` for the rendezvous of the ranks.
        version: The version of mvllm on its node.
    """

    node_id: str
    node_ip: str
    pid: int
    device_ids: list[str]
    port: int
    version: str


class RayWorkerStart(msgspec.Struct, frozen=True):
    """The start message of an actor.

    Attributes:
        name, context, platform, config: As in WorkerStartArgs.
        environment: Environment variables to set.
        defaults: Variables of the engine's process, to set where this process has none.
        sys_path, directory: Module search path and working directory of the engine.
        log_level: The level of the `mvllm` loggers.
        fd_server: Where a worker on the engine's node requests its LocalHandles; None on other nodes.
        requests: Handle of the request queue for a worker on another node; None on the engine's node.
        is_spread: Whether the ranks are on several nodes.
    """

    name: str
    context: WorkerContext
    platform: str
    config: bytes
    environment: dict[str, str]
    defaults: dict[str, str]
    sys_path: list[str]
    directory: str
    log_level: str
    fd_server: FileDescriptorServerAddress | None
    requests: RemoteReaderHandle | None
    is_spread: bool


class LocalHandles(msgspec.Struct, frozen=True):
    """Queue handles and descriptors of a worker on the engine's node, sent by the FileDescriptorServer.

    Attributes:
        requests, replies: Its ends of the queues.
        activity_fd: Descriptor of the activity table.
        stack_fd: Descriptor of the file that its stacks are written to.
    """

    requests: ReaderHandle
    replies: WriterHandle
    activity_fd: int
    stack_fd: int


class InitializeResult(msgspec.Struct, frozen=True):
    """The result of `initialize`.

    Attributes:
        failure: The text of the error; empty on success.
        replies: Handle of the response queue of a worker on another node; None on the engine's node.
    """

    failure: str = ""
    replies: RemoteReaderHandle | None = None


class RayWorkerReport(msgspec.Struct, frozen=True):
    """The result of `report`.

    Attributes:
        text, step: As in Activity.
        stacks: The stacks of all threads, most recent call first.
    """

    text: str
    step: int | None
    stacks: str


class RayWorker:
    """The actor. Ray makes one per rank."""

    def __init__(self) -> None:
        self._port_socket = socket.socket()
        self._node_ip = ""

    def __repr__(self) -> str:  # the name that Ray shows for the process and its output
        return "mvllm"

    def identify(self, resource: bytes) -> bytes:
        """Args: the name of the platform's Ray resource. Returns: RayWorkerIdentity."""
        context = ray.get_runtime_context()
        self._node_ip = ray.util.get_node_ip_address()
        identity = RayWorkerIdentity(
            node_id=context.get_node_id(),
            node_ip=self._node_ip,
            pid=os.getpid(),
            device_ids=[str(device) for device in context.get_accelerator_ids().get(resource.decode(), [])],
            port=self._reserve_port(),
            version=own_version(),
        )
        return msgspec.msgpack.encode(identity)

    def initialize(self, encoded: bytes) -> bytes:
        """Args: RayWorkerStart. Returns: InitializeResult."""
        self._start = start = msgspec.msgpack.decode(encoded, type=RayWorkerStart)
        if start.context.rank != 0:
            self._port_socket.close()
        self._configure_process(start)
        if start.fd_server is None:
            return self._open_remote_queues(start)
        try:
            handles, fds, control = fetch_descriptors(start.fd_server, start.context.rank, LocalHandles)
        except (OSError, EOFError) as e:
            text = f"it is on the engine's node but cannot reach the engine's socket there: {type(e).__name__}: {e}"
            return msgspec.msgpack.encode(InitializeResult(text))
        watch_parent(control)
        self._control = control  # its closing at the end of this process notifies the engine
        dump_stacks_to(fds[handles.stack_fd])
        self._activity_table = ActivityTable(fds[handles.activity_fd])
        self._requests: ReaderHandle | RemoteReaderHandle = handles.requests.with_fds(fds)
        self._replies = MessageWriter.attach(handles.replies.with_fds(fds))
        return msgspec.msgpack.encode(InitializeResult())

    def build(self) -> bytes:
        """Returns: Handshake."""
        start = self._start
        try:
            self._proc = WorkerProc.build(
                start.name,
                start.context,
                start.platform,
                start.config,
                self._requests,
                self._replies,
                self._activity_table,
            )
        except Exception as e:  # noqa: BLE001  (sent to the executor)
            return self._failed(e)
        return msgspec.msgpack.encode(Handshake())

    def run(self) -> bytes:
        """Serves requests until the stop request or the end of the engine. Returns: Handshake."""
        try:
            self._proc.worker_busy_loop()
        except QueueError as e:
            return self._failed(e)
        finally:
            self._proc.shutdown()
        return msgspec.msgpack.encode(Handshake())

    @ray.method(concurrency_group="control")
    def report(self) -> bytes:
        """Returns: RayWorkerReport."""
        activity = self._activity_table.read(self._start.context.rank)
        fd = anonymous_file("stacks")
        try:
            faulthandler.dump_traceback(fd, all_threads=True)
            stacks = os.pread(fd, 64 << 10, 0).decode(errors="replace")
        finally:
            os.close(fd)
        return msgspec.msgpack.encode(RayWorkerReport(activity.text, activity.step, stacks))

    def _configure_process(self, start: RayWorkerStart) -> None:
        """Sets up this process like the engine's, before the platform is imported."""
        for name, value in start.defaults.items():
            os.environ.setdefault(name, value)
        os.environ.update(start.environment)
        if start.is_spread and (interface := _interface_of(self._node_ip)):
            # By default gloo uses the address of the host name, which often is reachable from this host only.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        sys.path += [path for path in start.sys_path if path not in sys.path]
        with contextlib.suppress(OSError):  # another node need not have the folder
            os.chdir(start.directory)
        label_output(start.name, start.log_level)

    def _open_remote_queues(self, start: RayWorkerStart) -> bytes:
        assert start.requests is not None
        responses = RemoteResponseQueue(start.name, self._node_ip, decode_config(start.config).parallel)
        # For the errors of this process; the executor has another table for remote workers.
        self._activity_table = ActivityTable.create(start.context.world_size)
        self._requests = start.requests
        self._replies = responses.writer
        return msgspec.msgpack.encode(InitializeResult(replies=responses.handle))

    def _failed(self, error: Exception) -> bytes:
        start = self._start
        return msgspec.msgpack.encode(Handshake.of_error(error, start.name, start.context.rank, self._activity_table))

    def _reserve_port(self) -> int:
        """Binds a free port without listening.

        The system then gives it to no process that requests any free port, while torch, which binds this port with
        SO_REUSEADDR, still can.
        """
        family = socket.AF_INET6 if ":" in self._node_ip else socket.AF_INET
        self._port_socket.close()
        self._port_socket = socket.socket(family)
        self._port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_socket.bind((self._node_ip, 0))
        return int(self._port_socket.getsockname()[1])


def own_version() -> str:
    """The version of mvllm in this process."""
    return importlib.metadata.version("mvllm")


def _interface_of(address: str) -> str | None:
    """The network interface with `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return str(name)
    return None
