"""GraphProgram of the OpenVINO platform: compiled models, one for each graph and all sizes, and the KV caches."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type

from mvllm.plugin_api import KVLayout
from mvllm_graph import CacheValue, GraphProgram, StepGraph, StepSizes, Value, substitute
from mvllm_openvino.attention import cache_shapes
from mvllm_openvino.building import TYPES, Building, Lowering, computed_type, converted, stored_type
from mvllm_openvino.gathered_attention import BLOCK_SIZE
from mvllm_openvino.quantized import names_of_pairs, pairs

DEVICE = "CPU"

_ALIGNMENT = 64
"""Bytes, of the memory of a cache."""

_FRONT_TOKENS = 8192
"""For so many tokens the memory of a cache is provided in the background, before prompts need it."""

_PAGE, _ADVISED_BYTES = mmap.PAGESIZE, 16 << 20
_HUGE_PAGES, _POPULATE_WRITE = 14, 23
"""Linux's MADV_HUGEPAGE and MADV_POPULATE_WRITE."""


class OpenVINOProgram(GraphProgram):
    """The graphs of one model as OpenVINO models.

    A model is compiled when it first runs after its weights were set. One request per model keeps its input tensors,
    so a step sets only the small ones. Weights are constants in memory of the program.
    """

    def __init__(self, graphs: Sequence[StepGraph], table: Mapping[str, Lowering]) -> None:
        self._graphs = {graph.name: graph for graph in graphs}
        self._table = table
        self._arrays: dict[str, np.ndarray] = {}
        self._compiled: dict[str, CompiledGraph] = {}
        self._caches: dict[str, Sequence[ov.Tensor]] = {}
        self._cache_arrays: list[np.ndarray] = []  # the memory of these tensors
        self._core = ov.Core()
        self._pairs = names_of_pairs(graphs)
        values = (value for graph in graphs for value in graph.inputs)
        self._cache_values = {value.name: value for value in values if isinstance(value, CacheValue)}

    def set_weight(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = pairs(array) if name in self._pairs else np.array(array, order="C")
        readers = [graph.name for graph in self._graphs.values() if any(value.name == name for value in graph.inputs)]
        for graph in readers:
            self._compiled.pop(graph, None)

    def finish_weights(self) -> None:
        for name, graph in self._graphs.items():
            if len(graph.nodes) > 1:  # the conformance suite has programs of one node that it never runs
                self._compiled_graph(name)

    def kv_layout(self, cache: CacheValue) -> KVLayout:
        spec = cache.spec
        elements = sum(heads * size for _, heads, _, size in cache_shapes(spec, 1))
        return KVLayout((BLOCK_SIZE,), elements * TYPES[spec.kv_dtype].size)

    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        assert block_size == BLOCK_SIZE, "core chooses among kv_layout's block sizes"
        self.free_caches()
        try:
            for name, cache in self._cache_values.items():
                dtype = TYPES[cache.spec.kv_dtype]
                made = [_new_cache(dtype, shape) for shape in cache_shapes(cache.spec, num_blocks)]
                self._caches[name] = [tensor for tensor, _ in made]
                self._cache_arrays += [array for _, array in made]
        except (MemoryError, RuntimeError) as e:
            self.free_caches()
            raise MemoryError(f"{num_blocks} blocks of the KV cache do not fit into the host's memory: {e}") from e
        for compiled in self._compiled.values():
            compiled.bind(self._caches)
        share = min(1.0, _FRONT_TOKENS / BLOCK_SIZE / num_blocks)
        arrays = list(self._cache_arrays)
        threading.Thread(target=_provide_pages, args=(arrays, share), daemon=True).start()

    def free_caches(self) -> None:
        self._caches.clear()
        for compiled in self._compiled.values():
            compiled.unbind()
        self._cache_arrays.clear()

    def run(self, graph: str, inputs: Mapping[str, Any], sizes: StepSizes) -> Sequence[np.ndarray]:
        return self._compiled_graph(graph).run(inputs, sizes)

    def _compiled_graph(self, name: str) -> CompiledGraph:
        if name not in self._compiled:
            made = CompiledGraph(self._core, self._graphs[name], self._table, self._arrays)
            made.bind(self._caches)
            self._compiled[name] = made
        return self._compiled[name]

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def kv_bytes(self, cache: CacheValue) -> int:
        return sum(tensor.byte_size for tensor in self._caches[cache.name])

    def fill(self, cache: CacheValue, value: float) -> None:
        element = _encoded(np.array([value], np.float32), cache.spec.kv_dtype)[0]
        for tensor in self._caches[cache.name]:
            _bits(tensor)[...] = element

    def read_slots(self, cache: CacheValue, slots: np.ndarray) -> Sequence[np.ndarray]:
        return [_bits(tensor)[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] for tensor in self._caches[cache.name]]

    def block_format(self, cache: CacheValue) -> str:
        parts = "; ".join(f"{_bits(x).dtype}{list(_bits(x).shape[1:])}" for x in self._caches[cache.name])
        kind = "values in keys" if cache.spec.values_in_keys else "keys and values"
        return f"mvllm_openvino blocks of {kind}, {cache.spec.kv_dtype}: {parts}"

    def export_blocks(self, cache: CacheValue, blocks: np.ndarray, out: np.ndarray) -> None:
        start = 0
        for tensor in self._caches[cache.name]:
            rows = _bits(tensor)[blocks].reshape(len(blocks), -1).view(np.uint8)
            out[:, start : start + rows.shape[1]] = rows
            start += rows.shape[1]

    def import_blocks(self, cache: CacheValue, blocks: np.ndarray, data: np.ndarray) -> None:
        start = 0
        for tensor in self._caches[cache.name]:
            bits = _bits(tensor)
            size = bits[:1].nbytes
            rows = np.ascontiguousarray(data[:, start : start + size]).view(bits.dtype)
            bits[blocks] = rows.reshape(-1, *bits.shape[1:])
            start += size

    def close(self) -> None:
        self._compiled.clear()
        self._caches.clear()
        self._cache_arrays.clear()
        self._arrays.clear()


class CompiledGraph:
    """One graph, compiled, with its request."""

    def __init__(
        self, core: ov.Core, graph: StepGraph, table: Mapping[str, Lowering], arrays: Mapping[str, np.ndarray]
    ) -> None:
        self._graph = graph
        steps, values = graph.inputs_of("step"), graph.values()
        self._steps = [_StepInput(value) for value in steps]
        self._results = [_Result(values[name], index) for index, name in enumerate(graph.outputs)]
        building = Building(graph, arrays)
        for value in steps:
            building.output(value.name)
        for node in graph.nodes:
            for value, output in zip(node.outputs, table[node.op](building, node), strict=True):
                building.outputs[value.name] = converted(output, value.dtype)
        results = [building.result(values[name]) for name in graph.outputs]
        self._caches = dict(building.caches)
        self._kept = building.kept
        dtypes = {value.spec.dtype if isinstance(value, CacheValue) else value.dtype for value in values.values()}
        model = ov.Model(results, building.parameters, graph.name)
        self._request = core.compile_model(model, DEVICE, settings(dtypes)).create_infer_request()
        self._is_bound = False
        self._key: tuple[int, ...] | None = None
        attention = next((node for node in graph.nodes if node.op == "paged_attention"), None)
        self._starts_and_lengths = ("", "") if attention is None else tuple(map(str, attention.inputs[7:9]))

    def bind(self, caches: Mapping[str, Sequence[ov.Tensor]]) -> None:
        """Uses these caches from now on."""
        self._is_bound = all(name in caches for name in self._caches)
        if self._is_bound:
            for name, parameters in self._caches.items():
                for parameter, tensor in zip(parameters, caches[name], strict=True):
                    self._request.set_tensor(parameter.friendly_name, tensor)

    def unbind(self) -> None:
        """Lets go of the caches."""
        if self._is_bound and self._caches:
            for parameters in self._caches.values():
                for parameter in parameters:
                    shape = [dim if dim > 0 else 1 for dim in _lengths(parameter)]
                    empty = ov.Tensor(parameter.get_element_type(), ov.Shape(shape))
                    self._request.set_tensor(parameter.friendly_name, empty)
        self._is_bound = False

    def run(self, inputs: Mapping[str, Any], sizes: StepSizes) -> list[np.ndarray]:
        """Runs the graph. The memory of a result is used again only when nobody refers to the result.

        Padding is left out: OpenVINO's attention expects every token in a request and tokens in every request.
        """
        assert self._is_bound or not self._caches, "caches are allocated before the first step"
        real = self._real_sizes(inputs) if self._caches else {}
        if real.get("T") == 0:
            return [result.nothing(sizes) for result in self._results]
        key = (sizes.tokens, sizes.requests, sizes.pages, sizes.logits_rows, *real.values())
        if key != self._key:
            symbols = sizes.symbols()
            for step_input in self._steps:
                step_input.resize(real)
            for result in self._results:
                result.resize(symbols, symbols | real)
            self._key = key
        for step_input in self._steps:
            step_input.set(self._request, inputs[step_input.name])
        for result in self._results:
            result.prepare(self._request)
        self._request.infer(share_outputs=True)
        return [result.take() for result in self._results]

    def _real_sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Tokens and requests without padding, which comes last."""
        starts, lengths = self._starts_and_lengths
        requests = int(np.count_nonzero(inputs[lengths]))
        return {"T": int(inputs[starts][requests]), "R": requests}


class _StepInput:
    """A step input of one graph. Its memory stays the request's input while its shape is the same."""

    def __init__(self, value: Value) -> None:
        self.name = value.name
        self._value = value
        self._type = stored_type(value.dtype)
        self._dtype = np.dtype(np.uint16 if self._type == Type.bf16 else self._type.to_dtype())
        self._array: np.ndarray | None = None
        self._length: int | None = None

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Sets the length without padding."""
        self._length = _length(self._value, sizes)

    def set(self, request: ov.InferRequest, array: np.ndarray) -> None:
        """Gives a step's array to the request."""
        if self._length is not None:
            array = array[: self._length]
        if self._array is None or self._array.shape != array.shape:
            self._array = np.empty(array.shape, self._dtype)
            request.set_tensor(self.name, ov.Tensor(self._array, ov.Shape(array.shape), self._type))
        np.copyto(self._array, array, casting="unsafe")


class _Result:
    """A result of one graph. The request writes it to memory that nobody else refers to."""

    def __init__(self, value: Value, index: int) -> None:
        self._value = value
        self._index = index
        self._type = stored_type(value.dtype)
        self._dtype = np.dtype(np.uint16 if self._type == Type.bf16 else self._type.to_dtype())
        self._array: np.ndarray | None = None
        self._own_references = 0
        self._written: tuple[int, ...] = ()
        self._length: int | None = None

    def resize(self, sizes: Mapping[str, int], written: Mapping[str, int]) -> None:
        """Sets the sizes of the result, and of what the request writes."""
        self._length, self._written = _length(self._value, sizes), self._shape(written)

    def prepare(self, request: ov.InferRequest) -> None:
        """Gives the request memory for a step's result, another than that of a result that is still in use."""
        array = self._array
        if array is None or array.shape != self._written or _references(array) > self._own_references:
            array = self._array = np.empty(self._written, self._dtype)
            request.set_output_tensor(self._index, ov.Tensor(array, ov.Shape(self._written), self._type))
            self._own_references = _references(array)

    def take(self) -> np.ndarray:
        """The result of a run, with zeros for what padding would have given."""
        assert self._array is not None
        return _padded(self._array, self._length)

    def nothing(self, sizes: StepSizes) -> np.ndarray:
        """The result of a step of padding alone."""
        zeros = np.zeros(self._shape(sizes.symbols()), computed_type(self._value.dtype).to_dtype())
        return _encoded(zeros, self._value.dtype)

    def _shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(int(substitute(dim, sizes)) for dim in self._value.shape)


def _new_cache(dtype: Type, shape: Sequence[int]) -> tuple[ov.Tensor, np.ndarray]:
    """A tensor of zeros, and its memory, of which the system provides each page when it is first written."""
    size = math.prod(shape) * dtype.size
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    numbers = memory[start : start + size].view(np.uint16 if dtype == Type.bf16 else dtype.to_dtype())
    return ov.Tensor(numbers.reshape(shape), ov.Shape(list(shape)), dtype), memory


def _provide_pages(arrays: Sequence[np.ndarray], share: float) -> None:
    """Has the system provide the pages of a share of each array at its front. Contents stay as they are."""
    advise = ctypes.CDLL(None, use_errno=True).madvise  # which releases the interpreter's lock
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for array in arrays:
        first = -(-array.ctypes.data // _PAGE) * _PAGE
        size = int(array.nbytes * share) // _PAGE * _PAGE
        advise(first, size, _HUGE_PAGES)
        for start in range(first, first + size, _ADVISED_BYTES):
            if advise(start, min(_ADVISED_BYTES, first + size - start), _POPULATE_WRITE):
                return  # the kernel is older


def settings(dtypes: Collection[str]) -> dict[str, Any]:
    """Properties of the processor's plugin for the dtypes of a graph."""
    precision = "bfloat16" if "bfloat16" in dtypes else "float32"
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(wanted) if wanted.isdigit() else 0
    return {
        **({"INFERENCE_NUM_THREADS": threads} if threads else {}),
        "INFERENCE_PRECISION_HINT": TYPES[precision],
        "KV_CACHE_PRECISION": TYPES[precision],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # by default activations are rounded to int8 for integer weights
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Several processes would pin their threads to the same processors.
        "ENABLE_CPU_PINNING": not threads or threads >= len(os.sched_getaffinity(0)),
    }


def _lengths(parameter: Any) -> list[int]:
    return [dim.get_length() if dim.is_static else -1 for dim in parameter.get_partial_shape()]


def _length(value: Value, sizes: Mapping[str, int]) -> int | None:
    """Size of the first dimension if it depends on one of these symbols."""
    dim = substitute(value.shape[0], sizes) if value.shape else ""
    return dim if isinstance(dim, int) else None


def _references(array: np.ndarray) -> int:
    """How often an array is referred to, views and tensors of its memory included."""
    return sys.getrefcount(array)


def _padded(output: np.ndarray, length: int | None) -> np.ndarray:
    """The array, with zeros for what padding would have given."""
    if length is None or length == output.shape[0]:
        return output
    made = np.zeros((length, *output.shape[1:]), output.dtype)
    made[: output.shape[0]] = output
    return made


def _encoded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array in a graph's dtype, bfloat16 as its bits, rounded to the nearest, halves to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
    if dtype == "float16":
        return array.astype(np.float16)
    return array


def _bits(tensor: ov.Tensor) -> np.ndarray:
    """The elements of a tensor; those of bfloat16 as bits."""
    return tensor.data.view(np.uint16) if tensor.element_type == Type.bf16 else tensor.data
