"""Replayed steps give the results of unrecorded ones, for other inputs and steps; which steps are not recorded."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, PlatformError, QuantizedWeight
from mvllm_cpu import kernels, recording
from mvllm_cpu.linear import Linear
from mvllm_cpu.moe import Moe
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.paged_attention import PagedAttention
from mvllm_cpu.quantized_linear import QuantizedLinear
from mvllm_cpu.recording import BlockingKernel
from mvllm_cpu.replay import MOST_ROWS, Replay
from mvllm_cpu.shared_memory_communicator import SharedGroup

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")
needs_shared_memory = pytest.mark.skipif(
    not hasattr(LOADED.library, "mvllm_cpu_shared_exchange"), reason="ranks share no memory on this system"
)

HIDDEN, HEADS, HEAD_SIZE, VOCAB = 64, 2, 32, 50


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block:
    """A transformer block of the platform's kernels, called as layers call them."""

    def __init__(self):
        ops, linear = KernelOps(LOADED.library), Linear(LOADED.library, LOADED.isa)
        self.ops, self.linear, self.calls = ops, linear.linear, 0
        self.table, self.norm = random(VOCAB, HIDDEN, seed=1), random(HIDDEN, seed=2)
        shapes = {"qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "up": (256, HIDDEN), "down": (HIDDEN, 128)}
        self.weights = {name: linear.pack(random(*shape, seed=len(name)) / 8) for name, shape in shapes.items()}
        self.cos_sin = torch.rand(100, HEAD_SIZE) * 2 - 1
        self.attention = PagedAttention(
            AttentionSpec(HEADS, HEADS, HEAD_SIZE, "bfloat16", "bfloat16", scale=HEAD_SIZE**-0.5)
        )
        self.cache = self.attention.allocate(8, 16, torch.device("cpu"))

    def __call__(self, ids, positions, metadata):
        self.calls += 1
        ops, linear = self.ops, self.linear
        x = ops.embedding(ids, self.table)
        residual = x
        for _ in range(3):
            x = (
                ops.rms_norm(x, self.norm, 1e-5)
                if x is residual
                else ops.fused_add_rms_norm(x, residual, self.norm, 1e-5)[0]
            )
            q, k, v = (part.view(len(ids), HEADS, -1) for part in linear(x, self.weights["qkv"], None).chunk(3, dim=1))
            q, k = ops.rotary_embedding(positions, q, k, self.cos_sin)
            self.attention.write_kv(self.cache, k, v, metadata)
            x = linear(self.attention.forward(q, self.cache, metadata), self.weights["out"], None)
            x, residual = ops.fused_add_rms_norm(x, residual, self.norm, 1e-5)
            x = linear(ops.silu_and_mul(linear(x, self.weights["up"], None)), self.weights["down"], None)
        return x

    def make_metadata(self, seq_lens):
        """Attention metadata of requests with one new token each; request r has KV block r."""
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        count = len(seq_lens)
        starts, table = torch.arange(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32).view(-1, 1)
        slots = (table[:, 0] * 16 + lens - 1).int()
        layout = BatchLayout(
            *(count, count, 1, max(seq_lens), 16),
            *(a.numpy() for a in (starts, lens, table, slots)),
            *(starts, lens, table, slots),
        )
        return self.attention.build_metadata(layout)


@pytest.fixture
def block():
    return Block()


@pytest.fixture
def backend():
    return Replay(LOADED.library)


def inputs(block, rows, seed):
    ids = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(seed)).int()
    lens = [1 + (seed + 3 * r) % 16 for r in range(rows)]
    return ids, torch.tensor([n - 1 for n in lens]).int(), block.make_metadata(lens)


def test_a_replay_gives_the_functions_result_without_calling_it(block, backend):
    compiled = backend.compile(block, dynamic=True)
    for rows in (1, 3, 5):
        compiled(*inputs(block, rows, 0))
    calls = block.calls
    found = {(rows, seed): compiled(*inputs(block, rows, seed)) for rows in (5, 1, 3) for seed in (1, 2)}
    assert block.calls == calls == 3
    for (rows, seed), result in found.items():
        assert torch.equal(result, block(*inputs(block, rows, seed)))


