"""Runs Python programs of tests as forks of a process that has imported torch and the server.

A program that imports torch needs two seconds of a core to start, and the tests start hundreds. While `programs` is
open, `subprocess` starts workers, engine cores, processors of items and `mvllm` commands as forks of a server:

    test process ──job──> program server          imports them once, has one thread
                              └─ fork ─ fork ─>  the program: its own arguments, variables, descriptors, folder

The intermediate fork exits at once, so that the program becomes a child of the test process. Each program but LEAVES
has its own program server, forked at its start, for the programs that it starts. Programs of one server share the seed
of Python's hashes.

A program is started as a new process if a fork would differ: another interpreter or other interpreter options, other
values of variables that libraries read at import, a test with the mark `fresh_programs`, or the variable
TESTS_FRESH_PROGRAMS, which `ci/dev.py test --all` sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FRESH = "TESTS_FRESH_PROGRAMS"
FORKED_MODULES = (
    *("mvllm.executor.process.child_program", "mvllm.entrypoints.cli.main", "tests.", "plugins."),
    *("mvllm.multimodal.processor_main", "mvllm.entrypoints.openai.common.chat_template_process"),
    *("pytest", "torch.distributed.run"),
)
"""Prefixes of the modules of `python -m` that are forked."""
LEAVES = {
    *("mvllm.executor.worker_main", "mvllm.multimodal.processor_main"),
    "mvllm.entrypoints.openai.common.chat_template_process",
}
"""Arguments of programs that start none of FORKED_MODULES, and get no program server."""
READ_WHEN_LOADED = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH", "LD_", "MALLOC_"),
    *("GLIBC_", "PYTHON", "LANG", "LC_", "TRITON_", "CUDA_", "ROCR_", "HIP_", "ZE_"),
)
"""Prefixes of environment variables that must have the values of the program server's start."""
SET_ANEW = (
    *("PYTHONPATH", "TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "PYTHONBREAKPOINT"),
    "GOMP_SPINCOUNT",
)
"""Prefixes of variables among them that a fork sets: those of torchrun are read when a process group is created. torch
sets TORCHINDUCTOR_CACHE_DIR itself when transformers is imported, and reads it when something is compiled. Ray sets
PYTHONBREAKPOINT when it connects, and `breakpoint()` reads it. The CPU platform sets the last one for its workers; it
is about threads that wait, and with OMP_NUM_THREADS=1 there are none."""
OPTIONS = ("-P", "-u")
"""Interpreter options that a fork applies."""
PADDING = "PROGRAM_SERVER_PADDING"
ROOT = str(Path(__file__).resolve().parents[2])

_SERVER = ("-m", "tests.helpers.program_server")
_MAX_JOB = 1 << 18
_SPACE_FOR_VARIABLES = 1 << 16
_SPACE_FOR_ARGUMENTS = 1 << 14
_FIRST_SPARE_FD = 200
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
_start_afresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Job:
    """A program to run.

    Attributes:
        arguments: The command line, the interpreter first.
        variables: Environment variables.
        folder: Working directory.
        descriptors: File descriptor numbers in the program for the descriptors sent with the job.
        ignored: Signals that it ignores.
        processors: CPU affinity.
        new_session: Whether it starts a new session.
        group: Its process group if it starts no session; 0 for a new group.
        parent: The requesting process.
    """

    arguments: list[str]
    variables: dict[str, str]
    folder: str
    descriptors: list[int]
    ignored: list[int]
    processors: list[int]
    new_session: bool
    group: int
    parent: int


# ------------------------------------------------------------------------------------------------ the client's process


@dataclass
class ProgramServer:
    """The client of the program server.

    Attributes:
        owner: The process that may send jobs: a fork of it may not.
        variables: The environment that the server is started with.
        socket: Connection to the server, once it is started.
        is_enabled: Whether programs are forked at the moment.
    """

    owner: int
    variables: Mapping[str, str]
    socket: socket.socket | None = None
    is_enabled: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def can_run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> bool:
        return (
            self.is_enabled
            # The kernel ends the server together with the thread that started it.
            and (self.socket is not None or threading.current_thread() is threading.main_thread())
            and self.owner == os.getpid()
            and is_forkable(arguments)
            and read_when_loaded(variables) == read_when_loaded(self.variables)
        )

    def start(self) -> None:
        """Starts the server if it is not running."""
        with self._lock:
            if self.socket is None:
                self.socket = start_server(self.variables)

    def run(self, job: Job, descriptors: Sequence[int]) -> int:
        """The process id of the program, a child of this process."""
        self.start()
        assert self.socket is not None
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.socket, [json.dumps(vars(job)).encode()], descriptors)
                answer = self.socket.recv(16)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise OSError("the program server of the tests has ended")
        return int(answer)


