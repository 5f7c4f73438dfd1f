"""A worker in a Ray actor: the same WorkerProc as in a process of our own, started in two phases.

    identify     where am I, which devices did Ray give me          the executor gives out ranks by the answers
    initialize   who am I: name, rank, environment, queue ends
    build        find the platform, build the worker                this is where torch is imported
    run          take requests until told to stop
    report       what are you doing, every thread; beside all of these

Ray pickles arguments and results by itself, so only bytes go through it: msgpack of the structs below.
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
    ActivityTable,
    FileDescriptorServerAddress,
    Handshake,
    MessageWriter,
    QueueError,
    ReaderHandle,
    RemoteReaderHandle,
    RemoteResponseQueue,
    WorkerContext,
    WorkerProc,
    WriterHandle,
    anonymous_file,
    decode_config,
    dump_stacks_to,
    fetch_descriptors,
    label_output,
    watch_parent,
)


class RayWorkerIdentity(msgspec.Struct, frozen=True):
    """What an actor says about itself before it has a rank.

    Attributes:
        node_id, node_ip: Ray's name and address of its node.
        pid: Its process id, on that node.
        device_ids: What Ray gave it of the platform's resource; empty for resources that Ray does not number.
        port: A port of `node_ip` that is kept free for the ranks to meet at.
        version: Of mvllm there.
    """

    node_id: str
    node_ip: str
    pid: int
    device_ids: list[str]
    port: int
    version: str


class RayWorkerStart(msgspec.Struct, frozen=True):
    """Everything that an actor needs to know to become a worker.

    Attributes:
        name, context, platform, config: As in WorkerStartArgs.
        environment: Variables to set.
        defaults: Variables of the engine's process, to set where this one has none.
        sys_path, directory: Where the engine finds modules, and its working directory.
        log_level: Of the `mvllm` loggers.
        door: Where a worker on the engine's node gets its ends of the queues.
        requests: A worker on another node reads requests here.
        is_spread: The ranks are on several nodes.
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
    door: FileDescriptorServerAddress | None
    requests: RemoteReaderHandle | None
    is_spread: bool


class NearEnds(msgspec.Struct, frozen=True):
    """What a worker on the engine's node gets through the door.

    Attributes:
        requests, replies: Its ends of the queues.
        activity_fd: The status activity_table.
        stack_fd: Where its stacks go when it crashes or hangs.
    """

    requests: ReaderHandle
    replies: WriterHandle
    activity_fd: int
    stack_fd: int


class RayWorkerAnswer(msgspec.Struct, frozen=True):
    """What `initialize` returns.

    Attributes:
        failure: Why not; empty where all is well.
        replies: Where the executor reads a far worker's replies.
    """

    failure: str = ""
    replies: RemoteReaderHandle | None = None


class RayWorkerReport(msgspec.Struct, frozen=True):
    """What a worker is doing.

    Attributes:
        text, step: As in Activity.
        stacks: Of all threads, most recent call first.
    """

    text: str
    step: int | None
    stacks: str


class RayWorker:
    """The actor. Made by Ray, one per rank."""

    def __init__(self) -> None:
        self._keeper = socket.socket()
        self._node_ip = ""

    def __repr__(self) -> str:  # how Ray calls it in the lines that it forwards
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
            port=self._keep_port(),
            version=own_version(),
        )
        return msgspec.msgpack.encode(identity)

    def initialize(self, encoded: bytes) -> bytes:
        """Args: RayWorkerStart. Returns: RayWorkerAnswer."""
        self._start = start = msgspec.msgpack.decode(encoded, type=RayWorkerStart)
        if start.context.rank != 0:
            self._keeper.close()
        self._adopt(start)
        if start.door is None:
            return self._open_far_ends(start)
        try:
            ends, fds, control = fetch_descriptors(start.door, start.context.rank, NearEnds)
        except (OSError, EOFError) as e:
            text = f"it is on the engine's node but cannot reach the engine's socket there: {type(e).__name__}: {e}"
            return msgspec.msgpack.encode(RayWorkerAnswer(text))
        watch_parent(control)
        self._control = control  # its end is the news of our death
        dump_stacks_to(fds[ends.stack_fd])
        self._activity_table = ActivityTable(fds[ends.activity_fd])
        self._requests: ReaderHandle | RemoteReaderHandle = ends.requests.with_fds(fds)
        self._replies = MessageWriter.attach(ends.replies.with_fds(fds))
        return msgspec.msgpack.encode(RayWorkerAnswer())

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
        except Exception as e:  # noqa: BLE001  (travels to the executor)
            return self._failed(e)
        return msgspec.msgpack.encode(Handshake())

    def run(self) -> bytes:
        """Returns when told to stop, or when the engine is gone: Handshake."""
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

    def _adopt(self, start: RayWorkerStart) -> None:
        """Makes this interpreter like the engine's, before anything of the platform is imported."""
        for name, value in start.defaults.items():
            os.environ.setdefault(name, value)
        os.environ.update(start.environment)
        if start.is_spread and (interface := _interface_of(self._node_ip)):
            # Left alone it takes the address of the host's own name, which often is one that only this host can reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        sys.path += [path for path in start.sys_path if path not in sys.path]
        with contextlib.suppress(OSError):  # another node may not have the folder, and need not
            os.chdir(start.directory)
        label_output(start.name, start.log_level)

    def _open_far_ends(self, start: RayWorkerStart) -> bytes:
        assert start.requests is not None
        responses = RemoteResponseQueue(start.name, self._node_ip, decode_config(start.config).parallel)
        self._activity_table = ActivityTable.create(
            start.context.world_size
        )  # for its own errors; the executor keeps another
        self._requests = start.requests
        self._replies = responses.writer
        return msgspec.msgpack.encode(RayWorkerAnswer(replies=responses.handle))

    def _failed(self, error: Exception) -> bytes:
        start = self._start
        return msgspec.msgpack.encode(Handshake.of_error(error, start.name, start.context.rank, self._activity_table))

    def _keep_port(self) -> int:
        """Claims a port without listening at it.

        Whoever asks the system for any port gets another one then, and torch, which asks for this one with
        SO_REUSEADDR, gets it all the same.
        """
        family = socket.AF_INET6 if ":" in self._node_ip else socket.AF_INET
        self._keeper.close()
        self._keeper = socket.socket(family)
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind((self._node_ip, 0))
        return int(self._keeper.getsockname()[1])


def own_version() -> str:
    """The version of mvllm that this process has."""
    return importlib.metadata.version("mvllm")


def _interface_of(address: str) -> str | None:
    """The network interface that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return str(name)
    return None