def test_threads_may_share_a_function_and_a_backend(block, backend):
    """Two functions of one backend, each called by two threads, also while they are recorded."""
    blocks = [block, Block()]
    expected = [[each(*inputs(each, rows, 1)) for rows in (1, 2, 3)] for each in blocks]
    compiled = [backend.compile(each, dynamic=True) for each in blocks]
    start = threading.Barrier(4)

    def call(index):
        start.wait(120)
        for _ in range(20):
            for rows in (1, 2, 3):
                found = compiled[index](*inputs(blocks[index], rows, 1))
                if not torch.equal(found, expected[index][rows - 1]):
                    return f"other values with {rows} rows"
        return None

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, (0, 1, 0, 1))) == [None] * 4
    assert [each.calls for each in blocks] == [3 + 3] * 2  # recorded once each


def test_keys_and_values_are_stored(block, backend):
    compiled = backend.compile(block, dynamic=True)
    compiled(*inputs(block, 2, 0))
    for tensor in block.cache:
        tensor.zero_()
    compiled(*inputs(block, 2, 1))
    found = [tensor.clone() for tensor in block.cache]
    for tensor in block.cache:
        tensor.zero_()
    block(*inputs(block, 2, 1))
    assert all(map(torch.equal, found, block.cache)) and found[0].any()


def test_results_outlive_the_next_run(block, backend):
    compiled = backend.compile(block, dynamic=True)
    first = [compiled(*inputs(block, 2, seed)) for seed in (0, 1, 2)]
    kept = [result.clone() for result in first]
    compiled(*inputs(block, 2, 3))
    assert all(map(torch.equal, first, kept))


def test_arena_memory_is_reused(block, backend):
    """Intermediate tensors of a layer reuse the memory of the previous layer's."""
    compiled = backend.compile(block, dynamic=True)
    compiled(*inputs(block, 2, 0))
    (program,) = compiled._programs.values()
    one_layer = 2 * 2 * (HIDDEN * 4 + 3 * HIDDEN + 256 + 128)
    assert 0 < program.arena_bytes <= one_layer + 64 * 10


def test_other_strides_and_dtypes_are_recorded_separately(block, backend):
    compiled = backend.compile(block, dynamic=True)
    ids, positions, metadata = inputs(block, 3, 0)
    expected = block(ids, positions, metadata)
    calls = block.calls
    assert torch.equal(compiled(ids, positions, metadata), expected)
    assert torch.equal(compiled(ids.long(), positions, metadata), expected)
    strided = torch.stack([positions, positions], 1)[:, 0]
    assert torch.equal(compiled(ids, strided, metadata), expected)
    assert block.calls == calls + 3
    assert torch.equal(compiled(ids.long(), positions, metadata), expected)
    assert block.calls == calls + 3
    assert torch.equal(compiled(ids, strided, metadata), expected)
    assert block.calls == calls + 3, "a kernel copies the rows"


def test_padded_steps_are_recorded_separately(block, backend):
    """Attention returns zeros for padding rows."""
    query = random(3, HEADS, HEAD_SIZE)
    compiled = backend.compile(lambda x, metadata: block.attention.forward(x, block.cache, metadata), dynamic=True)
    compiled(query, block.make_metadata([1, 2, 3]))
    for _ in range(2):
        found = compiled(query, block.make_metadata([1, 2]))
        assert torch.equal(found, block.attention.forward(query, block.cache, block.make_metadata([1, 2])))
        found.fill_(7)
        del found


def is_never_replayed(block, backend, function):
    """Whether `function` is called each time instead of replayed. Checks its results."""
    compiled = backend.compile(function, dynamic=True)
    results = []
    for seed in (0, 1, 2):
        args = inputs(block, 2, seed)
        before = block.calls
        results.append(compiled(*args))
        assert torch.equal(results[-1], function(*args))
        if block.calls - before < 2:
            return False
    return True


def test_functions_with_torch_operations_are_not_replayed(block, backend):
    assert is_never_replayed(block, backend, lambda *args: block(*args).exp())
    assert is_never_replayed(block, backend, lambda ids, *step: block(ids.abs(), *step))
    assert not is_never_replayed(block, backend, lambda *args: block(*args) + 1)
    assert not is_never_replayed(block, backend, lambda ids, *step: block(ids.clone(), *step))
    assert not is_never_replayed(block, backend, lambda *args: block(*args))