_server: ProgramServer | None = None


@contextlib.contextmanager
def programs(*, fresh: bool) -> Iterator[None]:
    """Context in which `subprocess` forks the programs that can be forked, or starts all as new processes."""
    if _server is None and not fresh and is_possible():
        _install(ProgramServer(os.getpid(), dict(os.environ)))
    if _server is None:
        yield
        return
    before, _server.is_enabled = _server.is_enabled, not fresh
    try:
        yield
    finally:
        _server.is_enabled = before


def is_possible() -> bool:
    """Whether a program server is possible: it needs OMP_NUM_THREADS=1, so that libraries start no threads."""
    suits = sys.platform == "linux" and sys.version_info >= (3, 11) and os.environ.get("OMP_NUM_THREADS") == "1"
    return suits and FRESH not in os.environ


def start() -> None:
    """Starts the program server now instead of with the first program."""
    if _server is not None and _server.is_enabled:
        _server.start()


def _install(server: ProgramServer) -> None:
    global _server
    _server = server
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _execute_child(
    popen: Any,
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Any,
    startupinfo: Any,
    creationflags: int,
    shell: bool,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    start_new_session: bool,
    process_group: int = -1,
) -> None:
    """Replacement of `Popen._execute_child`: forks the program if possible, else starts a new process."""
    pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
    arguments = [os.fspath(one) for one in args] if isinstance(args, (list, tuple)) else []
    variables = dict(os.environ if env is None else env)
    plain = not (shell or preexec_fn or executable or gid or gids or uid or umask != -1) and close_fds
    texts = all(isinstance(one, str) for one in (*arguments, *variables, *variables.values()))
    if not (plain and texts and _server is not None and _server.can_run(arguments, variables)):
        _start_afresh(
            *(popen, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
            *(*pipes, restore_signals, gid, gids, uid, umask, start_new_session, process_group),
        )
        return
    standard = [given if given != -1 else fd for fd, given in enumerate((p2cread, c2pwrite, errwrite))]
    targets = {target: fd for target, fd in enumerate(standard) if _is_open(fd)}
    targets.update({fd: fd for fd in pass_fds})
    job = Job(
        arguments=arguments,
        variables=variables,
        folder=os.path.abspath(cwd or os.getcwd()),
        descriptors=list(targets),
        ignored=[number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        processors=sorted(os.sched_getaffinity(0)),
        new_session=start_new_session,
        group=os.getpgrp() if process_group == -1 else process_group,
        parent=os.getpid(),
    )
    if not os.path.isdir(job.folder):
        raise FileNotFoundError(2, "No such file or directory", job.folder)
    popen.pid = _server.run(job, list(targets.values()))
    popen._child_created = True
    popen._close_pipe_fds(*pipes)


def is_forkable(arguments: Sequence[str]) -> bool:
    """Whether the command line runs one of FORKED_MODULES, or a script of tests/, in this interpreter."""
    if not arguments or arguments[0] != sys.executable:
        return False
    rest = list(arguments[1:])
    while rest[:1] and rest[0] in OPTIONS:
        rest = rest[1:]
    return tuple(rest[:2]) != _SERVER and len(rest) > 1 and rest[0] == "-m" and rest[1].startswith(FORKED_MODULES)


def read_when_loaded(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_WHEN_LOADED) and not name.startswith((*SET_ANEW, "PYTEST"))
    }


def start_server(variables: Mapping[str, str]) -> socket.socket:
    """Starts a program server of this process; returns the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, *_SERVER, str(theirs.fileno()), str(os.getpid()), " " * _SPACE_FOR_ARGUMENTS]
        padded = {**variables, PADDING: "x" * _SPACE_FOR_VARIABLES}
        null = subprocess.DEVNULL
        popen = subprocess.Popen(command, env=padded, cwd=ROOT, stdin=null, pass_fds=[theirs.fileno()], process_group=0)
    popen.returncode = 0  # it ends with this process; nobody waits for it
    return ours


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------- the server


def serve(end: socket.socket, parent: int) -> Job:
    """Handles jobs until the client closes its socket. Returns in the forked programs, with the job of each."""
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it may share the group of the requesting process
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(end, _MAX_JOB, 250)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            os.close(reading)
            own = os.getpid()
            program = os.fork()
            if program:
                os.write(writing, str(program).encode())
                os._exit(0)
            os.close(writing)
            while os.getppid() == own:  # until it is a child of the requesting process
                os.sched_yield()
            end.close()
            job = Job(**json.loads(message))
            _become(job, descriptors)
            return job
        os.close(writing)
        os.waitpid(intermediate, 0)
        end.send(os.read(reading, 16))
        for fd in (reading, *descriptors):
            os.close(fd)


def _die_with(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _become(job: Job, descriptors: Sequence[int]) -> None:
    """Sets up this fork's arguments, variables, descriptors and folder as its parent gave them."""
    if job.new_session:
        os.setsid()
    else:
        os.setpgid(0, job.group)
    os.chdir(job.folder)
    os.sched_setaffinity(0, job.processors)
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN and number not in job.ignored:
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in job.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in job.ignored:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    _take_descriptors(dict(zip(job.descriptors, descriptors, strict=True)))


def _take_descriptors(targets: Mapping[int, int]) -> None:
    """Leaves only `targets` open: descriptor number in the program → descriptor here."""
    import fcntl

    spare = max(_FIRST_SPARE_FD, *targets) + 1
    moved = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, spare) for target, fd in targets.items()}
    os.closerange(0, spare)
    for target, fd in moved.items():
        os.dup2(fd, target, inheritable=True)
        os.close(fd)


