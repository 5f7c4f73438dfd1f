"""Traces a model: one step as StepGraphs.

The model runs once on arrays without data whose sizes T, R, P, L and N are symbols. Its own operations are recorded as
one node each (recorded_calls.py), torch's as array operations (aten.py). The model's tensors become weights and
constants, named by their place in the module tree.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from mvllm.extension_api import ForwardStep
from mvllm.extension_api.models import dtype_name, torch_dtype
from mvllm.extension_api.worker import CurrentLoRAMapping, ItemInputSpec, LoRAMapping
from mvllm.plugin_api import (
    CacheValue,
    ConfigError,
    Dim,
    Kind,
    Node,
    PlatformError,
    StateArguments,
    StateValue,
    StepGraph,
    TokenSpace,
    Value,
)
from mvllm_graph.aten import ArrayOperationWriter
from mvllm_graph.parts import CutGraph, cut_graph
from mvllm_graph.recorded_calls import GraphCache, GraphMetadata, Recording, recording

if TYPE_CHECKING:
    from mvllm.extension_api import CausalLM

MODEL, HEAD = "model", "head"


def head_of(space: TokenSpace) -> str:
    """Name of the graph of a token space's own head."""
    return f"{HEAD}-{space.name}"


_ONE_TRACE = threading.Lock()
"""torch's tracer has state of the process, and workers may be threads."""

_HINTS = {"T": 1009, "R": 503, "R+1": 504, "P": 211, "L": 307, "N": 401}
"""Sizes with which the model is traced. No size of a model may be equal to one of them by chance."""