def assert_same_results(block, function, compiled, rows):
    """Checks results and KV cache with enough steps to record, try and replay."""
    with torch.inference_mode():
        for seed in range(4):
            args = inputs(block, rows, seed)
            found, stored = compiled(*args), [part.clone() for part in block.cache]
            assert torch.equal(found, function(*args))
            assert all(map(torch.equal, stored, block.cache))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_norms_per_head_are_recorded(block, backend, rows):
    """Strided heads are read without a copy."""
    norm = random(HEAD_SIZE, seed=9)

    def function(ids, positions, metadata):
        x = block.ops.embedding(ids, block.table)
        q, k, v = (part.view(rows, HEADS, -1) for part in block.linear(x, block.weights["qkv"], None).chunk(3, dim=1))
        q, k = (block.ops.rms_norm(part, norm, 1e-5) for part in (q, k))
        block.attention.write_kv(block.cache, k, v, metadata)
        return block.linear(block.attention.forward(q, block.cache, metadata), block.weights["out"], None)

    compiled = backend.compile(function, dynamic=True)
    assert_same_results(block, function, compiled, rows)
    assert None not in compiled._programs.values()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_copies_in_inference_mode_are_replayed(block, backend, rows):
    """Copies of strided rows, which torch reports as one operation, `reshape`, copy or not, in inference mode."""

    def function(ids, positions, metadata):
        x = block.linear(block.ops.embedding(ids, block.table), block.weights["qkv"], None)
        heads = block.ops.silu_and_mul(x.view(rows, 3, HIDDEN)[:, :2]).view(rows, HEADS, HEAD_SIZE)
        block.attention.write_kv(block.cache, heads, heads, metadata)
        return block.linear(block.attention.forward(heads, block.cache, metadata), block.weights["out"], None)

    compiled = backend.compile(function, dynamic=True)
    assert_same_results(block, function, compiled, rows)
    assert not compiled.refusals


@pytest.mark.parametrize("copy", [torch.Tensor.long, lambda x: torch.from_numpy(x.numpy() * 1)])
def test_temporary_tensors_prevent_replay(block, backend, copy):
    with torch.inference_mode():
        compiled = backend.compile(lambda ids: block.ops.embedding(copy(ids[:, 0]), block.table), dynamic=True)
        compiled(torch.zeros(3, 2, dtype=torch.int32))
    assert list(compiled._programs.values()) == [None]


