"""Lowering of `paged_attention` to OpenVINO's own operation of that name, which stores keys and values and attends.

It takes the lengths before the step and a flat list of blocks; both are computed once per graph and KV cache group.
Layers with a soft cap, and those without keys of their own, attend over gathered blocks (gathered_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset15 as op

from mvllm.plugin_api import AttentionSpec
from mvllm_graph import CacheValue, Node
from mvllm_openvino.building import TYPES, Building, Lowering, Out, constant, integers
from mvllm_openvino.gathered_attention import BLOCK_SIZE, after, attend_gathered, make_batch, store
from mvllm_openvino.named import scalar


def unsupported(spec: AttentionSpec) -> list[str]:
    """Reasons why a layer cannot be served."""
    if spec.kv_dtype != spec.dtype:
        return [f"the KV cache has the compute dtype, {spec.dtype}, not {spec.kv_dtype}"]
    return []


def cache_shapes(spec: AttentionSpec, num_blocks: int) -> list[tuple[int, int, int, int]]:
    """Shapes of a layer's caches: of keys and of values, or of keys that contain the values.

    OpenVINO's operation has an argument for each of both. Where values are the first elements of keys, whole keys take
    the place of values, both arguments are the same cache, and the rest of each result is cut off.
    """
    sizes = (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)
    return [(num_blocks, spec.num_kv_heads, BLOCK_SIZE, size) for size in sizes]


def paged_attention(building: Building, node: Node) -> Sequence[Out]:
    """Stores the step's keys and values, and attends."""
    query, key, value, sinks = (None if name is None else building.output(name) for name in node.inputs[:4])
    cache_name, table, slots, query_start_loc, seq_lens = (str(name) for name in node.inputs[4:9])
    cache = building.values[cache_name]
    assert isinstance(cache, CacheValue)
    spec = cache.spec
    value_size = spec.head_size if spec.values_in_keys else spec.value_size
    if key is not None:
        value = key if spec.values_in_keys else value
        key, value = _flat(key, spec.num_kv_heads * spec.head_size), _flat(value, spec.num_kv_heads * value_size)
    caches = [parameter.output(0) for parameter in _caches(building, cache)]
    keys, values = caches[0], caches[-1]
    step = ("blocks", table, query_start_loc, seq_lens)
    past, blocks, begins, longest = building.once(step, lambda: _blocks(building, table, query_start_loc, seq_lens))
    written = building.shared.get(("written", cache_name))
    if spec.soft_cap is None:
        if key is None:
            key, value = (_zeros(building, query, spec.num_kv_heads * size) for size in (spec.head_size, value_size))
            blocks = blocks if written is None else after(blocks, written)
        flat = _flat(query, spec.num_heads * spec.head_size)
        starts = building.output(query_start_loc)
        made = _attention(spec, keys, values, sinks, writes=node.inputs[1] is not None)(
            flat, key, value, past, starts, blocks, begins, longest
        ).output(0)
        if value_size != spec.value_size:
            made = _first_elements(made, spec.num_heads, value_size, spec.value_size)
    else:
        if key is not None:
            written = store(_attention(spec, keys, values, None), key, value, building.output(slots))
        batch = building.once(
            ("batch", query_start_loc, seq_lens),
            lambda: make_batch(query, building.output(query_start_loc), building.output(seq_lens)),
        )
        order = building.output(table) if written is None else after(building.output(table), written)
        made = attend_gathered(spec, query, keys, values, sinks, batch, order)
    if node.inputs[1] is not None:
        building.shared["written", cache_name] = made
    return [made]


def _first_elements(x: Out, num_heads: int, size: int, wanted: int) -> Out:
    """Of rows of heads [T, num_heads * size] the first elements of each head."""
    heads = op.reshape(x, integers([-1, num_heads, size]), False)
    cut = op.slice(heads, integers([0]), integers([wanted]), integers([1]), integers([-1])).output(0)
    return _flat(cut, num_heads * wanted)


