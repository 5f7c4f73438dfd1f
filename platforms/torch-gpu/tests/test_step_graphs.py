"""Replayed steps give the function's results; steps that core did not mark run eagerly."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mvllm.plugin_api import PlatformError, StateArguments, StepKind
from mvllm_torch_gpu import step_graphs
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE, decode_sizes, mixed_sizes, policy
from mvllm_torch_gpu.step_graphs import TABLE_TOKENS, GraphBlockTables, StepGraphBackend

HostGraphs = importlib.import_module("platforms.torch-gpu.tests.host_graphs").HostGraphs

BLOCK = 4
CACHE = torch.arange(4000.0)


def make_metadata(rows=4, pages=2, query_len=1, shift=0, real=None, capture=True):
    """A step's tables: request r has r + 1 + shift tokens; rows from `real` on are padding."""
    real = rows if real is None else real
    lens = torch.tensor([min(r + 1 + shift, pages * BLOCK) if r < real else 0 for r in range(rows)], dtype=torch.int32)
    table = (torch.arange(rows * pages, dtype=torch.int32).view(rows, pages) * 7 + shift) % 500
    starts = torch.arange(rows + 1, dtype=torch.int32).clamp(max=real) * query_len
    slots = torch.arange(rows * query_len, dtype=torch.int32) + shift
    kind = StepKind.DECODE if query_len == 1 else StepKind.MIXED
    return PagedMetadata(starts, lens, table, slots, query_len, int(lens.max()), BLOCK, kind, capture)


def tokens(rows=4, shift=0):
    return torch.arange(rows, dtype=torch.int32) * 3 + shift


