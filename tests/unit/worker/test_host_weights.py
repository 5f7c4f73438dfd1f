"""Weights on the host and back: storages are freed and restored, and whatever shared one still does."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mvllm.errors import ModelError
from mvllm.worker import host_weights
from mvllm.worker.host_weights import HostWeights, storages_of

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Packed:
    values: torch.Tensor
    scale: torch.Tensor


class Layer(nn.Module):
    """Has weights in all places where models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.head = self.embedding  # tied
        self.row = self.embedding.detach()[1]
        self.register_buffer("table", torch.arange(4))
        self.packed = Packed(torch.arange(6, dtype=torch.int8), torch.ones(2))
        self.experts = [torch.full((2,), float(i)) for i in range(2)]
        hidden, bound = torch.full((5,), 3.0), torch.full((6,), 4.0)
        self.product = lambda x: x + hidden
        self.partial = functools.partial(torch.add, bound)
        self.method = SimpleNamespace(weight=torch.full((7,), 5.0))
        self.kv_cache = None


def runtime() -> SimpleNamespace:
    buffer = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
    return SimpleNamespace(device=CPU, host_buffer=buffer, synchronize=lambda: None)


@pytest.mark.parametrize("buffer_bytes", [7, 1 << 26], ids=["buffers smaller than a weight", "one buffer"])
def test_all_weights_leave_the_device_and_come_back(monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    monkeypatch.setattr(host_weights, "_BUFFER_BYTES", buffer_bytes)
    layer = Layer()
    storages = storages_of([layer], CPU)
    assert len(storages) == 9  # embedding, table, two of packed, two experts, hidden, bound, method
    weights = HostWeights([layer], runtime())
    assert weights.num_bytes == 48 + 32 + 6 + 8 + 16 + 20 + 24 + 28
    weights.offload()
    assert all(storage.nbytes() == 0 for storage in storages)
    weights.restore()
    assert torch.equal(layer.embedding, torch.arange(12.0).view(3, 4))
    assert layer.row.tolist() == [4, 5, 6, 7] and layer.head is layer.embedding
    layer.embedding.data[1] = 9
    assert layer.row.tolist() == [9] * 4, "still a view"
    assert layer.table.tolist() == [0, 1, 2, 3] and layer.packed.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert layer.product(torch.zeros(5)).tolist() == [3] * 5 and layer.partial(torch.zeros(6)).tolist() == [4] * 6


def test_foreign_memory_and_other_devices_are_left_out() -> None:
    mapped = torch.frombuffer(bytearray(16), dtype=torch.float32)
    assert storages_of([{"a": mapped, "b": torch.ones(2, device="meta"), "c": torch.ones(0)}], CPU) == []


def test_caches_that_layers_refer_to_are_no_weights() -> None:
    layer, cache = Layer(), torch.ones(2, 8)
    layer.kv_cache = (cache[0], cache[1])
    assert HostWeights([layer], runtime(), [cache]).num_bytes == HostWeights([Layer()], runtime()).num_bytes


def test_without_host_memory_the_weights_stay() -> None:
    def none(shape: object, dtype: object) -> torch.Tensor:
        raise MemoryError("no memory")

    layer = Layer()
    given = runtime()
    given.host_buffer = none
    with pytest.raises(ModelError, match=r"182 bytes.*allocated on the host.*level 2"):
        HostWeights([layer], given).offload()
    assert layer.row.tolist() == [4, 5, 6, 7]


def test_waking_up_without_device_memory_can_be_repeated() -> None:
    layer, given, failures = Layer(), runtime(), [MemoryError("full")]

    def synchronize() -> None:
        if failures and not layer.training:
            raise failures.pop()

    given.synchronize = synchronize
    weights = HostWeights([layer], given)
    weights.offload()
    layer.eval()
    with pytest.raises(ModelError, match=r"weights cannot be allocated on the device: full"):
        weights.restore()
    assert layer.embedding.untyped_storage().nbytes() == 0
    weights.restore()
    assert layer.row.tolist() == [4, 5, 6, 7]
