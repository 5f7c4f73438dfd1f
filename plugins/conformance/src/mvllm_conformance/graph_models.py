"""A model of the suite's zoo as graphs, and steps of its requests, for the GRA clauses.

It needs mvllm-graph, which platforms with a graph compiler require.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvllm.extension_api import BuildContext
from mvllm.extension_api.testing import (
    EngineArgs,
    GroupCoordinator,
    ItemInputSpec,
    OpTable,
    load_weights,
    resolve_model_class,
    torch_dtype,
)
from mvllm.plugin_api import (
    AttentionSpec,
    CacheValue,
    GraphCompiler,
    GraphProgram,
    GroupSpec,
    MultiModalModel,
    StepSizes,
)
from mvllm_graph.testing import (
    HEAD,
    MODEL,
    RecordedAttention,
    RecordedGroup,
    TracedModel,
    distinct_inputs,
    recording_providers,
    run_parts,
    to_numpy,
    to_torch,
    trace_model,
)


def trace_checkpoint(
    folder: Path,
    dtype: str,
    operations: Sequence[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    multimodal: MultiModalModel | None = None,
) -> TracedModel:
    """A checkpoint's graphs with these operations; other operations are their definitions.

    With several ranks they are the graphs of one tensor-parallel rank, cut at all collectives. With `multimodal` the
    model takes items.
    """
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype=dtype)
    config = replace(args.create_engine_config().model, multimodal=multimodal)
    backends: dict[AttentionSpec, RecordedAttention] = {}
    context = BuildContext(
        dtype=torch_dtype(dtype),
        device=torch.from_numpy(np.empty(0)).device,
        ops=OpTable.resolve(recording_providers(operations)),
        attention=lambda spec: backends.setdefault(spec, RecordedAttention(spec)),
        tp=RecordedGroup(GroupSpec("tp", tuple(range(world_size)), rank)),
        pp=GroupCoordinator.single("pp"),
        kv_dtype=dtype,
    )
    model = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)(config, context)
    load_weights(model, folder, use_tqdm=False)
    model.after_load()
    return trace_model(model, operations=operations, items=ItemInputSpec.of(multimodal))


@dataclass(frozen=True)
class ItemUnderTest:
    """An item whose rows the positions of one request take, one after the other.

    Attributes:
        rows: [n, width], elements as NumPy arrays of graphs have them.
        request: Number of the request.
        start: Its first position that takes a row.
    """

    rows: np.ndarray
    request: int
    start: int

    def step_inputs(self, owners: np.ndarray, positions: np.ndarray, padding: int) -> dict[str, np.ndarray]:
        """The inputs of a step over these tokens, with so many tokens and rows of padding.

        Its rotary positions are those of an image three columns wide.
        """
        place = positions - self.start
        takes = (owners == self.request) & (place >= 0) & (place < len(self.rows))
        index = np.full(len(positions) + padding, -1, np.int32)
        index[: len(positions)][takes] = np.arange(takes.sum())
        rows = np.zeros((max(1, int(takes.sum())) + padding, self.rows.shape[1]), self.rows.dtype)
        rows[: takes.sum()] = self.rows[place[takes]]
        rope = np.zeros((len(positions) + padding, 3), np.int32)
        rope[: len(positions)] = positions[:, None]
        offsets = np.stack([np.zeros_like(place), place // 3, place % 3], axis=1)
        rope[: len(positions)][takes] = self.start + offsets[takes]
        return {"item_index": index, "item_embeds": rows, "rope_positions": rope}


@dataclass
class GraphModelUnderTest:
    """A program of one model, which computes steps of several requests.

    Request r has the tokens of `token_ids[r]`; its blocks are neighbours. Its state is in slot r.

    Attributes:
        traced: The model's graphs.
        compiler: Makes the program.
        token_ids: The tokens of each request.
        block_size: Tokens per block.
        order: 1 gives weights in the order of the graphs, -1 in the reversed one.
        item: An item of the requests; None for text alone.
        computed: Computed tokens of each request.
    """

    traced: TracedModel
    compiler: GraphCompiler
    token_ids: Sequence[Sequence[int]]
    block_size: int = 16
    order: int = 1
    item: ItemUnderTest | None = None
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    @cached_property
    def program(self) -> GraphProgram:
        """The program, with its weights, and caches of just the blocks that the requests need."""
        program = self.compiler.program(self.traced.graphs)
        for name, tensor in list(self.traced.arrays.items())[:: self.order]:
            array = to_numpy(tensor).copy()
            program.set_weight(name, array)
            if not program.keeps_arrays:
                array.view(np.uint8).fill(0xFF)  # an array is valid only during the call
        program.finish_weights()
        self.allocate(program)
        return program

    def allocate(self, program: GraphProgram, spare_blocks: int = 0) -> None:
        """Allocates caches and states."""
        inputs = distinct_inputs(self.traced.graphs, "cache", "state").values()
        caches = [value for value in inputs if isinstance(value, CacheValue)]
        sizes = [program.kv_layout(cache).block_sizes for cache in caches]
        if sizes:
            self.block_size = next(size for size in sizes[0] if all(size in other for other in sizes))
        program.allocate_caches(self.num_pages * len(self.token_ids) + spare_blocks, self.block_size)
        if len(caches) < len(inputs):
            program.allocate_states(len(self.token_ids))

    @property
    def num_pages(self) -> int:
        """Blocks of the longest request."""
        return -(-max(map(len, self.token_ids)) // self.block_size)

    def restart(self) -> None:
        """Starts all requests again."""
        self.computed = [0] * len(self.token_ids)

    def step(self, lengths: Sequence[int], *, padding: int = 0) -> torch.Tensor:
        """Computes the next tokens of each request; 0 leaves it out.

        Args:
            padding: Tokens, requests and pages of padding.

        Returns:
            float32 [tokens, vocabulary]: the logits of all tokens, in the order of the requests.
        """
        arrays, sizes = self.step_inputs(lengths, padding)
        return self.run(arrays, sizes)[: sum(lengths)]

    def step_inputs(self, lengths: Sequence[int], padding: int) -> tuple[dict[str, np.ndarray], StepSizes]:
        """The inputs of a step, whose requests advance."""
        assert self.program is not None, "the program decides the block size"
        chosen = [r for r, length in enumerate(lengths) if length]
        counts = [lengths[r] for r in chosen]
        pages, width = self.num_pages, self.num_pages + padding
        positions = np.concatenate([np.arange(self.computed[r], self.computed[r] + lengths[r]) for r in chosen])
        owners = np.repeat(chosen, counts)
        token_ids = np.array([self.token_ids[r][p] for r, p in zip(owners, positions, strict=True)])
        slots = (owners * pages + positions // self.block_size) * self.block_size + positions % self.block_size
        table = np.zeros((len(chosen) + padding, width), np.int32)
        table[: len(chosen), :pages] = np.array(chosen)[:, None] * pages + np.arange(pages)
        seq_lens = [self.computed[r] + lengths[r] for r in chosen]
        read = [r if self.computed[r] else -1 for r in chosen]
        prompt_lens = np.array([len(self.token_ids[r]) for r in owners])
        arrays: dict[str, Any] = {
            "token_ids": np.pad(token_ids, (0, padding)),
            "positions": np.pad(positions, (0, padding)),
            "prompt_lens": np.pad(prompt_lens, (0, padding)),
            "query_start_loc": np.concatenate([[0], np.cumsum(counts), [sum(counts)] * padding]),
            "seq_lens": np.pad(seq_lens, (0, padding)),
            "block_table.0": table,
            "slot_mapping.0": np.pad(slots, (0, padding), constant_values=-1),
            "read_slots": np.pad(read, (0, padding), constant_values=-1),
            "write_slots": np.pad(chosen, (0, padding), constant_values=-1),
        }
        for r in chosen:
            self.computed[r] += lengths[r]
        tokens = len(token_ids) + padding
        sizes = StepSizes(tokens, len(chosen) + padding, width, tokens, max(counts), max(seq_lens))
        given = {name: np.ascontiguousarray(array, dtype=np.int32) for name, array in arrays.items()}
        if self.item is not None:
            given |= self.item.step_inputs(owners, positions, padding)
            sizes = replace(sizes, item_rows=len(given["item_embeds"]))
        return given, sizes

    def run(self, arrays: dict[str, np.ndarray], sizes: StepSizes) -> torch.Tensor:
        """Logits of all tokens of a step, padding included."""
        model, head = self.traced.graphs
        wanted = {value.name: arrays[value.name] for value in model.inputs_of("step")}
        (hidden,) = self.program.run(MODEL, wanted, sizes)
        indices = np.arange(sizes.tokens, dtype=np.int32)
        (logits,) = self.program.run(HEAD, {"hidden": hidden, "logits_indices": indices}, sizes)
        return to_torch(self.program.to_host(logits), head.values()[head.outputs[0]].dtype).float()


def step_of_ranks(ranks: Sequence[GraphModelUnderTest], lengths: Sequence[int], padding: int = 0) -> list[torch.Tensor]:
    """As `GraphModelUnderTest.step`, of tensor-parallel ranks in turn; the logits that each of them computes."""
    given, sizes = ranks[0].step_inputs(lengths, padding)
    for other in ranks[1:]:
        other.step_inputs(lengths, padding)
    hidden = _run_ranks(ranks, MODEL, [dict(given) for _ in ranks], sizes)
    indices = np.arange(sizes.tokens, dtype=np.int32)
    logits = _run_ranks(ranks, HEAD, [{"hidden": each, "logits_indices": indices} for each in hidden], sizes)
    dtype = ranks[0].traced.whole[HEAD].outputs[0].dtype
    return [to_torch(each, dtype).float()[: sum(lengths)] for each in logits]


def _run_ranks(
    ranks: Sequence[GraphModelUnderTest], name: str, inputs: Sequence[dict[str, Any]], sizes: StepSizes
) -> list[np.ndarray]:
    """The result of a graph of each rank, whose collectives are computed here."""
    runs = [
        run_parts(rank.traced.whole[name], rank.program, arrays, sizes)
        for rank, arrays in zip(ranks, inputs, strict=True)
    ]
    replies: list[np.ndarray | None] = [None] * len(runs)
    while True:
        asked, results = [], []
        for run, reply in zip(runs, replies, strict=True):
            try:
                asked.append(run.send(reply))  # type: ignore[arg-type]
            except StopIteration as end:
                results += end.value
        if results:
            return results
        node = asked[0][0]
        tensors = [to_torch(array, node.outputs[0].dtype) for _, array in asked]
        found = torch.stack(tensors).sum(0) if node.op == "all_reduce" else torch.cat(tensors, node.attributes["dim"])
        replies = [to_numpy(found).copy() for _ in runs]
