"""Shared memory is planned for the whole engine; too little of it is an error with a hint, never a signal."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from mvllm.executor.message_queue import (
    MessageQueue,
    QueueSettings,
    RingShape,
    SharedMemoryError,
    plan_rings,
    shared_memory_space,
    shared_segment,
)
from mvllm.executor.message_queue.shared_memory_budget import SharedMemorySpace
from mvllm.platform import host_memory

MIB = 1 << 20


def space(num_bytes):
    return SharedMemorySpace(num_bytes, "/dev/shm", "a larger /dev/shm: start the container with --shm-size")


def total(shapes):
    return sum(shape.total_bytes for shape in shapes)


def test_rings_that_fit_are_unchanged():
    wanted = [RingShape(8), *[RingShape(1)] * 8]
    assert plan_rings(wanted, space(1 << 30)) == wanted


def test_nine_rings_shrink_into_the_64_mb_of_a_container():
    wanted = [RingShape(8, slot_bytes=4 * MIB), *[RingShape(1)] * 8]
    planned = plan_rings(wanted, space(64 * MIB))
    assert total(planned) <= 64 * MIB < total(wanted)
    assert [shape.num_readers for shape in planned] == [8, *[1] * 8]
    assert all(shape.num_slots == 10 and shape.slot_bytes >= MIB // 4 for shape in planned)


def test_the_number_of_slots_shrinks_last():
    (planned,) = plan_rings([RingShape(1)], space(300 << 10))
    assert planned.slot_bytes == 64 << 10
    assert 3 <= planned.num_slots < 10


def test_too_little_memory_for_the_smallest_rings_is_refused_with_a_hint():
    with pytest.raises(SharedMemoryError, match=r"9 message queues request .* but /dev/shm has .*--shm-size"):
        plan_rings([RingShape(1)] * 9, space(1 * MIB))


def test_the_space_of_this_machine_is_known():
    assert shared_memory_space().free_bytes > MIB
    assert "--memory" in shared_memory_space().remedy


@pytest.fixture
def small_filesystem(tmp_path):
    """64 MB of memory file system, as a container's /dev/shm."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield str(tmp_path)
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_queue_that_does_not_fit_its_file_system_is_an_error_and_not_a_signal(small_filesystem):
    with pytest.raises(SharedMemoryError, match=r"'big' needs .* bytes .*--shm-size"):
        MessageQueue.create("big", ["r"], settings=QueueSettings(slot_bytes=8 * MIB, directory=small_filesystem))
    assert os.listdir(small_filesystem) == []
    assert os.statvfs(small_filesystem).f_bavail * os.statvfs(small_filesystem).f_frsize == 64 * MIB


def test_planned_rings_fit_and_every_byte_of_them_can_be_written(small_filesystem):
    wanted = QueueSettings(slot_bytes=4 * MIB, directory=small_filesystem)
    planned = plan_rings([wanted.shape(1)] * 9, shared_memory_space(small_filesystem))
    with contextlib.ExitStack() as stack:
        for shape in planned:
            settings = QueueSettings(shape.num_slots, shape.slot_bytes, directory=small_filesystem)
            queue = stack.enter_context(contextlib.closing(MessageQueue.create("q", ["r"], settings=settings)))
            writer = stack.enter_context(contextlib.closing(queue.open_writer()))
            for _ in range(shape.num_slots):
                writer.enqueue({}, [bytes(shape.slot_bytes - 128)], timeout=0)
            assert writer._overflow is None
    assert os.listdir(small_filesystem) == []


def limit_memory(monkeypatch, root, line, folders):
    """Simulates control groups with these files: {folder: {file: content}}."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for folder, files in folders.items():
        (root / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (root / "cgroup" / folder / name).write_text(f"{content}\n")
    monkeypatch.setattr(host_memory, "PROC", root / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", root / "cgroup")


@pytest.mark.parametrize("where", ["its own group", "a group above"])
def test_the_limits_of_all_parent_control_groups_apply(monkeypatch, tmp_path, where):
    limited = {"memory.max": 64 * MIB, "memory.current": 4 * MIB, "memory.stat": "anon 9\ninactive_file 0"}
    free = {"memory.max": "max", "memory.current": 4 * MIB}
    inner, outer = (limited, free) if where == "its own group" else (free, limited)
    limit_memory(monkeypatch, tmp_path, "0::/pods/one\n", {"pods": outer, "pods/one": inner})
    assert shared_memory_space().free_bytes == 60 * MIB


def test_cached_files_count_as_free_memory(monkeypatch, tmp_path):
    """After weights have been read, cached files fill a container's memory, and all of it can be freed."""
    usage = {
        "memory.limit_in_bytes": 64 * MIB,
        "memory.usage_in_bytes": 64 * MIB - 1,
        "memory.stat": f"cache {50 * MIB}\ninactive_file 5\ntotal_inactive_file {50 * MIB}",
    }
    limit_memory(monkeypatch, tmp_path, "7:cpu,cpuacct:/\n4:memory:/box\n", {"memory/box": usage})
    assert shared_memory_space().free_bytes == 50 * MIB + 1
    assert total(plan_rings([RingShape(2)] * 9, shared_memory_space())) <= 50 * MIB


def test_a_limit_that_is_reached_refuses_and_names_the_limit(monkeypatch, tmp_path):
    usage = {"memory.max": 64 * MIB, "memory.current": 64 * MIB}
    limit_memory(monkeypatch, tmp_path, "0::/\n", {".": usage})
    with pytest.raises(SharedMemoryError, match=r"memory has 0 to spare.*--memory"):
        plan_rings([RingShape(1)], shared_memory_space())


def test_without_anonymous_memory_the_plan_uses_the_space_of_the_file_system(monkeypatch, small_filesystem):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr(shared_segment, "FALLBACK_DIRECTORY", small_filesystem)
    found = shared_memory_space()
    assert (found.free_bytes, found.place) == (64 * MIB, small_filesystem) and "--shm-size" in found.remedy
    with pytest.raises(SharedMemoryError, match=r"'big' needs .* bytes .*--shm-size"):
        MessageQueue.create("big", ["r"], settings=QueueSettings(slot_bytes=8 * MIB))
    with contextlib.closing(MessageQueue.create("small", ["r"])):
        assert shared_memory_space().free_bytes < 64 * MIB
    assert shared_memory_space().free_bytes == 64 * MIB