def run_program(job: Job) -> None:
    """Runs the program like the interpreter; returns or raises in the same cases."""
    if not LEAVES & set(job.arguments):
        _start_own_server(job)
    _rewrite_process_table(job)
    _open_standard_streams()
    os.environ.clear()
    os.environ.update(job.variables)
    arguments = job.arguments[1:]
    options = list(itertools.takewhile(OPTIONS.__contains__, arguments))
    arguments = arguments[len(options) :]
    is_safe = "-P" in options or bool(job.variables.get("PYTHONSAFEPATH"))
    if "-u" in options:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    added = [part for part in job.variables.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*([] if is_safe else [job.folder]), *added, *_PATH]
    sys.argv[:] = ["-m", *arguments[2:]]
    sys.orig_argv[:] = job.arguments
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def _start_own_server(job: Job) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if os.fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for target in job.descriptors:  # a pipe whose reader waits for end of file
            os.dup2(null, target) if target <= 2 else os.close(target)
        run_program(serve(theirs, program))
        raise SystemExit
    theirs.close()
    _install(ProgramServer(program, job.variables, ours))


def _open_standard_streams() -> None:
    """Reopens sys.stdin, stdout and stderr for descriptors 0 to 2, as at the start of Python."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        errors = "backslashreplace" if name == "stderr" else "strict"
        buffering = 1 if name == "stderr" or os.isatty(fd) else -1
        is_open = _is_open(fd)
        stream = open(fd, mode, buffering, "utf-8", errors, closefd=False) if is_open else None  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _rewrite_process_table(job: Job) -> None:
    """Sets the name, arguments and variables of the process that /proc shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    argument_start, argument_end, variable_start, variable_end = map(int, fields[45:49])
    arguments = b"".join(one.encode() + b"\0" for one in job.arguments)
    variables = b"".join(f"{name}={value}".encode() + b"\0" for name, value in job.variables.items())
    for start, end, data in (
        (argument_start, argument_end, arguments),
        (variable_start, variable_end, variables),
    ):
        data = data[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))
    _libc.prctl(_PR_SET_NAME, b"python", 0, 0, 0)


_PATH: list[str] = []


def main() -> None:
    """The main program of the first server."""
    end, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _die_with(parent)
    variables = {name: value for name, value in os.environ.items() if name != PADDING}
    _libc.clearenv()  # forks write to the freed memory
    os.environ.clear()
    os.environ.update(variables)
    given = [os.path.abspath(part) for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part]
    _PATH[:] = [one for one in sys.path if one not in (ROOT, *given)]

    import torch  # noqa: F401
    import transformers.utils.chat_template_utils  # noqa: F401

    import mvllm.engine.core.engine_core
    import mvllm.engine.process.engine_core_proc
    import mvllm.entrypoints.cli.serve
    import mvllm.entrypoints.llm
    import mvllm.entrypoints.openai.common.chat_template_process
    import mvllm.entrypoints.openai.server.api_server
    import mvllm.executor.worker_main
    import mvllm.multimodal.item_processor
    import mvllm.worker.model_runner
    import mvllm.worker.worker  # noqa: F401

    gc.collect()
    gc.freeze()
    run_program(serve(end, parent))


if __name__ == "__main__":
    # Import it under the name that programs use, so that there is one copy of its state.
    from tests.helpers import program_server

    program_server.main()
