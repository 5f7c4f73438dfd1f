"""Models on platforms with a graph compiler: tracing, hand-over of weights, and the forward pass through the program.

The model is built on the host without weights, traced, and compiled by the platform. Then the checkpoint is loaded, a
module at a time: its arrays are given to the program and their memory on the host is freed (graph_weights.py). Hidden
states and logits come back as host tensors, so everything after the forward pass is the same as on other platforms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from mvllm.extension_api import ModelError
from mvllm.extension_api.models import torch_dtype
from mvllm.extension_api.worker import (
    GroupCoordinator,
    ItemInputSpec,
    LoRAMapping,
    LoRAModelManager,
    StepForward,
    StepInputs,
    StepItemTensors,
    out_of_memory_as,
)
from mvllm.plugin_api import DeviceArray, GraphCompiler, GraphProgram, ShapePolicy, StepSizes, TokenSpace
from mvllm_graph.arrays import largest_of_rows, to_numpy, to_torch
from mvllm_graph.missing_operations import check_translated
from mvllm_graph.parts import distinct_inputs
from mvllm_graph.run_parts import run_graph
from mvllm_graph.trace import HEAD, MODEL, GraphAdapters, head_of, trace_model
from mvllm_graph.worker.adapters import AdapterArrays, adapter_slots
from mvllm_graph.worker.item_inputs import ItemInputs
from mvllm_graph.worker.state_passes import passes_of
from mvllm_graph.worker.weights import release

if TYPE_CHECKING:
    from mvllm.extension_api import CausalLM

_KEPT_SIZES = 64
"""Numbers of rows of logits for which the inputs of the head are kept."""


class GraphModel:
    """A model as a program of the platform.

    Args:
        model: The loaded model. Its arrays move to the program.
        compiler: The platform's compiler.
        generates: Whether logits are computed.
        tp: The tensor-parallel ranks.
        lora: The model's LoRA adapters; None without LoRA.
        items: The items that prompts may have; None for text alone.
        shapes: The platform's buckets.
        is_static: Whether the platform has static shapes.
        load: Loads a model without weights, when the program can take them; None for a loaded one.

    Attributes:
        program: The program.
        graphs: The traced graphs.
        arrays: The model's tensors that the graphs read, by their names.
        kept_values: The caches and states of all graphs.

    Raises:
        ConfigError, PlatformError: The model has an operation that graphs, or the compiler, do not have.
        ModelError: The weights do not fit on the device.
    """

    def __init__(
        self,
        model: CausalLM,
        compiler: GraphCompiler,
        tp: GroupCoordinator,
        lora: LoRAModelManager | None = None,
        *,
        generates: bool,
        items: ItemInputSpec | None = None,
        shapes: ShapePolicy | None = None,
        is_static: bool = False,
        load: Callable[[GraphModel], None] | None = None,
    ) -> None:
        adapters = None if lora is None else GraphAdapters(lora.step, lora.arrays)
        known = compiler.operations()
        traced = trace_model(
            model, computes_logits=generates, collectives=known, operations=known, adapters=adapters, items=items
        )
        check_translated(traced.graphs, compiler, type(model).__name__)
        self.graphs, self.arrays = traced.graphs, traced.arrays
        self._kept_arrays: dict[str, np.ndarray] = {}
        self._whole, self._tp = traced.whole, tp
        self._dtype_of = {name: whole.outputs[0].dtype for name, whole in traced.whole.items()}
        self._head_steps: dict[int, tuple[np.ndarray, StepSizes]] = {}
        self._reads_token_types = model.uses_token_types
        self._items = None
        if items is not None:
            self._items = ItemInputs(
                items,
                torch_dtype(model.config.dtype),
                shapes or ShapePolicy(),
                is_static=is_static,
                has_rows=model.stage.is_first,
            )
        remedy = "Choose a smaller dtype or a quantized model, or a larger pipeline_parallel_size."
        with out_of_memory_as(ModelError, "The weights", remedy):
            self.program: GraphProgram = compiler.program(traced.graphs)
            if load is not None:
                load(self)
            else:
                for name, tensor in traced.arrays.items():
                    self.give(name, tensor)
                    release(tensor)
            self._adapters = None if lora is None else AdapterArrays(self.program, traced.adapter_arrays, lora)
            self.program.finish_weights()
        caches = distinct_inputs(traced.graphs, "cache")
        self.kept_values = [*caches.values(), *distinct_inputs(traced.graphs, "state").values()]
        for i, layer in enumerate(model.attention_layers()):
            if (cache := caches.get(f"cache.{i}")) is not None:
                layer.backend.layout = self.program.kv_layout(cache)  # type: ignore[attr-defined, arg-type]

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Gives a weight or a constant to the program, also later, between steps. The tensor's memory can be freed."""
        array = to_numpy(tensor)
        self.program.set_weight(name, array)
        if self.program.keeps_arrays:
            self._kept_arrays[name] = array

    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        lora: LoRAMapping | None = None,
        token_types: torch.Tensor | None = None,
        items: StepItemTensors | None = None,
    ) -> torch.Tensor:
        """Hidden states of a step on the host: [T, hidden_size].

        Args:
            intermediate: Hidden states of the previous pipeline stage; None on the first.
            lora: LoRA adapters of the step's tokens.
            token_types: As in ForwardStep, for models that read them.
            items: Images, audio and embeddings in the step; None without any.
        """
        given, sizes = self._step(inputs, intermediate, lora, token_types, items)
        if (passes := inputs.state_passes) is not None:
            results = [self._run(MODEL, *each) for each in passes_of(inputs, given, sizes)]
            found = np.concatenate(results)[passes.place.numpy()]
        else:
            found = self._run(MODEL, given, sizes)
        return to_torch(found, self._dtype_of[MODEL])

    def largest_logits(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        lora: LoRAMapping | None = None,
        items: StepItemTensors | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest logit of each of a step's rows of logits, and its token; by few calls on the host.

        Args:
            inputs, intermediate, lora, items: As for `run`.

        Returns:
            float32 [L], and int64 [L], without padding: as from the reference of the operation `argmax`.
        """
        hidden: DeviceArray
        if inputs.state_passes is not None:
            hidden = to_numpy(self.run(inputs, intermediate, lora, items=items))
        else:
            given, sizes = self._step(inputs, intermediate, lora, items=items)
            (hidden,) = run_graph(self._whole[MODEL], self.program, given, sizes, self._tp, to_host=False)
        num_rows = inputs.num_logits
        if not inputs.selects_all:
            indices = inputs.logits_indices.numpy()
            # The results of a graph with collectives are on the host already.
            rows = hidden if isinstance(hidden, np.ndarray) else self.program.to_host(hidden)
            hidden, num_rows = rows[indices], len(indices)
        largest = largest_of_rows(self._run_head(HEAD, hidden, num_rows), self._dtype_of[HEAD])
        values, token_ids = (array[: inputs.num_logits] for array in largest)
        return values, token_ids

    def _step(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        lora: LoRAMapping | None,
        token_types: torch.Tensor | None = None,
        items: StepItemTensors | None = None,
    ) -> tuple[dict[str, np.ndarray], StepSizes]:
        """The inputs and sizes of the graph `model`. Arguments as for `run`."""
        layout, states = inputs.layout, inputs.state_layout
        token_ids, positions = inputs.host_ids_and_positions()
        given = {
            "token_ids": token_ids,
            "positions": positions,
            "query_start_loc": layout.query_start_loc,
            "seq_lens": layout.seq_lens,
            "block_table.0": layout.block_table,
            "slot_mapping.0": layout.slot_mapping,
        }
        if inputs.prompt_lens is not None:
            given["prompt_lens"] = inputs.prompt_lens.numpy()
        if states is not None:
            given |= {"read_slots": states.read_slots, "write_slots": states.write_slots}
        if intermediate is not None:
            given["intermediate"] = to_numpy(intermediate)
        if self._reads_token_types:
            types = np.zeros(layout.num_tokens, dtype=np.int32)
            given["token_types"] = types if token_types is None else token_types.numpy()
        if self._adapters is not None and self._adapters.arrays:
            self._adapters.update()
            given["adapter_slots"] = adapter_slots(lora, layout.num_tokens)
        if self._items is not None:
            given |= self._items.arrays(items, positions)
        sizes = StepSizes(
            tokens=layout.num_tokens,
            requests=layout.num_requests,
            pages=layout.block_table.shape[1],
            logits_rows=len(inputs.logits_indices),
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
            num_decodes=layout.num_decodes,
            kind=layout.kind,
            item_rows=len(given.get("item_embeds", ())),
        )
        return given, sizes

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As CausalLM.compute_logits, on the host."""
        return self._logits(HEAD, hidden)

    def _logits(self, head: str, hidden: torch.Tensor) -> torch.Tensor:
        return to_torch(self._run_head(head, to_numpy(hidden), len(hidden)), self._dtype_of[head])

    def _run_head(self, head: str, hidden: DeviceArray, num_rows: int) -> np.ndarray:
        """Logits of all rows of `hidden`, [num_rows, hidden_size]."""
        if num_rows not in self._head_steps:
            if len(self._head_steps) > _KEPT_SIZES:
                self._head_steps.clear()
            sizes = StepSizes(num_rows, 1, 1, num_rows, max_query_len=num_rows, max_seq_len=num_rows)
            self._head_steps[num_rows] = np.arange(num_rows, dtype=np.int32), sizes
        indices, sizes = self._head_steps[num_rows]
        return self._run(head, {"hidden": hidden, "logits_indices": indices}, sizes)

    def _run(self, name: str, inputs: Mapping[str, DeviceArray], sizes: StepSizes) -> np.ndarray:
        """The result of a graph that has one, on the host."""
        found: np.ndarray
        (found,) = run_graph(self._whole[name], self.program, inputs, sizes, self._tp)
        return found

    def compute_space_logits(self, hidden: torch.Tensor, space: TokenSpace) -> torch.Tensor:
        """As CausalLM.compute_space_logits, on the host."""
        return self._logits(head_of(space), hidden)

    def close(self) -> None:
        """Frees the program. Idempotent."""
        self.program.close()
        self._kept_arrays = {}


class GraphForward(StepForward):
    """The forward pass of one program, of the served model or of a draft model.

    Args:
        graph: The model as a program.
    """

    def __init__(self, graph: GraphModel) -> None:
        self._graph = graph

    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None = None,
        adapters: LoRAMapping | None = None,
        items: StepItemTensors | None = None,
    ) -> torch.Tensor:
        """As StepForward.run; the result is on the host."""
        return self._graph.run(inputs, intermediate, adapters, items=items)