@pytest.mark.parametrize("kind", ["quantized_linear", "moe"])
def test_kernels_that_programs_cannot_call_prevent_replay(block, backend, kind):
    """The recording is dropped before it is tried: without these kernels it would store wrong keys and values."""
    if kind == "moe":
        moe = Moe(LOADED.library)
        packed = moe.pack((random(2, 64, HIDDEN, seed=3), random(2, HIDDEN, 32, seed=4)))
        chosen = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    else:
        quantized = QuantizedLinear(LOADED.library)
        values = torch.arange(HIDDEN * HIDDEN).view(HIDDEN, HIDDEN).remainder(15).sub(7).to(torch.int8)
        weight = quantized.pack(QuantizedWeight(values, torch.ones(HIDDEN, 1), None, HIDDEN, 4))

    def function(ids, positions, metadata):
        x = block.ops.embedding(ids, block.table)
        x = moe.moe(x, *packed, *chosen) if kind == "moe" else quantized.quantized_linear(x, weight, None)
        heads = block.ops.rms_norm(x, block.norm, 1e-5).view(3, HEADS, HEAD_SIZE)
        block.attention.write_kv(block.cache, heads, heads, metadata)
        return block.linear(block.attention.forward(heads, block.cache, metadata), block.weights["out"], None)

    compiled = backend.compile(function, dynamic=True)
    args = inputs(block, 3, 0)
    found, stored = compiled(*args), [part.clone() for part in block.cache]
    assert torch.equal(found, function(*args))
    assert all(map(torch.equal, stored, block.cache))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_products_are_replayed_by_any_number_of_threads(block, backend, bits, threads):
    """With one row, one parallel region executes several calls. With many rows, each product opens a region."""
    quantized, before = QuantizedLinear(LOADED.library), torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)

    def weight(out_features, in_features):
        size = in_features if bits == 8 else 32
        values = torch.randint(-7, 8, (out_features, in_features), generator=generator, dtype=torch.int8)
        scales = torch.randint(1, 9, (out_features, in_features // size), generator=generator) * 2.0**-9
        return quantized.pack(QuantizedWeight(values, scales, None, size, bits, int8_activations=True))

    gate_up, down, norm = weight(2 * 1024, 768), weight(768, 1024), torch.ones(768, dtype=torch.bfloat16)

    def function(x):
        for _ in range(2):
            x = block.ops.rms_norm(x, norm, 1e-5)
            x = quantized.quantized_linear(quantized.quantized_linear_silu_and_mul(x, gate_up, None), down, None)
        return x

    compiled = backend.compile(function, dynamic=True)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 30):
            for seed in range(3):
                x = random(rows, 768, seed=seed).bfloat16()
                with torch.inference_mode():
                    assert torch.equal(compiled(x), function(x))
        assert None not in compiled._programs.values()
    finally:
        torch.set_num_threads(before)


def test_unrecorded_work_prevents_replay(block, backend):
    """Work outside torch and the kernels, for example in another library, is detected by a different result."""

    def function(*args):
        x = block(*args)
        ctypes.memset(x.data_ptr(), 0x11, 2)
        return x

    assert is_never_replayed(block, backend, function)


def test_a_recording_that_fails_leaves_no_keys_and_values(block, backend):
    """The trial replay stores keys and values without the unrecorded work; they are overwritten."""

    def function(ids, positions, metadata):
        x = block.ops.embedding(ids, block.table)
        ctypes.memset(x.data_ptr(), 0x11, x.nbytes)
        heads = block.ops.rms_norm(x, block.norm, 1e-5).view(3, HEADS, HEAD_SIZE)
        block.attention.write_kv(block.cache, heads, heads, metadata)
        return block.linear(block.attention.forward(heads, block.cache, metadata), block.weights["out"], None)

    compiled = backend.compile(function, dynamic=True)
    args = inputs(block, 3, 0)
    found, stored = compiled(*args), [part.clone() for part in block.cache]
    assert torch.equal(found, function(*args)) and list(compiled._programs.values()) == [None]
    assert all(map(torch.equal, stored, block.cache))


def test_a_function_may_work_in_place(block, backend):
    """Like a later pipeline stage, whose residual stream is the hidden states that it receives."""

    def function(x):
        y = block.ops.silu_and_mul(block.linear(x, block.weights["up"], None))
        return block.ops.fused_add_rms_norm(block.linear(y, block.weights["down"], None), x, block.norm, 1e-5)[0]

    compiled = backend.compile(function, dynamic=True)
    for seed in (0, 1, 2):
        found, expected = random(2, HIDDEN, seed=seed), random(2, HIDDEN, seed=seed)
        assert torch.equal(compiled(found), function(expected)) and torch.equal(found, expected)
    assert None not in compiled._programs.values()


def test_a_result_that_is_a_view_of_a_kernels_output_is_not_replayed(block, backend):
    """The result's memory is smaller than the kernel's output."""
    compiled = backend.compile(lambda x: block.ops.silu_and_mul(x)[:1], dynamic=True)
    compiled(random(3, 8))
    assert list(compiled._programs.values()) == [None]


def test_a_function_may_refuse(block, backend):
    def function(*args):
        recording.refuse("it talks to others")
        return block(*args)

    assert is_never_replayed(block, backend, function)


class Ranks:
    """Two ranks with shared memory, both in this process. The second runs while the first waits."""

    def __init__(self, buffer_bytes=4096):
        self.memory = torch.zeros(2 * (64 + 2 * buffer_bytes), dtype=torch.uint8)
        self.groups = [SharedGroup(self.memory.data_ptr(), 2, buffer_bytes, rank, 0, 0) for rank in range(2)]
        self.stops = 0
        self.pending_input = None
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p)
        self.sum = BlockingKernel(
            LOADED.library, "mvllm_cpu_shared_all_reduce", types, ahead=4, check_peers=self.run_second_rank
        )

    def set_second_rank_input(self, part):
        """Sets the second rank's tensor. It is stored as bytes, because recordings would contain torch's operations."""
        self.part = bytes(part.view(torch.uint8).flatten().tolist())

    def run_second_rank(self):
        """Runs the second rank's all-reduce at every third call, so that the first rank stops several times."""
        self.stops += 1
        if self.stops % 3 == 0:
            buffer = self.pending_input or ctypes.create_string_buffer(self.part, len(self.part))
            group, count = ctypes.byref(self.groups[1]), len(self.part) // 2
            through = self.sum._function(group, ctypes.addressof(buffer), count, 1, None)
            self.pending_input = None if through else buffer

    def all_reduce(self, x):
        """Adds the second rank's tensor to x in place."""
        self.sum(ctypes.byref(self.groups[0]), x.data_ptr(), x.numel(), 1, None)


