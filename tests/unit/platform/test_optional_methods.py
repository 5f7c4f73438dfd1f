"""The defaults of methods that platforms may leave out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import PlatformError
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.communicator import Communicator
from mvllm.platform.graphs import CompileBackend
from tests.helpers.thread_ranks import ThreadCommunicator, run_ranks

OPTIONAL_COLLECTIVES = ("reduce_scatter", "broadcast", "gather", "all_to_all", "barrier")


def communicator_of(group: GroupCoordinator) -> Communicator:
    assert group.device_group is not None
    return group.device_group


def matrix_of(rank: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.int64).view(2, 6) + 100 * rank


def test_the_communicator_under_test_does_not_override_the_defaults() -> None:
    for name in OPTIONAL_COLLECTIVES:
        assert getattr(ThreadCommunicator, name) is getattr(Communicator, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_gives_each_rank_its_share_of_the_sum(world_size: int) -> None:
    def body(group: GroupCoordinator) -> torch.Tensor:
        given = matrix_of(group.rank_in_group)
        found = communicator_of(group).reduce_scatter(given)
        assert torch.equal(given, matrix_of(group.rank_in_group)), "the argument is left as it was"
        return found

    total = sum(matrix_of(rank) for rank in range(world_size))
    assert isinstance(total, torch.Tensor)
    for found, expected in zip(run_ranks(world_size, body), total.chunk(world_size, -1), strict=True):
        assert torch.equal(found, expected) and found.is_contiguous()


def test_reduce_scatter_of_a_size_that_ranks_cannot_share_is_refused() -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(ValueError, match="5 elements cannot be shared evenly by 2 ranks"):
            communicator_of(group).reduce_scatter(torch.ones(2, 5))

    run_ranks(2, body)


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast_writes_the_values_of_the_source_in_place(source: int) -> None:
    def body(group: GroupCoordinator) -> torch.Tensor:
        tensor = matrix_of(group.rank_in_group)
        assert communicator_of(group).broadcast(tensor, source) is tensor
        return tensor

    assert all(torch.equal(found, matrix_of(source)) for found in run_ranks(3, body))


def test_gather_concatenates_on_the_destination_and_gives_none_elsewhere() -> None:
    found = run_ranks(3, lambda group: communicator_of(group).gather(matrix_of(group.rank_in_group), 1, 0))
    assert found[0] is None and found[2] is None and found[1] is not None
    assert torch.equal(found[1], torch.cat([matrix_of(rank) for rank in range(3)]))


def test_all_to_all_gives_rank_i_the_ith_tensor_of_every_rank() -> None:
    def body(group: GroupCoordinator) -> list[torch.Tensor]:
        return communicator_of(group).all_to_all([matrix_of(10 * group.rank_in_group + to) for to in range(3)])

    for rank, received in enumerate(run_ranks(3, body)):
        assert len(received) == 3
        assert all(torch.equal(part, matrix_of(10 * source + rank)) for source, part in enumerate(received))


def test_all_to_all_with_too_few_tensors_is_refused() -> None:
    def body(group: GroupCoordinator) -> None:
        with pytest.raises(ValueError, match="one tensor for each of 2 ranks, got 1"):
            communicator_of(group).all_to_all([torch.ones(1)])

    run_ranks(2, body)


def test_no_rank_passes_a_barrier_before_all_have_reached_it() -> None:
    reached: list[int] = []

    def body(group: GroupCoordinator) -> int:
        reached.append(group.rank_in_group)
        communicator_of(group).barrier()
        return len(reached)

    assert run_ranks(3, body) == [3, 3, 3]


def test_a_barrier_without_host_tensors_has_to_be_implemented() -> None:
    class DeviceOnly(ThreadCommunicator):
        on_host = False

    with pytest.raises(PlatformError, match=r"DeviceOnly has no barrier.*Implement barrier\(\)"):
        DeviceOnly.__new__(DeviceOnly).barrier()


# ------------------------------------------------------------------------------------------------------------ attention


def spec(**changes: object) -> AttentionSpec:
    values: dict[str, object] = {
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": "float32",
        "kv_dtype": "float32",
        "scale": 1.0,
    }
    return AttentionSpec(**{**values, **changes})  # type: ignore[arg-type]


class DefaultCopyAttention(ReferenceAttention):
    """ReferenceAttention with the default of `copy_blocks`."""

    copy_blocks = AttentionBackend.copy_blocks


class SlotMajorAttention(DefaultCopyAttention):
    """Keys and values as [slots, heads, head_size], in one tensor."""

    sizes = (16,)

    def kv_layout(self):
        layout = super().kv_layout()
        return type(layout)(self.sizes, layout.bytes_per_token)

    def allocate(self, num_blocks, block_size, device):
        return torch.arange(num_blocks * block_size * 16, dtype=torch.float32).view(-1, 2, 8)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_copy_blocks_copies_whole_blocks_of_every_tensor(kv_dtype: str) -> None:
    backend = DefaultCopyAttention(spec(kv_dtype=kv_dtype))
    size = backend.kv_layout().block_sizes[0]
    kv = backend.allocate(6, size, torch.device("cpu"))
    for part in kv:
        part.copy_(torch.randn(part.shape))
    before = backend.read_slots(kv, torch.arange(6 * size))
    backend.copy_blocks(kv, torch.tensor([0, 3]), torch.tensor([5, 1]))
    slots = torch.arange(6 * size).view(6, size)[[0, 3, 2, 3, 4, 0]].flatten()
    for found, whole in zip(backend.read_slots(kv, torch.arange(6 * size)), before, strict=True):
        assert torch.equal(found.float(), whole[slots].float())


def test_copy_blocks_supports_a_dimension_of_slots() -> None:
    backend = SlotMajorAttention(spec())
    kv = backend.allocate(4, 16, torch.device("cpu"))
    before = kv.clone()
    backend.copy_blocks(kv, torch.tensor([2]), torch.tensor([0]))
    assert torch.equal(kv[:16], before[32:48]) and torch.equal(kv[16:], before[16:])


def test_copy_blocks_refuses_a_dimension_of_slots_with_several_block_sizes() -> None:
    backend = SlotMajorAttention(spec())
    backend.sizes = (16, 32)
    kv = backend.allocate(4, 16, torch.device("cpu"))
    with pytest.raises(PlatformError, match=r"do not show its blocks.*Implement SlotMajorAttention\.copy_blocks"):
        backend.copy_blocks(kv, torch.tensor([2]), torch.tensor([0]))


# ------------------------------------------------------------------------------------------------------------ compilers


def test_the_cache_key_stays_the_same_in_a_process_and_differs_in_another() -> None:
    class Plain(CompileBackend):
        def compile(self, function, *, dynamic):
            return function

    class Other(Plain):
        pass

    assert Plain().cache_key() == Plain().cache_key() != Other().cache_key()
    code = "from mvllm.platform.graphs import CompileBackend as C; print(C.cache_key(object()))"
    keys = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(keys) == 2 and all(keys)