def _zeros(building: Building, query: Out, size: int) -> Out:
    """[T, size]: what the operation wants in the place of keys or values that it does not store."""
    rows = op.slice(op.shape_of(query, Type.i64), integers([0]), integers([1]), integers([1]))
    return op.broadcast(scalar(0.0), op.concat([rows, integers([size])], 0)).output(0)


def _attention(
    spec: AttentionSpec, keys: Out, values: Out, sinks: Out | None, *, writes: bool = True
) -> Callable[..., Any]:
    """A function that makes OpenVINO's operation from what differs between steps."""
    empty_int, empty_real = constant(np.zeros(0, np.int32), Type.i32), constant(np.zeros(0, np.float32), Type.f32)
    empty_bits, zero = constant(np.zeros(0, np.uint8), Type.u8), constant(0, Type.i32)
    if sinks is not None:
        sinks = op.reshape(sinks, integers([1, spec.num_heads, 1, 1]), False).output(0)

    def attend(query: Out, key: Out, value: Out, past: Out, starts: Out, blocks: Out, begins: Out, longest: Out) -> Any:
        arguments = [
            *(query, key, value, keys, values, past, starts, blocks, begins),
            *(scalar(spec.scale), constant(spec.sliding_window or 0, Type.i32)),
            *(empty_real, longest, empty_int),  # no ALiBi; scores are not aggregated
            *(empty_int, empty_int, empty_real),  # stored keys are not rotated
            *(empty_real, zero, zero),  # no sparse attention
            empty_real if sinks is None else sinks,
            *(zero, empty_int, empty_int, empty_int),  # nothing is evicted
            *(empty_int, empty_bits, empty_int),  # no kinds of tokens; no bias between queries
        ]
        made = ov.op._PagedAttentionExtension(arguments)  # the operation has no other name in Python
        made.set_attribute("write_kv_cache", writes)
        facts = made.get_rt_info()
        facts["num_k_heads"] = facts["num_v_heads"] = spec.num_kv_heads
        facts["k_head_size"] = spec.head_size
        facts["v_head_size"] = spec.head_size if spec.values_in_keys else spec.value_size
        return made

    return attend


def _flat(x: Out, size: int) -> Out:
    return op.reshape(x, integers([-1, size]), False).output(0)


def _caches(building: Building, cache: CacheValue) -> tuple[Any, ...]:
    if cache.name not in building.caches:
        building.caches[cache.name] = tuple(
            building.parameter(f"{cache.name}.{name}", shape, TYPES[cache.spec.kv_dtype])
            for name, shape in zip(("keys", "values"), cache_shapes(cache.spec, -1), strict=False)
        )
    return building.caches[cache.name]


def _blocks(building: Building, table: str, query_start_loc: str, seq_lens: str) -> tuple[Out, Out, Out, Out]:
    """Lengths before the step [R], blocks of all requests [R * P], where each request's begin [R + 1], longest []."""
    starts, lengths, blocks = (building.output(name) for name in (query_start_loc, seq_lens, table))
    one, zero, step = integers([1]), integers([0]), integers([1])
    later = op.slice(starts, one, integers([2**31 - 1]), step)
    earlier = op.slice(starts, zero, integers([-1]), step)
    past = op.subtract(lengths, op.subtract(later, earlier))
    shape = op.shape_of(blocks, Type.i32)
    pages = op.gather(shape, constant(1, Type.i32), constant(0, Type.i32))
    rows = op.gather(shape, constant(0, Type.i32), constant(0, Type.i32))
    stop = op.add(op.multiply(rows, pages), constant(1, Type.i32))
    begins = op.range(constant(0, Type.i32), stop, pages, Type.i32)
    longest = op.reduce_max(lengths, constant(0, Type.i64), False)
    flat = op.reshape(blocks, integers([-1]), False)
    return past.output(0), flat.output(0), begins.output(0), longest.output(0)


ATTENTION: dict[str, Lowering] = {"paged_attention": paged_attention}
