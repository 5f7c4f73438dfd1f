"""Drives one model's `forward` like the engine: paged KV cache, mixed batches, one or several ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mvllm.attention.chunks import ChunkedMetadataBuilder
from mvllm.attention.reference import ReferenceAttention
from mvllm.config.engine_args import EngineArgs
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.ops.registry import OpTable
from mvllm.platform.attention import AttentionBackend, AttentionSpec, BatchLayout
from mvllm.platform.op_provider import OpProvider
from mvllm.platform.state import StateArguments

HOST = torch.device("cpu")


def make_context(
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str | None = None,
    tp: GroupCoordinator | None = None,
    pp: GroupCoordinator | None = None,
    providers: Sequence[OpProvider] = (),
) -> BuildContext:
    """A build context on the host, with reference attention."""
    backends: dict[AttentionSpec, ReferenceAttention] = {}
    return BuildContext(
        dtype=dtype,
        device=HOST,
        ops=OpTable.resolve(providers),
        attention=lambda spec: backends.setdefault(spec, ReferenceAttention(spec)),
        tp=tp or GroupCoordinator.single("tp"),
        pp=pp or GroupCoordinator.single("pp"),
        kv_dtype=kv_dtype or str(dtype).removeprefix("torch."),
    )


def read_config(folder: Path, **settings: object) -> ModelConfig:
    """The ModelConfig of a checkpoint."""
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings)  # type: ignore[arg-type]
    return args.create_engine_config().model


def load_model(folder: Path, ctx: BuildContext | None = None, **settings: object) -> CausalLM:
    """A checkpoint's loaded model."""
    config = read_config(folder, **settings)
    ctx = dataclasses.replace(ctx or make_context(), quantization=quantization_method(config))
    model = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)(config, ctx)
    load_weights(model, folder, use_tqdm=False)
    model.after_load()
    return model


def make_layout(
    query_lens: Sequence[int], seq_lens: Sequence[int], tables: Sequence[Sequence[int]], block_size: int
) -> BatchLayout:
    """The attention metadata of a step: request r computes the last query_lens[r] of seq_lens[r] tokens."""
    width = max(len(table) for table in tables)
    block_table = np.full((len(tables), width), 10**6, dtype=np.int32)  # unspecified entries are out of range
    slots = []
    for r, table in enumerate(tables):
        block_table[r, : len(table)] = table
        positions = range(seq_lens[r] - query_lens[r], seq_lens[r])
        slots += [table[p // block_size] * block_size + p % block_size for p in positions]
    host = {
        "query_start_loc": np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        "seq_lens": np.array(seq_lens, dtype=np.int32),
        "block_table": block_table,
        "slot_mapping": np.array(slots, dtype=np.int32),
    }
    return BatchLayout(
        num_requests=len(tables),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
        **host,
        **{f"{name}_device": torch.from_numpy(array) for name, array in host.items()},
    )


@dataclass
class Sequence_:
    """A request: its progress, its blocks, its state slot and the length of its prompt."""

    prompt_len: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = 0


class PagedDriver:
    """Runs steps of one model (or of the stages of a pipeline, one after the other) on the host.

    Args:
        stages: The model, or its pipeline stages in order.
        block_size: Tokens per block.
        num_blocks: Blocks in the cache; allocated in a shuffled order.
        num_slots: State slots, which hold NaN at first; likewise.
    """

    def __init__(
        self, *stages: CausalLM, block_size: int = 8, num_blocks: int = 256, seed: int = 0, num_slots: int = 16
    ) -> None:
        self.stages = stages
        self.block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._free_slots = random.Random(seed).sample(range(num_slots), num_slots)
        self._builders: dict[Hashable, AttentionBackend | ChunkedMetadataBuilder] = {}
        self._allocate(num_blocks, num_slots)

    def _allocate(self, num_blocks: int, num_slots: int) -> None:
        block_size = self.block_size
        for stage in self.stages:
            for layer in stage.attention_layers():
                layer.kv_cache = layer.backend.allocate(num_blocks, block_size, HOST)
                chunk = layer.chunk_size
                builder = layer.backend if chunk is None else ChunkedMetadataBuilder(layer.backend, chunk)
                self._builders[layer.metadata_key] = builder
            for state_layer in stage.state_layers():
                state_layer.state = state_layer.backend.allocate(num_slots, HOST)
                state_layer.backend.fill(state_layer.state, torch.nan)

    def add(self, prompt_len: int) -> Sequence_:
        """Adds a request."""
        return Sequence_(prompt_len, slot=self._free_slots.pop())

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Sequence_, Sequence[int]]]) -> list[torch.Tensor]:
        """Computes the given tokens of each request; returns each request's logits [tokens, vocab_size]."""
        for sequence, tokens in work:
            needed = -(-(sequence.num_computed + len(tokens)) // self.block_size)
            while len(sequence.blocks) < needed:
                sequence.blocks.append(self._free.pop())
        lens = [len(tokens) for _, tokens in work]
        layout = make_layout(
            lens,
            [s.num_computed + len(tokens) for s, tokens in work],
            [s.blocks for s, _ in work],
            self.block_size,
        )
        ids = torch.tensor([t for _, tokens in work for t in tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(s.num_computed, s.num_computed + n) for (s, _), n in zip(work, lens)]).int()
        prompt_lens = torch.tensor([s.prompt_len for (s, _), n in zip(work, lens) for _ in range(n)], dtype=torch.int32)
        slots = StateArguments(
            layout.query_start_loc_device,
            torch.tensor([s.slot if s.num_computed else -1 for s, _ in work], dtype=torch.int32),
            torch.tensor([s.slot for s, _ in work], dtype=torch.int32),
            layout.max_query_len,
        )
        logits = self._run(ids, positions, prompt_lens, layout, slots)
        for sequence, tokens in work:
            sequence.num_computed += len(tokens)
        return list(logits.split(lens))

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor,
        layout: BatchLayout,
        slots: StateArguments,
    ) -> torch.Tensor:
        """Logits of all tokens of a step."""
        metadata = {key: builder.build_metadata(layout) for key, builder in self._builders.items()}
        hidden = None
        for stage in self.stages:
            hidden = stage(ids, positions, ForwardStep(metadata, prompt_lens, state_metadata=slots), hidden)
        assert hidden is not None
        return self.stages[-1].compute_logits(hidden)
