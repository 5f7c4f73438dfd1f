"""Layers sharded over 1, 2 and 4 ranks compute what the unsharded layer computes."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext, ShardIndex
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import ColumnParallelLinear, HeadShard, QKVLinear, RowParallelLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.pipeline_stage import PipelineStage
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from tests.helpers.paged_driver import make_context
from tests.helpers.thread_ranks import fake_group, run_ranks

SIZES = [1, 2, 4]


def fill(module: nn.Module, checkpoint: dict[str, torch.Tensor]) -> nn.Module:
    """Loads tensors from a dict like the loader; draws missing tensors, the same on all ranks."""
    for part in module.modules():
        for name, target in part.weight_targets() if hasattr(part, "weight_targets") and part is not module else ():
            copy(name, target, checkpoint)
    if hasattr(module, "weight_targets"):
        for name, target in module.weight_targets():
            copy(name, target, checkpoint)
    return module


def copy(name, target, checkpoint) -> None:
    if name not in checkpoint:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        checkpoint[name] = torch.randn(target.source_shape, generator=generator)
    source = checkpoint[name]
    assert source.shape == target.source_shape
    rectangle = source[target.source]
    target.parameter.data[target.destination] = rectangle.t() if target.transpose else rectangle


def on_ranks(size: int, body: Callable[[BuildContext], torch.Tensor]) -> list[torch.Tensor]:
    return run_ranks(size, lambda tp: body(make_context(tp=tp)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_concatenated_column_shards_are_the_whole_output(size: int, transposed: bool) -> None:
    weights, x = {}, torch.randn(3, 8)

    def body(ctx: BuildContext) -> torch.Tensor:
        layer = ColumnParallelLinear(ctx, [("a", 12)], 8, bias=True, transposed=transposed)
        return fill(layer, weights)(x)

    bands = on_ranks(size, body)
    weight = weights["a.weight"].t() if transposed else weights["a.weight"]
    torch.testing.assert_close(torch.cat(bands, dim=-1), x @ weight.t() + weights["a.bias"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_row_shards_sum_to_the_whole_output_with_the_bias_added_once(size: int, transposed: bool) -> None:
    weights, x = {}, torch.randn(3, 8)

    def body(ctx: BuildContext) -> torch.Tensor:
        layer = fill(RowParallelLinear(ctx, "a", 8, 6, bias=True, transposed=transposed), weights)
        return layer(x.chunk(size, dim=-1)[ctx.tp.rank_in_group])

    weight = None
    for output in on_ranks(size, body):
        weight = weights["a.weight"].t() if transposed else weights["a.weight"]
        torch.testing.assert_close(output, x @ weight.t() + weights["a.bias"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_each_rank_gets_its_heads_and_the_key_value_heads_they_use(size: int, num_kv_heads: int, fused: bool) -> None:
    num_heads, head_size, hidden = 4, 3, 8
    names = ("qkv",) if fused else ("q", "k", "v")
    weights, x = {}, torch.randn(5, hidden)

    def body(ctx: BuildContext) -> tuple:
        layer = QKVLinear(ctx, names, hidden, num_heads, num_kv_heads, head_size, bias=True, transposed=fused)
        return layer.heads, fill(layer, weights).split(x)

    results = on_ranks(size, body)
    full = [x @ (weights[f"{n}.weight"].t() if not fused else weights[f"{n}.weight"]) for n in names]
    full = torch.cat([part + weights[f"{n}.bias"] for n, part in zip(names, full, strict=True)], dim=-1)
    q, k, v = (
        part.view(5, -1, head_size)
        for part in full.split((num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size), dim=-1)
    )
    group = num_heads // num_kv_heads
    for rank, (heads, (query, key, value)) in enumerate(results):
        first = rank * num_heads // size
        torch.testing.assert_close(query, q[:, first : first + heads.num_heads])
        for local in range(heads.num_heads):  # every query head uses its key/value head
            mine = local // (heads.num_heads // heads.num_kv_heads)
            torch.testing.assert_close(key[:, mine], k[:, (first + local) // group])
            torch.testing.assert_close(value[:, mine], v[:, (first + local) // group])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [8, 10, 5])
def test_an_indivisible_vocabulary_is_padded_and_the_padding_has_no_effect(size: int, vocab_size: int) -> None:
    weights, ids = {}, torch.arange(vocab_size, dtype=torch.int32)
    hidden = torch.randn(3, 6)

    def body(ctx: BuildContext) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = fill(VocabEmbedding(ctx, "wte", vocab_size, 6), weights)
        head = fill(LMHead(ctx, "lm_head", vocab_size, 6), weights)
        return embedding(ids), head(hidden)

    for embedded, logits in on_ranks(size, body):
        torch.testing.assert_close(embedded, weights["wte.weight"])
        torch.testing.assert_close(logits, hidden @ weights["lm_head.weight"].t())


@pytest.mark.parametrize("size", SIZES)
def test_gate_and_up_of_an_mlp_have_the_same_shard(size: int) -> None:
    weights, x = {}, torch.randn(4, 8)
    outputs = on_ranks(size, lambda ctx: fill(GatedMLP(ctx, "mlp", 8, 12, "silu", bias=True), weights)(x))
    gate, up = (x @ weights[f"mlp.{n}.weight"].t() + weights[f"mlp.{n}.bias"] for n in ("gate_proj", "up_proj"))
    inner = torch.nn.functional.silu(gate) * up
    expected = inner @ weights["mlp.down_proj.weight"].t() + weights["mlp.down_proj.bias"]
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("normalize", [True, False])
def test_moe_equals_a_loop_over_tokens_and_experts(size: int, normalize: bool) -> None:
    weights, x = {}, torch.randn(7, 8)

    def body(ctx: BuildContext) -> torch.Tensor:
        experts = FusedMoE(ctx, "experts", 8, 12, num_experts=5, top_k=2)
        layer = SparseMoeBlock(ctx, "gate", experts, Routing(2, normalize=normalize))
        return fill(layer, weights)(x)

    outputs = on_ranks(size, body)
    expected = torch.zeros_like(x)
    for t, token in enumerate(x):
        chances = torch.softmax(weights["gate.weight"] @ token, dim=-1)
        best, ids = chances.topk(2)
        for chance, e in zip(best / best.sum() if normalize else best, ids.tolist(), strict=True):
            gate, up, down = (weights[f"experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            expected[t] += chance * (down @ (torch.nn.functional.silu(gate @ token) * (up @ token)))
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    shares = [HeadShard.for_shards(8, 2, [ShardIndex(rank, 4)]) for rank in range(4)]
    assert [(s.first_head, s.num_heads) for s in shares] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [(s.first_kv_head, s.num_kv_heads) for s in shares] == [(0, 1), (0, 1), (1, 1), (1, 1)]


LAYERS: dict[str, tuple[Callable[[BuildContext], nn.Module], str]] = {
    "gates": (lambda ctx: ColumnParallelLinear(ctx, [("gate", 8), ("up", 8)], 6, bias=True), "weight"),
    "one matrix of gates": (lambda ctx: ColumnParallelLinear(ctx, [("both", 8), ("both", 8)], 6, bias=False), "weight"),
    "transposed": (lambda ctx: ColumnParallelLinear(ctx, [("a", 8)], 6, bias=True, transposed=True), "bias"),
    "inputs": (lambda ctx: RowParallelLinear(ctx, "a", 8, 6, bias=False), "weight"),
    "heads": (lambda ctx: QKVLinear(ctx, ("q", "k", "v"), 6, 8, 4, 2, bias=True), "weight"),
    "biases of heads": (lambda ctx: QKVLinear(ctx, ("q", "k", "v"), 6, 8, 4, 2, bias=True), "bias"),
    "copied heads": (lambda ctx: QKVLinear(ctx, ("q", "k", "v"), 6, 8, 2, 2, bias=False), "weight"),
    "heads in one matrix": (lambda ctx: QKVLinear(ctx, ("qkv",), 6, 8, 4, 2, bias=False), "weight"),
    "heads by group": (lambda ctx: QKVLinear(ctx, ("qkv",), 6, 8, 2, 2, bias=False, by_group=True), "weight"),
    "vocabulary": (lambda ctx: VocabEmbedding(ctx, "wte", 10, 6), "weight"),
    "head": (lambda ctx: LMHead(ctx, "lm_head", 9, 6), "weight"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("make", "name"), LAYERS.values(), ids=LAYERS.keys())
def test_each_device_of_a_worker_has_the_shard_of_a_rank(
    make: Callable[[BuildContext], nn.Module], name: str, workers: int
) -> None:
    weights: dict[str, torch.Tensor] = {}

    def parameter(rank: int, of: int, num_devices: int) -> tuple[nn.Module, torch.Tensor]:
        ctx = dataclasses.replace(make_context(tp=fake_group("tp", rank, of)), num_devices=num_devices)
        layer = make(ctx)
        layer.get_parameter(name).data.zero_()  # like the loader for unfilled parameters
        return layer, fill(layer, weights).get_parameter(name).data

    alone = [parameter(rank, 4, 1)[1] for rank in range(4)]
    num_devices = 4 // workers
    for worker in range(workers):
        layer, together = parameter(worker, workers, num_devices)
        parts = together.chunk(num_devices, dim=layer.partitions[name])
        for device, part in enumerate(parts):
            torch.testing.assert_close(part, alone[worker * num_devices + device])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(6, 3, 2), (12, 3, 4), (5, 5, 2)])
def test_heads_that_do_not_divide_are_refused(num_heads: int, num_kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match="heads"):
        HeadShard.for_shards(num_heads, num_kv_heads, [ShardIndex(0, size)])


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [(4, 1, [4]), (6, 3, [2, 2, 2]), (10, 4, [2, 3, 3, 2]), (5, 4, [1, 1, 2, 1]), (7, 4, [2, 2, 2, 1]), (3, 2, [2, 1])],
)
def test_layers_are_split_into_stages_with_the_extra_ones_before_the_last(
    num_layers: int, stages: int, expected: list[int]
) -> None:
    dealt = [PipelineStage.for_rank(num_layers, fake_group("pp", rank, stages)) for rank in range(stages)]
    assert [stage.stop - stage.first for stage in dealt] == expected
    assert dealt[0].first == 0 and dealt[-1].stop == num_layers
    assert all(a.stop == b.first for a, b in itertools.pairwise(dealt))
    assert [stage.is_first for stage in dealt] == [True] + [False] * (stages - 1)
    assert [stage.is_last for stage in dealt] == [False] * (stages - 1) + [True]


def test_a_group_of_one_changes_nothing() -> None:
    group = GroupCoordinator.single("tp")
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
    assert group.is_first and group.is_last
    group.close()