class Model:
    """A function that reads all inputs of a step, and for each request the cache at its tokens' slots.

    Attributes:
        calls: Number of calls of its Python code.
    """

    def __init__(self):
        self.calls = 0

    def __call__(self, token_ids, positions, prompt_lens, intermediate, *metadata):
        self.calls += 1
        hidden = token_ids.float() + 10 * positions.float()
        if intermediate is not None:
            hidden = hidden + intermediate.sum(1)
        for step in metadata:
            place = torch.arange(step.pages * step.block_size)
            slots = step.block_table[:, place // step.block_size] * step.block_size + place % step.block_size
            visible = place < step.seq_lens[:, None]
            read = torch.where(visible, CACHE[torch.where(visible, slots, 0)], 0.0).sum(1)
            hidden = hidden + read[: len(hidden)] + 1000 * step.slot_mapping + 0.5 * step.query_start_loc[1:]
        return hidden[:, None].repeat(1, 2)


@pytest.fixture(autouse=True)
def without_gradients():
    """Core runs its steps in inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture
def graphs():
    return HostGraphs()


TABLE = 64
"""Blocks of a sequence that fit a graph's table here."""


def compiled(function, graphs, **options):
    options = {"table_tokens": TABLE * BLOCK, **options}
    return StepGraphBackend(lambda: graphs, "test", **options).compile(function, dynamic=True)


def step_arguments(rows=4, pages=2, shift=0, **of_metadata):
    return (
        tokens(rows, shift),
        tokens(rows, 2 * shift),
        None,
        None,
        make_metadata(rows, pages, shift=shift, **of_metadata),
    )


def test_replays_read_each_steps_own_inputs(graphs):
    model = Model()
    function = compiled(model, graphs)
    for shift in range(5):
        assert torch.equal(function(*step_arguments(shift=shift)), Model()(*step_arguments(shift=shift)))
    assert (graphs.captures, graphs.replays) == (1, 5)
    assert model.calls == 2, "Python runs when a size is rehearsed and captured, and then no more"


def test_each_size_has_one_graph(graphs):
    function = compiled(Model(), graphs)
    for rows, shift in ((4, 0), (8, 1), (4, 2), (8, 3), (1, 4)):
        assert torch.equal(function(*step_arguments(rows, shift=shift)), Model()(*step_arguments(rows, shift=shift)))
    assert graphs.captures == 3


def test_rows_of_padding_are_replayed_like_others(graphs):
    function = compiled(Model(), graphs)
    for real in (8, 5, 7):
        given = step_arguments(8, shift=real, real=real)
        assert torch.equal(function(*given), Model()(*given))
    assert graphs.captures == 1


def test_wider_block_tables_are_captured_again_and_narrower_ones_are_not(graphs):
    function = compiled(Model(), graphs)
    for number, pages in enumerate((1, 64, 3, 65, 200, 2)):
        given = step_arguments(pages=pages, shift=number * 3)
        assert torch.equal(function(*given), Model()(*given))
    assert graphs.captures == 2
    assert [GraphBlockTables(256).width(pages, BLOCK) for pages in (1, 64, 65, 512, 513)] == [64, 64, 512, 512, 4096]


def test_sequences_up_to_100k_tokens_share_one_table_width():
    tables = GraphBlockTables(TABLE_TOKENS)
    for block_size in (8, 16, 64, 256):
        assert tables.width(1, block_size) == tables.width(100_000 // block_size, block_size) == 2**17 // block_size


def test_graphs_share_block_tables_and_more_requests_do_not_move_them(graphs):
    tables = GraphBlockTables(TABLE * BLOCK)
    large, small, larger = (tables.buffer_for(4, make_metadata(rows)) for rows in (8, 4, 16))
    assert small.data_ptr() == large.data_ptr() != larger.data_ptr()
    assert tables.buffer_for(5, make_metadata(4)).data_ptr() != small.data_ptr(), "each of a step's tables has its own"
    function = compiled(Model(), graphs)
    for number, rows in enumerate((4, 8, 4, 2, 16, 8, 4)):
        given = step_arguments(rows, pages=1 + 5 * number, shift=number)
        assert torch.equal(function(*given), Model()(*given))
    assert graphs.captures == 4


def test_a_steps_inputs_are_copied_in_two_launches(graphs, monkeypatch):
    capture = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda step: [capture(step), lambda: None][1])  # replays copy, too
    function = compiled(Model(), graphs)
    for rows in (1, 4):  # a block table of one row may differ in its stride only
        function(*step_arguments(rows))
        with _Counted() as counted:
            function(*step_arguments(rows, shift=1))
        assert sorted(counted.copies) == [1, 5], "whatever lies alike together, and the table"


class _Counted(TorchFunctionMode):
    """Records the number of tensors in each copy call of `_copy`; each call is a launch on a device."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            self.copies.append(1)
        if function is torch._foreach_copy_:
            self.copies.append(len(args[0]))
            assert all(a.stride() == b.stride() and a.dtype == b.dtype for a, b in zip(*args[:2], strict=True))
        return function(*args, **(kwargs or {}))


def test_graphs_of_all_sizes_share_one_result_tensor(graphs):
    function = compiled(Model(), graphs)
    found = {function(*step_arguments(rows, shift=rows)).data_ptr() for rows in (4, 8, 4, 1)}
    assert len(found) == 1


def test_the_head_is_captured_and_reads_the_models_result_in_place(graphs):
    backend = StepGraphBackend(lambda: graphs, "test", table_tokens=TABLE * BLOCK)
    model = backend.compile(Model(), dynamic=True)
    kept = torch.zeros(9)

    def select(hidden, indices, rows):
        chosen = hidden.index_select(0, indices)[:, 0]
        if rows is not None:
            kept.index_copy_(0, rows.long(), chosen)
        return torch.stack((chosen, -chosen))

    head = backend.compile_head(select)
    for number, rows in enumerate((4, 8, 4, 8)):
        given = step_arguments(rows, shift=number)
        indices, stored = torch.arange(rows).flip(0), torch.arange(rows, dtype=torch.int32)
        hidden = model(*given)
        expected = Model()(*given)[:, 0].flip(0)
        with _Counted() as counted:
            assert torch.equal(head(hidden, indices, stored), torch.stack((expected, -expected)))
        assert torch.equal(kept[:rows], expected)
    assert (graphs.captures, graphs.replays) == (4, 8)
    assert len(hidden) == 8 and 2 not in counted.copies, "indices and rows have different dtypes; hidden is not copied"
    other = torch.full((8, 2), 3.0)
    assert torch.equal(head(other, indices, None)[0], torch.full((8,), 3.0)), "results of eager runs are copied"


def test_a_function_may_write_to_its_arguments(graphs):
    def model(token_ids, step):
        return token_ids.add_(step.seq_lens).float()[:, None]

    function = compiled(model, graphs)
    for shift in (0, 3, 5):
        assert torch.equal(
            function(tokens(4, shift), make_metadata()), (tokens(4, shift) + make_metadata().seq_lens).float()[:, None]
        )


def test_hidden_states_of_an_earlier_stage_and_several_tables_are_inputs(graphs):
    function = compiled(Model(), graphs)
    for shift in (0, 2):
        hidden = torch.full((4, 3), float(shift))
        given = (
            tokens(),
            tokens(),
            tokens(),
            hidden,
            make_metadata(shift=shift),
            make_metadata(pages=5, shift=shift + 1),
        )
        assert torch.equal(function(*given), Model()(*given))
    assert graphs.captures == 1


@pytest.mark.parametrize(
    "given",
    [
        (tokens(8), tokens(8), None, None, make_metadata(4, query_len=2, capture=False)),
        (tokens(4), tokens(4), None, None, make_metadata(4, capture=False)),
        (tokens(4), tokens(4), None, None),  # no tables, so it is unknown whether it is marked
        (torch.zeros(LARGEST_CAPTURE + 16, dtype=torch.int32),) * 2 + (None, None, make_metadata(LARGEST_CAPTURE + 16)),
        (tokens(4), tokens(4), None, None, make_metadata(4), "another backend's metadata"),
    ],
    ids=["unmarked-prompts", "unmarked-decodes", "no-tables", "large", "foreign-metadata"],
)
def test_other_steps_run_eagerly(graphs, given):
    seen = []
    function = compiled(lambda *args: seen.append(args) or "done", graphs)
    assert function(*given) == "done"
    assert graphs.captures == 0 and all(a is b for a, b in zip(seen[0], given, strict=True))


@pytest.mark.parametrize(
    "refusal",
    [
        {"refuses": "it waits for the device"},
        {"refuses_capture": torch.OutOfMemoryError("no room for a graph")},
    ],
    ids=["forbid_synchronization", "capture"],
)
def test_a_step_that_cannot_be_captured_runs_eagerly_and_is_not_tried_in_every_step(refusal, caplog):
    graphs, model = HostGraphs(**refusal), Model()
    function = compiled(model, graphs)
    logging.getLogger("mvllm").propagate = True
    with caplog.at_level(logging.WARNING):
        for shift in range(3):
            assert torch.equal(function(*step_arguments(shift=shift)), Model()(*step_arguments(shift=shift)))
    assert graphs.captures == 0 and graphs.replays == 0
    assert model.calls <= 2 + 3
    warnings = [record.getMessage() for record in caplog.records if "without a graph" in record.getMessage()]
    assert len(warnings) == 1 and "Decode steps of 4 tokens" in warnings[0]


@pytest.mark.parametrize(
    "error",
    [
        PlatformError("The step cannot be captured in a graph: another thread made a call"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_capture_that_failed_is_tried_again_without_another_run_of_the_step(error, monkeypatch):
    monkeypatch.setattr(step_graphs, "FIRST_RETRY", 3)
    monkeypatch.setattr(step_graphs, "RETRY_FACTOR", 2)
    graphs, model = HostGraphs(refuses_capture=error), Model()
    function = compiled(model, graphs)

    def step(shift):
        given = step_arguments(shift=shift)
        assert torch.equal(function(*given), Model()(*given))

    tries = []
    for number in range(3 + 6 + 1):
        before = graphs.tries
        step(number)
        tries += [number] * (graphs.tries - before)
    assert tries == [0, 3, 9]
    graphs.permit()
    calls = model.calls
    for number in range(14):
        step(number)
    assert (graphs.captures, graphs.replays) == (1, 3)
    assert model.calls - calls == 11 + 1, "11 steps without a graph, and the capture itself"


def test_mixed_and_verifying_steps_are_captured_by_kind_and_shape(graphs):
    def model(token_ids, positions, prompt_lens, intermediate, step):
        return (token_ids + positions + step.slot_mapping)[:, None].float() * (step.max_query_len + len(step.seq_lens))

    function = compiled(model, graphs)
    for number, (requests, query_len) in enumerate([(4, 4), (8, 2), (4, 4), (8, 2), (2, 2)]):
        rows = tokens(requests * query_len, number)
        given = rows, rows * 2, None, None, make_metadata(requests, query_len=query_len, shift=number)
        assert torch.equal(function(*given), model(*given))
    assert graphs.captures == 3 and graphs.replays == 5


@pytest.mark.parametrize("with_attention", [False, True])
def test_a_captured_step_advances_each_state_once_and_reads_the_slots_of_its_own_step(graphs, with_attention):
    states = torch.zeros(6 + 1)

    def model(token_ids, *rest):
        slots = rest[-1]
        before = torch.where(slots.read_slots < 0, 0.0, states[slots.read_slots.long()])
        states[slots.write_slots.long()] = 2 * before + token_ids
        return (before + token_ids)[:, None].repeat(1, 2)

    def step(read, write, shift):
        attention = [make_metadata(shift=shift)] if with_attention else []
        starts, read, write = (torch.tensor(x, dtype=torch.int32) for x in (range(5), read, write))
        return tokens(shift=shift), *attention, StateArguments(starts, read, write, 1, capture=True)

    function, steps = compiled(model, graphs), (([-1, -1, 2, -1], [0, 1, 2, -1]), ([0, 1, 2, 0], [0, 3, 2, 4]))
    for shift, slots in enumerate((*steps, *steps)):
        before = states.clone()
        expected = model(*step(*slots, shift))
        after = states.clone()
        states.copy_(before)
        assert torch.equal(function(*step(*slots, shift)), expected)
        assert torch.equal(states[:-1], after[:-1])
    assert (graphs.captures, graphs.replays) == (1, 4)


def test_errors_of_the_function_are_raised_unchanged(graphs):
    def model(token_ids, step):
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        compiled(model, graphs)(tokens(), make_metadata())


@pytest.mark.parametrize("query_len", [1, 2])
def test_the_error_of_a_step_without_memory_contains_the_free_memory(query_len):
    graphs = HostGraphs()

    def model(token_ids, step):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB ...")

    function = compiled(model, graphs, out_of_memory=lambda: "0.10 of 80.00 GiB are free")
    with pytest.raises(MemoryError, match=r"0\.10 of 80\.00 GiB"):
        function(tokens(4 * query_len), make_metadata(4, query_len=query_len))


def test_a_function_is_fused_before_it_is_captured(graphs):
    fused = []

    def fuse(function, dynamic):
        fused.append(dynamic)
        return lambda *args: function(*args) + 1

    function = compiled(Model(), graphs, fuse=fuse)
    for shift in (0, 1):
        given = step_arguments(shift=shift)
        assert torch.equal(function(*given), Model()(*given) + 1)
    assert fused == [True] and graphs.captures == 1


def test_the_cache_key_contains_the_version():
    keys = {StepGraphBackend(HostGraphs, version).cache_key() for version in ("graphs-2.13.0", "inductor-2.13.0")}
    assert (
        len(keys) == 2
        and StepGraphBackend(HostGraphs, "x").cache_key() == StepGraphBackend(HostGraphs, "x").cache_key()
    )


# ---------------------------------------------------------------------------------------------------------------- sizes


def test_a_decode_step_is_padded_to_a_captured_size():
    shapes = policy()
    assert shapes.tokens == shapes.requests and shapes.pages is None and shapes.capture.decode == decode_sizes()
    for requests in range(1, LARGEST_CAPTURE + 1):
        assert (
            shapes.capture.shape_of(StepKind.DECODE, requests, requests, 0)
            == (shapes.pad(requests, shapes.requests),) * 2
        )
        padded = shapes.pad(requests, shapes.requests)
        assert padded in decode_sizes() and padded - requests <= max(7, padded // 16)


def test_steps_with_prompt_tokens_have_few_shapes_which_are_among_the_buckets():
    shapes = policy()
    assert len(mixed_sizes()) <= 40
    assert all(tokens in shapes.tokens and requests in shapes.requests for tokens, requests in mixed_sizes())
    for size in range(2, LARGEST_CAPTURE + 1):
        for requests in {1, size // 2, size - 1}:
            tokens_of_shape, requests_of_shape = shapes.capture.shape_of(StepKind.MIXED, size, max(1, requests), 0)
            assert size <= tokens_of_shape <= max(16, 2 * size) and requests <= requests_of_shape <= tokens_of_shape


def test_verifying_steps_of_up_to_512_tokens_are_captured():
    capture = policy().capture
    assert capture.shape_of(StepKind.VERIFY, 60, 33, 3) == (48 * 4, 48)
    assert capture.shape_of(StepKind.VERIFY, 500, 100, 4) is None, "112 requests have 560 tokens"


@pytest.mark.parametrize("tokens_of_step", [513, 2048, 8192, 8193, 100_000, 4_000_000])
def test_padding_of_prompts_stays_below_a_sixteenth(tokens_of_step):
    padded = policy().pad(tokens_of_step, policy().tokens)
    assert tokens_of_step <= padded <= tokens_of_step * 17 / 16


def test_the_largest_configurable_step_has_a_size():
    assert policy().pad(1 << 22, policy().tokens) >= 1 << 22
    assert len(policy().tokens) < 400
