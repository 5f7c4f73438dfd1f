"""Reads devices and their memory from NVML, the driver's management library.

NVML answers without creating a CUDA context: a process that has used it may still be forked, and no device memory is
allocated. It is a C library that comes with the driver and is called here by ctypes, so no other package is needed.
Each read opens the library and closes it again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")
"""Further folders of the library, outside of the loader's search path: mounts in containers and virtual machines."""

_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_INSUFFICIENT_SIZE = 7
_DRIVER_NOT_LOADED = 9
_MISMATCH = 18
_UNKNOWN_BYTES = 2**64 - 1
_TEXT = 96
_MOST_PROCESSES = 256
_P2P_NVLINK, _P2P_OK = 2, 0  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t

_REMEDIES = {
    _NO_PERMISSION: "Give this user access to /dev/nvidia* (in a container: start it with access to the devices).",
    _DRIVER_NOT_LOADED: "Load the driver (modprobe nvidia), or restart the machine after its installation.",
    _MISMATCH: "Restart the machine: its driver was updated, and the old kernel module is still loaded.",
}
_SEE_SMI = "Run nvidia-smi, which fails in the same way, and fix what it reports."


class NvmlError(Exception):
    """NVML returned an error or is not available.

    Attributes:
        code: NVML's error code, or None without a library.
        remedy: What the user can do.
    """

    def __init__(self, message: str, code: int | None = None, remedy: str = _SEE_SMI) -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy


@dataclass(frozen=True)
class MigDevice:
    """A compute instance of a partitioned (MIG) device.

    Attributes:
        uuid: `MIG-...`.
        name: Name from NVML.
        memory_bytes: Memory of its GPU instance; None if NVML does not report it.
        old_id: Identifier in older drivers: `MIG-GPU-<uuid of the device>/<instance>/<compute instance>`.
    """

    uuid: str
    name: str
    memory_bytes: int | None
    old_id: str


