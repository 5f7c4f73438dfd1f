"""Packed weights in files that several processes map (MVLLM_CPU_SHARED_WEIGHTS)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from mvllm.plugin_api import QuantizedWeight
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm_cpu import kernels, shared_weights
from mvllm_cpu.block_quantized_linear import BlockQuantizedLinear
from mvllm_cpu.linear import Linear
from mvllm_cpu.memory import Pool
from mvllm_cpu.quantized_linear import QuantizedLinear
from mvllm_cpu.shared_weights import Packed

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shared"
    monkeypatch.setenv(shared_weights.VARIABLE, str(path))
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds that are packed; the rest are mapped."""
    packed: list[str] = []
    original = shared_weights.pack

    def counted(kind, facts, sources, pool, fill):
        def counting(memory):
            packed.append(kind)
            return fill(memory)

        return original(kind, facts, sources, pool, counting)

    monkeypatch.setattr(shared_weights, "pack", counted)
    return packed


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def integers() -> QuantizedWeight:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-8, 8, (48, 64), dtype=torch.int8, generator=generator)
    return QuantizedWeight(values, torch.rand(48, 2, generator=generator) + 0.5, None, 32, 4, True)


def dense(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def products() -> list[torch.Tensor]:
    """Products with freshly packed weights of each kind, as a process that starts computes them."""
    linear = Linear(LOADED.library, LOADED.isa)
    blocks, quantized = BlockQuantizedLinear(LOADED.library), QuantizedLinear(LOADED.library)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    gguf = block_quantized_weight((("q4_1", 32), ("q8_0", 16)), 64, False)
    return [
        linear.linear(x, linear.pack(dense()), None),
        linear.linear(x.bfloat16(), linear.pack(dense(torch.bfloat16)), None),
        quantized.quantized_linear(x, quantized.pack(integers()), None),
        blocks.block_quantized_linear(x, blocks.pack(gguf), None),
    ]


def test_a_second_engine_packs_nothing_and_computes_the_same(
    folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = products()
    assert calls == ["linear", "linear", "integers", "blocks"]
    second = products()
    assert len(calls) == 4
    monkeypatch.delenv(shared_weights.VARIABLE)
    for found, again, private in zip(first, second, products(), strict=True):
        assert torch.equal(found, private)
        assert torch.equal(again, private)
    assert len(files(folder)) == 4
    assert all(file.stat().st_mode & 0o077 == 0 for file in files(folder))


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_a_damaged_file_is_replaced(folder: Path, calls: list[str], damage: str) -> None:
    linear = Linear(LOADED.library, LOADED.isa)
    expected = linear.pack(dense()).data.clone()
    (file,) = files(folder)
    contents = file.read_bytes()
    damaged = {"truncated": contents[:-1], "header": b"{" + contents[1:], "empty": b""}[damage]
    file.unlink()  # an engine keeps its mapping
    file.write_bytes(b"[" + damaged[1:] if damage == "header" else damaged)
    assert torch.equal(linear.pack(dense()).data, expected)
    assert len(calls) == 2
    assert file.read_bytes() == contents
    linear.pack(dense())
    assert len(calls) == 2


def test_of_two_writers_at_once_both_map_one_file(folder: Path) -> None:
    meeting = threading.Barrier(2)
    found: list[Packed] = []

    def fill(memory):
        meeting.wait(120)
        return Packed((memory.zeros(1000, torch.float32).add_(1),), (7,))

    def engine() -> None:
        found.append(shared_weights.pack("test", (), (dense(),), Pool(), fill))

    threads = [threading.Thread(target=engine) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = files(folder)
    assert [(packed.numbers, float(packed.tensors[0].sum())) for packed in found] == [((7,), 1000.0)] * 2
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file.name)]
    assert len(mapped) == 2


def test_on_a_full_disk_weights_are_packed_into_private_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    shared = products()
    assert files(folder) == []
    monkeypatch.delenv(shared_weights.VARIABLE)
    for found, private in zip(shared, products(), strict=True):
        assert torch.equal(found, private)


def test_a_dropped_weight_is_unmapped(folder: Path) -> None:
    linear = Linear(LOADED.library, LOADED.isa)
    weight = linear.pack(dense())
    (file,) = files(folder)
    assert file.name in Path("/proc/self/maps").read_text()
    del weight
    assert file.name not in Path("/proc/self/maps").read_text()