_INT_INPUTS: dict[str, tuple[Dim, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "prompt_lens": ("T",),
    "query_start_loc": ("R+1",),
    "seq_lens": ("R",),
    "block_table.0": ("R", "P"),
    "slot_mapping.0": ("T",),
    "read_slots": ("R",),
    "write_slots": ("R",),
    "adapter_slots": ("T",),
    "token_types": ("T",),
    "item_index": ("T",),
    "rope_positions": ("T", 3),
    "logits_indices": ("L",),
}


@dataclass(frozen=True)
class TracedModel:
    """The graphs of a model and its weights.

    Attributes:
        graphs: `model`, and on the last pipeline stage `head` and `head-<space>` of token spaces with a head of their
            own; where these have collectives that the compiler lacks, their parts.
        arrays: The names of the weights and constants that the graphs read, with the places of their tensors.
        whole: `model` and the heads by name.
        adapter_arrays: The names of the adapter slots that the graphs read, with their tensors.
    """

    graphs: tuple[StepGraph, ...]
    arrays: Mapping[str, torch.Tensor]
    whole: Mapping[str, CutGraph]
    adapter_arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphAdapters:
    """The LoRA slots of a model, whose layers are wrapped.

    Attributes:
        step: The LoRA mapping that its layers read.
        arrays: The adapter slots by their names in graphs.
    """

    step: CurrentLoRAMapping
    arrays: Mapping[str, torch.Tensor]


def trace_model(
    model: CausalLM,
    *,
    computes_logits: bool = True,
    collectives: Collection[str] = (),
    operations: Collection[str] | None = None,
    adapters: GraphAdapters | None = None,
    items: ItemInputSpec | None = None,
) -> TracedModel:
    """The graphs of a loaded model, built with the providers and backends of recorded_calls.py.

    Args:
        computes_logits: Whether to trace the head.
        collectives: Collectives of the compiler. Graphs are cut at others.
        operations: Operations of the compiler. Other activations are array operations. None: all activations are named.
        adapters: LoRA slots, which use `add_lora_by_slot`.
        items: Items of prompts; None for text alone.

    Raises:
        ConfigError: The model has a feature that graphs do not have.
        PlatformError: The model uses a torch operation that is no array operation.
    """
    tracer = _Tracer(model, adapters, operations, items)
    graphs = [tracer.trace_model()]
    if computes_logits and model.lm_head is not None:
        graphs.append(tracer.trace_head())
        spaces = [space for space in model.token_spaces.values() if space.has_own_head]
        graphs += [tracer.trace_head(space) for space in spaces]
    used = {value.name for graph in graphs for value in graph.inputs_of("weight", "constant")}
    whole = {graph.name: cut_graph(graph, collectives) for graph in graphs}
    parts = tuple(part for cut in whole.values() for part in cut.graphs)
    slots = {} if adapters is None else {name: each for name, each in adapters.arrays.items() if name in used}
    return TracedModel(parts, {name: each for name, each in tracer.arrays.items() if name in used}, whole, slots)


class _Tracer:
    def __init__(
        self,
        model: CausalLM,
        adapters: GraphAdapters | None = None,
        operations: Collection[str] | None = None,
        items: ItemInputSpec | None = None,
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._model, self._adapters, self._operations, self._items = model, adapters, operations, items
        # Each size of a model is a number; each of a step is a symbol.
        self._shape_env = ShapeEnv(specialize_zero_one=False)
        self._mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        self._dims: dict[Any, Dim] = {}
        self._result_size: Dim = model.config.hidden_size
        self.arrays: dict[str, torch.Tensor] = {}
        self._names: dict[int, tuple[str, Kind]] = {}
        for name, tensor, kind in named_arrays(model):
            if id(tensor) not in self._names:
                self._names[id(tensor)] = name, kind
                self.arrays[name] = tensor
        if adapters is not None:
            self._names |= {id(tensor): (name, "weight") for name, tensor in adapters.arrays.items()}
        self._dtype = next(
            (p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1), torch.float32
        )
        if getattr(model.config, "dtype", None) in ("float32", "bfloat16", "float16"):
            self._dtype = torch_dtype(model.config.dtype)

    # ------------------------------------------------------------------------------------------------------- graphs

    def trace_model(self) -> StepGraph:
        model = self._model
        names = ["positions"]
        names.insert(0, "token_ids") if model.stage.is_first else names.append("intermediate")
        names += ["prompt_lens"] if model.uses_prompt_lens else []
        attention, states = model.attention_layers(), model.state_layers()
        is_encoder = model.config.kind.is_encoder
        if any(layer.chunk_size is not None for layer in attention):
            raise ConfigError(
                "The model has chunked attention, which graphs of a step do not have. Set max_model_len to at most "
                f"{min(layer.chunk_size for layer in attention if layer.chunk_size is not None)}."
            )
        names += ["token_types"] if model.uses_token_types else []
        names += ["query_start_loc"] if attention or states or is_encoder else []
        names += ["seq_lens", "block_table.0", "slot_mapping.0"] if attention else []
        names += ["read_slots", "write_slots"] if states else []
        names += ["adapter_slots"] if self._adapters is not None else []
        names += self._item_inputs()

        def run(*arrays: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, arrays, strict=True))
            metadata: dict[Any, Any] = {}
            if attention:
                plan = GraphMetadata(
                    *(given[name] for name in ("block_table.0", "slot_mapping.0", "query_start_loc", "seq_lens"))
                )
                metadata = {layer.metadata_key: plan for layer in attention}
            slots = None
            if states:
                slots = StateArguments(given["query_start_loc"], given["read_slots"], given["write_slots"], 0)
            step = ForwardStep(
                metadata,
                given.get("prompt_lens"),
                prompt_starts_array=given["query_start_loc"] if is_encoder else None,
                token_types=given.get("token_types"),
                state_metadata=slots,
                item_index=given.get("item_index"),
                item_embeds=given.get("item_embeds"),
                rope_positions=given["rope_positions"].t() if "rope_positions" in given else None,
            )
            tokens = given.get("token_ids", given["positions"])
            with self._active_adapters(given.get("adapter_slots")):
                hidden: torch.Tensor = model(tokens, given["positions"], step, given.get("intermediate"))
            return hidden

        graph = self._trace(MODEL, names, run)
        self._result_size = graph.values()[graph.outputs[0]].shape[-1]
        return graph

    def trace_head(self, space: TokenSpace | None = None) -> StepGraph:
        """The head of text, or that of a token space."""

        def run(hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
            rows = hidden.index_select(0, logits_indices)
            if space is not None:
                return self._model.compute_space_logits(rows, space)
            return self._model.compute_logits(rows)

        return self._trace(HEAD if space is None else head_of(space), ["hidden", "logits_indices"], run)

    def _item_inputs(self) -> list[str]:
        """Rows are read by the first pipeline stage, rotary positions by each."""
        if self._items is None:
            return []
        names = ["item_index", "item_embeds"] if self._model.stage.is_first else []
        return [*names, "rope_positions"] if self._items.has_rope_positions else names

    def _active_adapters(self, slots: torch.Tensor | None) -> AbstractContextManager[None]:
        """The adapters of a step's tokens, inside the context."""
        if self._adapters is None:
            return nullcontext()
        return self._adapters.step.active(LoRAMapping(None, (), slots))

    def _hidden_size(self, name: str) -> int:
        """Columns of hidden states: of the head's input those of the model's result."""
        size = self._result_size if name == "hidden" else self._model.config.hidden_size
        return int(size)

    def _trace(self, name: str, inputs: Sequence[str], run: Callable[..., torch.Tensor]) -> StepGraph:
        from torch.fx.experimental.proxy_tensor import make_fx

        arrays = [self._input(each) for each in inputs]
        with _ONE_TRACE, recording() as calls, torch.no_grad(), self._layer_caches(calls):
            traced = make_fx(run, tracing_mode="symbolic")(*arrays)
        if fixed := sorted({str(dim) for symbol, dim in self._dims.items() if symbol in self._shape_env.replacements}):
            raise PlatformError(
                f"{type(self._model).__name__} reads the size {' and '.join(fixed)} of a step as a Python number (for "
                "instance by `len`), so its graph is not for every size. Use the shape of the tensor."
            )
        writer = ArrayOperationWriter(self._dims, self._operations)
        return _GraphWriter(name, inputs, traced, calls, self._names, writer).write()

    def _input(self, name: str) -> torch.Tensor:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        shape: tuple[Dim, ...] = _INT_INPUTS.get(name, ("T", self._hidden_size(name)))
        if name == "item_embeds":
            assert self._items is not None
            shape = ("N", self._items.width)
        dtype = torch.int32 if name in _INT_INPUTS else self._dtype
        sizes = [dim if isinstance(dim, int) else _HINTS[dim] for dim in shape]
        dynamic = [DimDynamic.STATIC if isinstance(dim, int) else DimDynamic.DUCK for dim in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        real = torch.empty(sizes, dtype=dtype)
        fake = self._mode.from_tensor(real, symbolic_context=context)
        found: Any = fake.shape
        for dim, size in zip(shape, found, strict=True):
            if isinstance(dim, str):
                self._dims[size.node.expr] = dim
        return fake

    @contextmanager
    def _layer_caches(self, calls: Recording) -> Iterator[None]:
        """Gives layers caches and states that stand for values of the graph."""
        attention, states = self._model.attention_layers(), self._model.state_layers()
        before = [layer.kv_cache for layer in attention], [layer.state for layer in states]
        for i, layer in enumerate(attention):
            layer.kv_cache = GraphCache(CacheValue(f"cache.{i}", "cache", (), layer.spec.kv_dtype, layer.spec, i))
        for i, state in enumerate(states):
            state.state = tuple(torch.empty(0) for _ in state.spec.tensors)
            for j, (tensor, spec) in enumerate(zip(state.state, state.spec.tensors, strict=True)):
                calls.states[id(tensor)] = StateValue(f"state.{i}.{j}", "state", (), spec.dtype, spec, i, j)
        try:
            yield
        finally:
            for layer, cache in zip(attention, before[0], strict=True):
                layer.kv_cache = cache
            for state, tensors in zip(states, before[1], strict=True):
                state.state = tensors


class _GraphWriter:
    """Writes one traced function as a StepGraph.

    Args:
        name: The graph's name.
        inputs: Names of the function's arguments.
        traced: The function as torch operations and recorded calls.
        calls: The recorded calls.
        names: Name and kind of each tensor of the model, by id.
        writer: Writes torch's operations.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        traced: fx.GraphModule,
        calls: Recording,
        names: Mapping[int, tuple[str, Kind]],
        writer: ArrayOperationWriter,
    ) -> None:
        self._name, self._step_inputs, self._traced, self._calls = name, iter(inputs), traced, calls
        self._model_names = names
        self._inputs: dict[str, Value] = {}
        self._writer = writer

    def write(self) -> StepGraph:
        writer = self._writer
        outputs: tuple[str, ...] = ()
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                writer.names[node] = self._add_input(node, next(self._step_inputs), "step")
            elif node.op == "get_attr":
                writer.names[node] = self._model_array(node)
            elif node.op == "output":
                found = node.args[0]
                outputs = tuple(writer.names[each] for each in (found if isinstance(found, tuple | list) else [found]))
            elif node.target is torch.ops.mvllm_graph.call.default:
                self._write_call(node)
            else:
                writer.write(node)
        nodes = _without_dead(writer.nodes, outputs)
        read = {name for node in nodes for name in node.inputs} | set(outputs)
        inputs = tuple(value for value in self._inputs.values() if value.name in read or value.kind == "step")
        return StepGraph(self._name, inputs, tuple(nodes), outputs)

    def _write_call(self, node: fx.Node) -> None:
        number, arrays = node.args
        call = self._calls.calls[number]  # type: ignore[index]
        inputs = [None if each is None else self._writer.names[each] for each in arrays]  # type: ignore[union-attr]
        for position, value in call.values.items():
            self._inputs[value.name] = value
            inputs[position] = value.name
        self._writer.names[node] = self._writer.add(call.op, inputs, node.meta["val"], call.attributes)

    def _model_array(self, node: fx.Node) -> str:
        tensor = getattr(self._traced, str(node.target))
        found = self._model_names.get(id(tensor))
        if found is None:
            raise PlatformError(
                f"The model's graph {self._name!r} reads an array of shape {tuple(tensor.shape)} that is no attribute "
                "of a module. Make it an attribute of the layer that reads it."
            )
        name, kind = found
        self._inputs.setdefault(name, Value(name, kind, tuple(tensor.shape), dtype_name(tensor.dtype)))
        return name

    def _add_input(self, node: fx.Node, name: str, kind: Kind) -> str:
        self._inputs[name] = self._writer.value(name, kind, node.meta["val"])
        return name


def _without_dead(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes whose results are read, and those that write a cache or a state."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        writes = any(name is not None and re.match(r"(cache|state)\.", name) for name in node.inputs)
        if writes or any(value.name in needed for value in node.outputs):
            kept.append(node)
            needed.update(name for name in node.inputs if name is not None)
    return kept[::-1]


def named_arrays(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """The tensors of a model by their places in the module tree: parameters, then other attributes of each module."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter, "weight"
        for name, attribute in vars(module).items():
            if name not in ("_parameters", "_modules"):
                yield from tensors_in(prefix + name, attribute)


def tensors_in(path: str, found: object) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """The tensors of an attribute at `path`, by their names in a graph."""
    if isinstance(found, torch.Tensor):
        yield path, found, "constant"
    elif isinstance(found, tuple | list):
        for i, each in enumerate(found):
            yield from tensors_in(f"{path}.{i}", each)
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for each in dataclasses.fields(found):
            for name, tensor, _ in tensors_in(f"{path}.{each.name}", getattr(found, each.name)):
                yield name, tensor, "weight"
