"""KV caches that are not tensors: core passes them through, and the suite uses the backend's methods."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.platform.choose import choose_platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_api import KVLayout, PlatformError, WorkerContext
from mvllm.worker.kv_cache_groups import layer_windows
from mvllm_conformance.attention_cases import CacheHarness, make_layout, make_spec
from mvllm_conformance.suite import test_kvl_layout as kvl
from tests.unit.worker.test_kv_cache_groups import layer


class Arrays:
    """A cache in another library's memory."""

    def __init__(self, keys, values):
        self.keys, self.values = keys.numpy(), values.numpy()

    @property
    def tensors(self):
        return torch.from_numpy(self.keys), torch.from_numpy(self.values)


class ArrayAttention(ReferenceAttention):
    """Keys and values in NumPy arrays."""

    def allocate(self, num_blocks, block_size, device):
        keys, values = super().allocate(num_blocks, block_size, device)
        return Arrays(keys, values)

    def write_kv(self, kv, key, value, metadata):
        super().write_kv(kv.tensors, key, value, metadata)

    def forward(self, query, kv, metadata, sinks=None):
        return super().forward(query, kv.tensors, metadata, sinks)

    def copy_blocks(self, kv, source, destination):
        super().copy_blocks(kv.tensors, source, destination)


class ReadableArrayAttention(ArrayAttention):
    """ArrayAttention with the methods that contract 1.1 requires for caches that are not tensors."""

    def kv_bytes(self, kv):
        return kv.keys.nbytes + kv.values.nbytes

    def fill(self, kv, value):
        kv.keys[:] = kv.values[:] = np.float32(value)

    def read_slots(self, kv, slots):
        return [part.flatten(0, 1)[slots] for part in kv.tensors]


@pytest.fixture(scope="module")
def runtime():
    platform = choose_platform("cpu").platform
    with enter_phase(Phase.WORKER):
        yield platform.init_device(WorkerContext(0, 0, 1, 1, 0, False))


@pytest.fixture
def subject(monkeypatch):
    platform = choose_platform("cpu").platform

    def of(backend):
        monkeypatch.setattr(platform, "attention_backend", backend)
        monkeypatch.setattr(platform, "_cached", None, raising=False)
        return SimpleNamespace(platform=platform, capabilities=platform.capabilities)

    return of


KVL = (
    kvl.test_each_slot_gives_back_the_value_it_was_given,
    kvl.test_a_new_cache_is_finite,
    kvl.test_slots_of_minus_one_store_nothing,
    kvl.test_a_write_touches_no_slot_that_it_was_not_given,
    kvl.test_blocks_are_copied_whole_and_alone,
    kvl.test_attention_over_copied_blocks_is_the_same,
)


@pytest.mark.parametrize("test", KVL, ids=lambda test: test.__name__)
def test_the_suite_tests_caches_that_are_not_tensors(subject, runtime, test):
    platform_under_test = subject(ReadableArrayAttention)
    platform_under_test.capabilities = SimpleNamespace(kv_dtypes=("float32",), mla=False, stores_by_block_table=False)
    test(platform_under_test, runtime, "float32")


def test_missing_backend_methods_are_named(subject, runtime):
    for test in (kvl.test_a_new_cache_is_finite, kvl.test_a_write_touches_no_slot_that_it_was_not_given):
        with pytest.raises(PlatformError, match=r"it is a Arrays.*Implement ArrayAttention\.(read_slots|fill)"):
            test(subject(ArrayAttention), runtime, "float32")


def test_kv_bytes_of_the_backend_is_compared_with_the_layout(subject, runtime):
    class WrongKvBytes(ReadableArrayAttention):
        def kv_bytes(self, kv):
            return super().kv_bytes(kv) // 2

    platform_under_test = subject(WrongKvBytes)
    platform_under_test.capabilities = SimpleNamespace(kv_dtypes=("float32",), mla=False, stores_by_block_table=False)
    with pytest.raises(AssertionError, match="the cache takes"):
        kvl.test_a_cache_takes_the_bytes_that_the_layout_says(platform_under_test, runtime, "float32")


def test_layers_whose_caches_are_opaque_share_none():
    assert layer_windows(
        [layer(9, ReadableArrayAttention), layer(None, ReadableArrayAttention)], torch.device("cpu")
    ) == (
        None,
        None,
    )


# --- the default methods, for tensors


class Arranged(ReferenceAttention):
    """Only its allocations are used."""

    block_sizes = (16, 32)

    def kv_layout(self):
        return KVLayout(self.block_sizes, 1)

    def allocate(self, num_blocks, block_size, device):
        return tuple(torch.zeros(shape) for shape in self.shapes(num_blocks, block_size))


ARRANGEMENTS = {
    "tokens first": lambda n, b: [(n, b, 2, 8)],
    "tokens last, with scales": lambda n, b: [(n, 2, 8, b), (n, 2, b)],
    "keys and values in one": lambda n, b: [(2, n, b, 2, 8)],
    "slots in one dimension": lambda n, b: [(n * b, 2, 8), (n * b, 2, 8)],
    "heads as large as blocks": lambda n, b: [(n, 2, 16, b)],
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_slots_are_found_in_tensors_by_their_shapes(name):
    backend = Arranged(make_spec())
    backend.shapes = ARRANGEMENTS[name]
    kv = backend.allocate(3, 16, torch.device("cpu"))
    slots = torch.arange(48)
    numbered = tuple(torch.arange(part.numel()).view(part.shape) for part in kv)
    for part, read in zip(numbered, backend.read_slots(numbered, slots), strict=True):
        assert read.shape[0] == 48, "slots come first"
        assert sorted(read.flatten().tolist()) == list(range(part.numel())), "each element belongs to one slot"
        part.zero_()
        assert read.any(), "a copy, not a view"


def test_a_written_slot_is_the_one_that_is_read():
    backend = choose_platform("cpu").platform.attention_backend(make_spec())
    runtime = SimpleNamespace(
        device=torch.device("cpu"), step_mark=lambda: None, from_numpy=torch.from_numpy, to_device=lambda x: x
    )
    with enter_phase(Phase.WORKER):
        bench = CacheHarness(backend, runtime, 4, 16)
        assert backend.kv_bytes(bench.kv) == 64 * backend.kv_layout().bytes_per_token
        bench.fill(float("nan"))
        assert all(torch.isnan(part).all() for part in backend.read_slots(bench.kv, torch.arange(64)))
        keys, values = kvl.random_kv(backend, 3)
        bench.write(make_layout([(15, 3)], np.array([[2, 1]], dtype=np.int32), 16), keys, values)
        read = backend.read_slots(bench.kv, torch.tensor([2 * 16 + 15, 16, 17]))
        assert torch.equal(read[0], keys) and torch.equal(read[1], values)


def test_an_unknown_layout_names_the_method_to_implement():
    backend = Arranged(make_spec())
    backend.block_sizes = (16,)
    backend.shapes = lambda n, b: [(n, 2, 16, b)]
    with pytest.raises(PlatformError, match=r"do not show its slots. Implement Arranged\.read_slots"):
        backend.read_slots(backend.allocate(3, 16, torch.device("cpu")), torch.arange(3))


@pytest.mark.parametrize(("dtype", "one"), [(torch.int8, 1), (torch.uint8, 0x38)])
def test_filled_codes_represent_the_value(dtype, one):
    codes, scales = torch.zeros(4, dtype=dtype), torch.zeros(2)
    ReferenceAttention(make_spec()).fill((codes, scales), 0.5)
    assert codes.tolist() == [one] * 4 and scales.tolist() == [0.5, 0.5]