@needs_shared_memory
@pytest.mark.parametrize(("buffer_bytes", "rounds"), [(4096, 1), (64, 6)])
def test_a_program_that_stops_goes_on_with_the_same_call(block, backend, buffer_bytes, rounds):
    """A late rank stops a program in the middle, also within an all-reduce of several rounds."""
    ranks = Ranks(buffer_bytes)

    def function(ids):
        x = block.ops.embedding(ids, block.table)
        ranks.all_reduce(x)
        x = block.linear(block.ops.rms_norm(x, block.norm, 1e-5), block.weights["out"], None)
        ranks.all_reduce(x)
        return block.linear(x, block.weights["up"], None)

    compiled = backend.compile(function, dynamic=True)
    for seed in (0, 1, 2):
        ids = torch.randint(0, VOCAB, (3,), generator=torch.Generator().manual_seed(seed))
        ranks.set_second_rank_input(random(3, HIDDEN, seed=10 + seed))
        found, stops = compiled(ids), ranks.stops
        assert torch.equal(found, function(ids))
        assert ranks.stops > stops > 0, "nothing was waited for"
    assert None not in compiled._programs.values()
    assert ranks.groups[0].round == 2 * rounds * 7, "one run is recorded, one tried, two replayed, three called"


@needs_shared_memory
def test_an_all_reduce_gets_the_address_of_the_next_weights(block, backend):
    ranks = Ranks()
    ranks.set_second_rank_input(random(3, HIDDEN))

    def function(ids):
        x = block.ops.embedding(ids, block.table)
        ranks.all_reduce(x)
        x = block.linear(block.ops.rms_norm(x, block.norm, 1e-5), block.weights["out"], None)
        x = block.linear(x, block.weights["up"], None)
        ranks.all_reduce(x[:0])
        return x

    compiled = backend.compile(function, dynamic=True)
    compiled(torch.zeros(3, dtype=torch.int64))
    (program,) = compiled._programs.values()
    counts = [len(called.argtypes) for called in (block.ops._embedding, ranks.sum)]
    at = counts[0] + ranks.sum.ahead
    assert program.words[at] == block.weights["out"].data.data_ptr()
    assert program.words[len(program.words) - 1] == 0, "no weights are read after the last sum"


