"""Lowerings of mixtures of experts: pairs of a token and an expert are sorted by expert and multiplied in groups.

ids [T, top_k] ── counts per expert ──> place of each pair ──> rows of x in that order
rows ── grouped product ── activation ── grouped product ── back in the order of tokens ── weighted sum
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openvino import Type
from openvino import opset15 as op
from openvino.opset17 import grouped_matmul

from mvllm_graph import Node
from mvllm_openvino.building import Building, Lowering, Out, constant, integers
from mvllm_openvino.named import activate, halves, scalar


def select_experts(building: Building, node: Node) -> Sequence[Out]:
    """The experts of each token and their weights, from a router's logits."""
    given = building.inputs(node)
    logits, correction = given[0], given[1] if len(given) > 1 else None
    attributes = node.attributes
    top_k = int(attributes["top_k"])
    if attributes["scores"] == "softmax_of_chosen":
        best = _top(logits, top_k)
        weights = op.softmax(best.output(0), -1)
        return [_scaled(weights.output(0), attributes["scale"]), _ids(best.output(1))]
    sigmoid = attributes["scores"] == "sigmoid"
    values = (op.sigmoid(logits) if sigmoid else op.softmax(logits, -1)).output(0)
    by = values if correction is None else op.add(values, correction).output(0)
    if attributes["top_groups"] < attributes["num_groups"]:
        by = _only_best_groups(building, node, by)
    ids = _top(by, top_k).output(1)
    weights = op.gather_elements(values, ids, -1).output(0)
    if attributes["normalize"]:
        total = op.add(op.reduce_sum(weights, integers([-1]), True), scalar(1e-20))
        weights = op.divide(weights, total).output(0)
    return [_scaled(weights, attributes["scale"]), _ids(ids)]


def _top(x: Out, count: int) -> Out:
    return op.topk(x, constant(count, Type.i64), -1, "max", "value", index_element_type="i64", stable=True)


def _ids(ids: Out) -> Out:
    return ids if ids.get_element_type() == Type.i64 else op.convert(ids, Type.i64).output(0)


def _scaled(weights: Out, scale: float) -> Out:
    return weights if scale == 1 else op.multiply(weights, scalar(scale)).output(0)


