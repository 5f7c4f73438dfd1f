"""The encoder cache of a rank: batches, failures of single items, and what models with cross-attention get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.messages.multimodal import ArrayData, EncoderInput
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.multimodal.item_processor import array_data
from mvllm.ops.dtypes import dtype_name
from mvllm.worker.encoder_runner import EncoderRunner
from mvllm.worker.item_rows import EmbeddingRows, StepItems
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime, make_builder, make_new, make_rows


class Doubler(ItemEncoder):
    """Twice the features; negative ones fail, and those above 100 find no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        self.batches.append(len(items))
        values = torch.cat([item["x"] for item in items])
        if values.max() > 100:
            raise MemoryError
        if values.min() < 0:
            raise IndexError("negative")
        return list((2 * values).split([len(item["x"]) for item in items]))


def make_runner(num_ranks: int = 1, **multimodal: object) -> EncoderRunner:
    config = make_config()
    config = replace(
        config,
        model=replace(config.model, dtype="float32", multimodal=MultiModalModel({"image": 1}, embedding_width=3)),
        multimodal=MultiModalConfig(**multimodal),  # type: ignore[arg-type]
    )
    tp, pp = GroupCoordinator.single("tp"), GroupCoordinator.single("pp")
    runner = EncoderRunner(config, HostRuntime(), tp, pp)
    runner._num_ranks = num_ranks
    return runner


def item(name: str, rows: list[float], num_encoded: int | None = None) -> EncoderInput:
    values = np.repeat(np.array(rows, dtype=np.float32)[:, None], 3, axis=1)
    features = {"x": ArrayData("float32", list(values.shape), values.tobytes())}
    return EncoderInput(name.encode() * 32, "image", num_encoded or len(rows), features)


def gather(runner: EncoderRunner, *rows: EmbeddingRows) -> tuple[list[float], dict[int, str]]:
    items = StepItems(np.arange(sum(each.stop - each.start for each in rows)), list(rows), [], {})
    table = make_rows()
    plan = SchedulerOutput(0, new_requests=[make_new(0, [1, 2], [0])], rows=[0], num_scheduled_tokens=[2])
    table.apply_plan(plan)
    tensors = runner.tensors(items, make_builder(table).build(plan))
    assert tensors.item_embeds is not None
    return tensors.item_embeds[:, 0].tolist(), items.errors


def test_items_are_encoded_together_and_their_rows_gathered() -> None:
    runner, encoder = make_runner(), Doubler()
    runner.encode(encoder, [item("a", [1, 2, 3]), item("b", [4, 5])])
    assert encoder.batches == [2] and runner.pop_seconds() > 0 and runner.pop_seconds() == 0
    found = gather(runner, EmbeddingRows(b"b" * 32, 1, 2, 0), EmbeddingRows(b"a" * 32, 0, 2, 1))
    assert found == ([10, 2, 4], {})
    runner.free(SchedulerOutput(1, freed_encoder_outputs=[b"a" * 32]))
    assert gather(runner, EmbeddingRows(b"a" * 32, 0, 1, 3))[1].keys() == {3}


def test_a_failing_item_fails_alone() -> None:
    runner, encoder = make_runner(), Doubler()
    runner.encode(encoder, [item("a", [1]), item("b", [-1]), item("c", [200]), item("d", [1], num_encoded=2)])
    assert encoder.batches == [4, 1, 1, 1, 1]
    values, errors = gather(runner, *(EmbeddingRows(name.encode() * 32, 0, 1, i) for i, name in enumerate("abcd")))
    assert values[0] == 2 and errors.keys() == {1, 2, 3}
    assert errors[1] == "An item of modality 'image' cannot be encoded: negative."
    assert "does not fit into the device's memory" in errors[2] and "(2, 3)" in errors[3]
    runner.encode(encoder, [item("b", [7])])
    assert gather(runner, EmbeddingRows(b"b" * 32, 0, 1, 0)) == ([14], {})


def test_with_other_ranks_a_lack_of_memory_fails_the_step() -> None:
    with pytest.raises(MemoryError):
        make_runner(num_ranks=2).encode(Doubler(), [item("a", [200])])


def test_models_with_cross_attention_get_the_results_of_each_request() -> None:
    runner, table = make_runner(), make_rows()
    runner.encode(Doubler(), [item("a", [1, 2]), item("b", [3])])
    plan = SchedulerOutput(
        0,
        new_requests=[make_new(row, [1, 2], [row]) for row in range(3)],
        rows=[0, 1, 2],
        num_scheduled_tokens=[2, 2, 2],
    )
    table.apply_plan(plan)
    items = StepItems(np.empty(0, np.int64), [], [], {0: [b"a" * 32, b"b" * 32], 2: [b"x" * 32]})
    tensors = runner.tensors(items, make_builder(table).build(plan))
    assert tensors.cross_inputs is not None and tensors.query_start_loc is not None
    assert [None if each is None else each[:, 0].tolist() for each in tensors.cross_inputs] == [[2, 4, 6], None, None]
    assert tensors.query_start_loc.tolist() == [0, 2, 4, 6] and items.errors.keys() == {2}


def test_the_cache_counts_its_largest_size() -> None:
    assert make_runner(encoder_cache_tokens=1000).max_cache_bytes == 1000 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_that_the_processor_has_rounded_are_those_that_the_worker_would_round(dtype: torch.dtype) -> None:
    runner = make_runner()
    runner._dtype = dtype
    values = 300 * torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(1))
    sent = {name: array_data(values, name) for name in (dtype_name(dtype), "float32")}
    rounded, whole = (
        runner._upload(EncoderInput(b"", "image", 7, {"x": data, "n": array_data([3])})) for data in sent.values()
    )
    assert torch.equal(rounded["x"], values.to(dtype)) and torch.equal(whole["x"], rounded["x"])
    assert rounded["n"].tolist() == [3]
    assert len(sent[dtype_name(dtype)].data) == values.numel() * dtype.itemsize