@needs_shared_memory
def test_an_error_ends_a_program(block, backend):
    ranks = Ranks()
    ranks.set_second_rank_input(random(3, HIDDEN))

    def function(ids):
        x = block.ops.embedding(ids, block.table)
        ranks.all_reduce(x)
        return block.linear(x, block.weights["up"], None)

    compiled = backend.compile(function, dynamic=True)
    ids = torch.arange(3)
    expected = compiled(ids)
    (program,) = compiled._programs.values()
    ((number, check_peers),) = program.waits.items()

    def fail():
        raise PlatformError("rank 1 has died")

    program.waits[number] = fail
    with pytest.raises(PlatformError, match="rank 1 has died"):
        compiled(ids)
    program.waits[number] = check_peers
    ranks.groups[0].is_posted = 0
    assert torch.equal(compiled(ids), expected), "the next run begins at the beginning"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_and_products_with_a_number_are_replayed_with_the_bits_of_torch(block, backend, dtype):
    def function(x, y):
        return block.ops.silu_and_mul((x + y) * 0.3) * 7

    compiled = backend.compile(function, dynamic=True)
    for seed in (0, 2, 4):
        x, y = random(3, 38, seed=seed, dtype=dtype), random(3, 38, seed=seed + 1, dtype=dtype)
        assert torch.equal(compiled(x, y), function(x, y))
    assert None not in compiled._programs.values()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y[:1],
        lambda x, y: x + 1,
        lambda x, y: x * y,
        lambda x, y: x.t().mul(2).t(),
    ],
    ids=["broadcast", "number added", "product", "strides"],
)
def test_other_sums_and_products_are_replayed(block, backend, operation):
    def function(x, y):
        return block.ops.silu_and_mul(operation(x, y).bfloat16().contiguous())

    compiled = backend.compile(function, dynamic=True)
    for seed in (0, 2):
        x, y = random(4, 16, seed=seed), random(4, 16, seed=seed + 1)
        assert torch.equal(compiled(x, y), function(x, y))
    assert not compiled.refusals


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y.double(),
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.int() * 3,
    ],
    ids=["other dtype", "alpha", "integers"],
)
def test_sums_and_products_without_a_kernel_are_not_replayed(block, backend, operation):
    def function(x, y):
        return block.ops.silu_and_mul(operation(x, y).bfloat16().contiguous())

    compiled = backend.compile(function, dynamic=True)
    for seed in (0, 2):
        x, y = random(4, 16, seed=seed), random(4, 16, seed=seed + 1)
        assert torch.equal(compiled(x, y), function(x, y))
    assert list(compiled._programs.values()) == [None]


def test_long_steps_are_called(block, backend):
    compiled = backend.compile(lambda x: block.ops.silu_and_mul(x), dynamic=True)
    for rows in (MOST_ROWS, MOST_ROWS + 1):
        x = random(rows, 8)
        assert torch.equal(compiled(x), block.ops.silu_and_mul(x))
    assert len(compiled._programs) == 1


def test_an_error_leaves_no_recording(block, backend):
    def fails(x):
        raise ValueError("on purpose")

    compiled = backend.compile(fails, dynamic=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            compiled(random(2, 8))
    assert not is_never_replayed(block, backend, lambda *args: block(*args))


def test_without_kernels_a_function_is_returned_unchanged():
    def function(x):
        return x

    assert Replay(None).compile(function, dynamic=True) is function


def second_stage(block):
    """A second pipeline stage: the residual stream is an argument, which it modifies."""

    def run(stream, positions, metadata):
        ops, linear = block.ops, block.linear
        x = ops.rms_norm(stream, block.norm, 1e-5)
        q, k, v = (part.view(len(x), HEADS, -1) for part in linear(x, block.weights["qkv"], None).chunk(3, dim=1))
        block.attention.write_kv(block.cache, k, v, metadata)
        x = linear(block.attention.forward(q, block.cache, metadata), block.weights["out"], None)
        return ops.fused_add_rms_norm(x, stream, block.norm, 1e-5)[0]

    return run


def test_an_argument_may_be_written_to(block, backend):
    stage = second_stage(block)
    compiled = backend.compile(stage, dynamic=True)
    for seed in (0, 1, 2):
        _, positions, metadata = inputs(block, 3, seed)
        stream = random(3, HIDDEN, seed=seed)
        found, left = compiled(given := stream.clone(), positions, metadata), block.cache[0].clone()
        expected = stage(other := stream.clone(), positions, metadata)
        assert torch.equal(found, expected) and torch.equal(given, other)
        assert torch.equal(left, block.cache[0]), "keys of another stream"


def test_unrecorded_work_leaves_a_correct_cache(block, backend):
    """Work of another library: torch does not report it, and no kernel of the platform does it."""

    def run(ids, positions, metadata):
        x = block.ops.embedding(ids, block.table)
        values = (ctypes.c_uint16 * x.numel()).from_address(x.data_ptr())
        for i in range(x.numel()):
            values[i] ^= 1 << 15
        key = x.view(len(ids), HEADS, -1)
        block.attention.write_kv(block.cache, key, key, metadata)
        return block.linear(x, block.weights["out"], None)

    given = inputs(block, 2, 0)
    backend.compile(run, dynamic=True)(*given)
    found = block.cache[0].clone()
    run(*given)
    assert torch.equal(found, block.cache[0])