@dataclass(frozen=True)
class NvmlDevice:
    """A physical device.

    Attributes:
        index: NVML's index, in the order of the PCI bus.
        name, uuid: Name and UUID from NVML.
        memory_bytes, free_bytes: None if NVML reports none, because the device uses the host's memory.
        compute_capability: (major, minor).
        mig_enabled: It is partitioned and cannot be used as a whole.
        mig_devices: Its compute instances.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    free_bytes: int | None
    compute_capability: tuple[int, int]
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """Installed NVIDIA devices.

    Attributes:
        driver_version: For messages.
        cuda_version: Newest CUDA that the driver supports, (major, minor).
        devices: The devices that answer, in the order of the PCI bus.
        failures: NVML's errors for the other devices.
    """

    driver_version: str
    cuda_version: tuple[int, int]
    devices: tuple[NvmlDevice, ...]
    failures: tuple[str, ...] = ()


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The opened NVML library. Created by `opened`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library.

        Raises:
            NvmlError: The function is missing or has failed.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError as e:
            raise NvmlError(f"the driver's NVML has no {name}", remedy="Update the driver.") from e
        code = function(*arguments)
        if code != 0:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            text = (self._library.nvmlErrorString(code) or b"unknown error").decode(errors="replace")
            raise NvmlError(f"{name}: {text}", code, _REMEDIES.get(code, _SEE_SMI))

    def inventory(self) -> Inventory:
        """All devices; one that does not answer becomes an entry of `failures`."""
        cuda, count = ctypes.c_int(), ctypes.c_uint()
        driver = self._text("nvmlSystemGetDriverVersion")
        self.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        devices, failures = [], []
        for index in range(count.value):
            try:
                devices.append(self._device(index))
            except NvmlError as e:
                failures.append(f"device {index}: {e}")
        version = (cuda.value // 1000, cuda.value % 1000 // 10)
        return Inventory(driver, version, tuple(devices), tuple(failures))

    def memory(self, uuid: str) -> tuple[int, int] | None:
        """(total, free) bytes of a device; None if NVML does not report them."""
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return self._memory(handle)

    def bytes_of_process(self, uuid: str, pid: int) -> int | None:
        """Bytes that a process holds on a device; None if NVML does not see it (inside a container, for example)."""
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        try:
            self.call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), found)
        except NvmlError as e:
            if e.code in (None, _NOT_SUPPORTED, _INSUFFICIENT_SIZE, _NO_PERMISSION):
                return None
            raise
        used = [entry.used for entry in found[: count.value] if entry.pid == pid and entry.used != _UNKNOWN_BYTES]
        return sum(used) if used else None

    def is_linked(self, uuid: str, other: str) -> bool:
        """Whether NVLink connects two devices, directly or through switches."""
        handles = (ctypes.c_void_p(), ctypes.c_void_p())
        for name, handle in zip((uuid, other), handles, strict=True):
            self.call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        status = ctypes.c_int(-1)
        self.call("nvmlDeviceGetP2PStatus", *handles, ctypes.c_int(_P2P_NVLINK), ctypes.byref(status))
        return status.value == _P2P_OK

    def _device(self, index: int) -> NvmlDevice:
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        memory = self._memory(handle)
        uuid = self._text("nvmlDeviceGetUUID", handle)
        partitioned = self._mig_enabled(handle)
        return NvmlDevice(
            index=index,
            name=self._text("nvmlDeviceGetName", handle),
            uuid=uuid,
            memory_bytes=memory[0] if memory else None,
            free_bytes=memory[1] if memory else None,
            compute_capability=(major.value, minor.value),
            mig_enabled=partitioned,
            mig_devices=tuple(self._mig_devices(handle, uuid)) if partitioned else (),
        )

    def _memory(self, handle: ctypes.c_void_p) -> tuple[int, int] | None:
        memory = _Memory()
        try:
            self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        except NvmlError as e:
            if e.code == _NOT_SUPPORTED:
                return None
            raise
        return int(memory.total), int(memory.free)

    def _mig_enabled(self, handle: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        except NvmlError as e:
            if e.code in (None, _NOT_SUPPORTED):
                return False
            raise
        return current.value == 1

    def _mig_devices(self, handle: ctypes.c_void_p, parent: str) -> Iterator[MigDevice]:
        most = ctypes.c_uint()
        self.call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
        for index in range(most.value):
            mig, instance, compute = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
            try:
                self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(mig))
            except NvmlError as e:
                if e.code == _NOT_FOUND:  # indices may be unused
                    continue
                raise
            self.call("nvmlDeviceGetGpuInstanceId", mig, ctypes.byref(instance))
            self.call("nvmlDeviceGetComputeInstanceId", mig, ctypes.byref(compute))
            memory = self._memory(mig)
            yield MigDevice(
                uuid=self._text("nvmlDeviceGetUUID", mig),
                name=self._text("nvmlDeviceGetName", mig),
                memory_bytes=memory[0] if memory else None,
                old_id=f"MIG-{parent}/{instance.value}/{compute.value}",
            )

    def _text(self, name: str, *handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, *handle, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")


@contextmanager
def opened() -> Iterator[Nvml]:
    """Context with NVML opened.

    Raises:
        NvmlError: There is no driver, or it does not answer.
    """
    library = _load()
    nvml = Nvml(library)
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        library.nvmlShutdown()


def read_inventory() -> Inventory:
    """The devices of this machine.

    Raises:
        NvmlError: There is no driver, or it does not answer.
    """
    with opened() as nvml:
        return nvml.inventory()


def _load() -> ctypes.CDLL:
    reason: OSError | None = None
    for folder in ("", *FOLDERS):
        try:
            return ctypes.CDLL(os.path.join(folder, LIBRARY))
        except OSError as e:
            reason = reason or e  # of the first attempt
    raise NvmlError(*_no_library()) from reason


def _no_library() -> tuple[str, None, str]:
    """Error text and remedy if the library cannot be loaded."""
    if os.path.exists("/dev/nvidia0"):
        return (
            f"there is a device, but the driver's library {LIBRARY} cannot be loaded",
            None,
            "Install the driver's libraries for user programs, of the version that the kernel has loaded; in a "
            "container, have the driver's libraries mounted (with Docker: --gpus all).",
        )
    return (
        f"there is no NVIDIA driver: {LIBRARY} cannot be loaded",
        None,
        "Install the NVIDIA driver, so that nvidia-smi lists the devices; in a container, start it with access to "
        "them (with Docker: --gpus all). On a machine without such a device, name another platform with --platform.",
    )