def _only_best_groups(building: Building, node: Node, scores: Out) -> Out:
    attributes = node.attributes
    num_groups, top_groups = int(attributes["num_groups"]), int(attributes["top_groups"])
    num_experts = int(building.values[str(node.inputs[0])].shape[-1])
    grouped = op.reshape(scores, integers([-1, num_groups, num_experts // num_groups]), False)
    best = _top(grouped, 1 if attributes["group_by"] == "best" else 2).output(0)
    value = op.reduce_sum(best, integers([-1]), False)
    chosen = _top(value, top_groups).output(1)
    hot = op.one_hot(chosen, constant(num_groups, Type.i64), scalar(1.0), scalar(0.0), -1)
    kept = op.reduce_sum(hot, integers([-2]), False)
    kept = op.greater(op.unsqueeze(kept, integers([-1])), scalar(0.0))
    masked = op.select(kept, grouped, scalar(float("-inf")))
    return op.reshape(masked, integers([-1, num_experts]), False).output(0)


@dataclass(frozen=True)
class Routing:
    """Where the pairs of a token and one of its experts are when they are sorted by expert.

    Attributes:
        tokens: [T * top_k]: the token of each sorted pair.
        experts: [T * top_k]: its expert.
        ends: [num_experts]: where each expert's pairs end.
        positions: [T * top_k]: place among the sorted pairs of each token's first expert, second expert and so on.
    """

    tokens: Out
    experts: Out
    ends: Out
    positions: Out


def _routing(ids: Out, num_experts: int, top_k: int) -> Routing:
    """Sorts by counting: a pair's place is the number of pairs of earlier experts and of earlier tokens."""
    zero, one = constant(0, Type.i32), constant(1, Type.i32)
    flat = op.reshape(op.convert(ids, Type.i32), integers([-1]), False)
    hot = op.one_hot(flat, constant(num_experts, Type.i64), one, zero, -1)
    counts = op.reduce_sum(hot, integers([0]), False)
    ends = op.cum_sum(counts, zero)
    before = op.add(op.cum_sum(hot, zero), op.subtract(op.subtract(ends, counts), one))
    positions = op.reduce_sum(op.multiply(hot, before), integers([1]), False)
    length = op.reduce_prod(op.shape_of(flat, Type.i32), integers([0]), False)
    pairs = op.range(zero, length, one, Type.i32)
    order = op.scatter_elements_update(pairs, positions, pairs, zero)
    tokens = op.floor(op.divide(order, constant(top_k, Type.i32)))
    return Routing(tokens.output(0), op.gather(flat, order, zero).output(0), ends.output(0), positions.output(0))


class Experts:
    """The experts of one node: products of the sorted pairs, each with its expert's matrix."""

    def __init__(self, building: Building, node: Node, at: int) -> None:
        """`at`: index of the node's input with the expert ids; their weights follow."""
        ids, weights = str(node.inputs[at]), str(node.inputs[at + 1])
        num_experts = int(building.values[str(node.inputs[1])].shape[0])
        self._top_k = int(building.values[ids].shape[-1])
        self._weights = building.output(weights)
        key = ("routing", ids, num_experts)
        self._routing = building.once(key, lambda: _routing(building.output(ids), num_experts, self._top_k))
        self.rows = op.gather(building.output(str(node.inputs[0])), self._routing.tokens, _zero()).output(0)

    def product(self, rows: Out, weight: Out, bias: Out | None = None) -> Out:
        """Sorted rows [pairs, in] times weight [num_experts, out, in], plus bias [num_experts, out]."""
        made = grouped_matmul(rows, weight, self._routing.ends).output(0)
        return made if bias is None else op.add(made, op.gather(bias, self._routing.experts, _zero())).output(0)

    def combined(self, results: Out) -> Sequence[Out]:
        """The sum of each token's results, weighted."""
        size = results.get_partial_shape()[1].get_length()
        own = op.gather(results, self._routing.positions, _zero())
        own = op.reshape(own, integers([-1, self._top_k, size]), False)
        weighted = op.multiply(own, op.unsqueeze(self._weights, integers([-1])))
        return [op.reduce_sum(weighted, integers([1]), False).output(0)]


def _zero() -> Out:
    return constant(0, Type.i64)


def _gated(activation: str) -> Lowering:
    def lower(building: Building, node: Node) -> Sequence[Out]:
        gate_up, down = (building.output(str(name)) for name in node.inputs[1:3])
        experts = Experts(building, node, 3)
        gate, up = halves(experts.product(experts.rows, gate_up))
        inner = op.multiply(activate(activation, gate), up).output(0)
        return experts.combined(experts.product(inner, down))

    return lower


def clamped_moe(building: Building, node: Node) -> Sequence[Out]:
    """Experts with biases and clamped gates."""
    gate_up, gate_up_bias, down, down_bias = (building.output(str(name)) for name in node.inputs[1:5])
    alpha, limit = float(node.attributes["alpha"]), float(node.attributes["limit"])
    experts = Experts(building, node, 5)
    gate, up = halves(experts.product(experts.rows, gate_up, gate_up_bias))
    gate, up = op.minimum(gate, scalar(limit)), op.clamp(up, -limit, limit)
    glu = op.multiply(gate, op.sigmoid(op.multiply(gate, scalar(alpha))))
    inner = op.multiply(op.add(up, scalar(1.0)), glu).output(0)
    return experts.combined(experts.product(inner, down, down_bias))


def ungated_moe(building: Building, node: Node) -> Sequence[Out]:
    """Experts without gates."""
    up, down = (building.output(str(name)) for name in node.inputs[1:3])
    experts = Experts(building, node, 3)
    inner = activate(str(node.attributes["activation"]), experts.product(experts.rows, up))
    return experts.combined(experts.product(inner, down))


EXPERTS: dict[str, Lowering] = {
    "select_experts": select_experts,
    "moe": _gated("silu"),
    "gelu_tanh_moe": _gated("gelu_tanh"),
    "clamped_moe": clamped_moe,
    "ungated_moe": ungated_moe,
}
