"""Lowerings of mixtures of experts.

Every expert computes every token, as one batched product; the tokens' shares of the experts, most of them zero, weight
the results. A runtime of its own for experts would gather; OpenVINO's processor plugin has no such operation for graphs
made by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from openvino import Type
from openvino import opset15 as op

from mvllm.plugin_api.graph import Node
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
    kept = _one_hot_sum(chosen, num_groups, None)
    kept = op.greater(op.unsqueeze(kept, integers([-1])), scalar(0.0))
    masked = op.select(kept, grouped, scalar(float("-inf")))
    return op.reshape(masked, integers([-1, num_experts]), False).output(0)


def _one_hot_sum(ids: Out, size: int, weights: Out | None) -> Out:
    """[T, size]: the sum of the weights, or of ones, of the entries of each row of ids [T, k]."""
    hot = op.one_hot(ids, constant(size, Type.i64), scalar(1.0), scalar(0.0), -1)
    if weights is not None:
        hot = op.multiply(hot, op.unsqueeze(weights, integers([-1])))
    return op.reduce_sum(hot, integers([-2]), False).output(0)


def _experts(x: Out, weight: Out, bias: Out | None) -> Out:
    """Every token times every expert's matrix: [E, T, out]. x: [T, in] or [E, T, in]; weight: [E, out, in]."""
    made = op.matmul(x, weight, False, True).output(0)
    return made if bias is None else op.add(made, op.unsqueeze(bias, integers([1]))).output(0)


def _combined(building: Building, node: Node, results: Out, routing: int) -> Sequence[Out]:
    """The sum over the experts of results [E, T, hidden] times the tokens' shares.

    Args:
        routing: Index of the node's input with the expert ids; their weights follow.
    """
    ids, weights = str(node.inputs[routing]), str(node.inputs[routing + 1])
    num_experts = int(building.values[str(node.inputs[1])].shape[0])

    def shares() -> Out:
        share = _one_hot_sum(building.output(ids), num_experts, building.output(weights))
        return op.unsqueeze(op.transpose(share, integers([1, 0])), integers([-1])).output(0)

    share = building.once(("shares", ids, weights), shares)
    return [op.reduce_sum(op.multiply(results, share), integers([0]), False).output(0)]


def _gated(activation: str) -> Lowering:
    def lower(building: Building, node: Node) -> Sequence[Out]:
        x, gate_up, down = building.inputs(node)[:3]
        rows = op.unsqueeze(x, integers([0])).output(0)
        gate, up = halves(_experts(rows, gate_up, None))
        inner = op.multiply(activate(activation, gate), up).output(0)
        return _combined(building, node, _experts(inner, down, None), 3)

    return lower


def clamped_moe(building: Building, node: Node) -> Sequence[Out]:
    """Experts with biases and clamped gates."""
    x, gate_up, gate_up_bias, down, down_bias = building.inputs(node)[:5]
    alpha, limit = float(node.attributes["alpha"]), float(node.attributes["limit"])
    rows = op.unsqueeze(x, integers([0])).output(0)
    gate, up = halves(_experts(rows, gate_up, gate_up_bias))
    gate = op.minimum(gate, scalar(limit))
    up = op.clamp(up, -limit, limit)
    glu = op.multiply(gate, op.sigmoid(op.multiply(gate, scalar(alpha))))
    inner = op.multiply(op.add(up, scalar(1.0)), glu).output(0)
    return _combined(building, node, _experts(inner, down, down_bias), 5)


def ungated_moe(building: Building, node: Node) -> Sequence[Out]:
    """Experts without gates."""
    x, up, down = building.inputs(node)[:3]
    rows = op.unsqueeze(x, integers([0])).output(0)
    inner = activate(str(node.attributes["activation"]), _experts(rows, up, None))
    return _combined(building, node, _experts(inner, down, None), 3)


EXPERTS: dict[str, Lowering] = {
    "select_experts": select_experts,
    "moe": _gated("silu"),
    "gelu_tanh_moe": _gated("gelu_tanh"),
    "clamped_moe": clamped_moe,
    "ungated_moe": ungated_moe,
}
