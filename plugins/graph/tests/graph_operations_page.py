"""docs/reference/graph-operations.md: the operations of models as graphs.

python -m plugins.graph.tests.graph_operations_page    writes the page from the source of the operations
"""

from __future__ import annotations

from pathlib import Path

from mvllm_graph.operations import GRAPH_OPERATIONS, GraphOperation

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "graph-operations.md"
HEAD = """\
# Operations of models as graphs

On a platform with a graph compiler, mvllm-graph traces a model to a `StepGraph` of these operations.
`mvllm ops --graph --platform NAME` shows which of them a platform translates;
`mvllm ops --graph NAME` prints the definition of one.

| group | what it is |
|---|---|
| named | Operations of models, as in [operations](operations.md). |
| optional | Fused operations. They occur in a graph only if the compiler names them. |
| attention | Paged attention. Every model with attention needs it. |
| collective | Over tensor-parallel ranks. Core cuts graphs there, unless the compiler names them. |
| array | A closed set of elementwise operations, reductions and changes of shape. |

The column *if left out* says what happens to a named operation that `GraphCompiler.operations` does
not name. `traced`: core traces it as the array operations of its definition. `refused`: a model with
the operation does not start on the platform. The array operations and `paged_attention` are needed.

Inputs are arrays, in the order of the parameters; an optional one may be absent. Parameters that are
no arrays are attributes. A weight that is a dataclass is flattened: the inputs of
`quantized_linear` are `x`, `weight.values`, `weight.scales`, `weight.zero_points` and `bias`, its
attributes `weight.group_size`, `weight.bits` and `weight.int8_activations`. An operation on a
sequence state gets the state as an input of kind `state`, which it updates; `max_query_len` is a
field of `StepSizes`. All other results are new arrays.

Two inputs of an elementwise array operation have one dtype and are broadcast. One of them may be
absent, the first or the second; the attribute `other` is then that operand, rounded to the dtype of
the array. Shapes in attributes have no -1, and dimensions are not negative.

Made from the source: `python -m plugins.graph.tests.graph_operations_page`.
"""
GROUPS = ("named", "optional", "attention", "collective", "array")


def page() -> str:
    """The complete page."""
    return "\n".join([HEAD, *(section(group) for group in GROUPS)])


def section(group: str) -> str:
    """The operations of one group."""
    rows = [op for op in GRAPH_OPERATIONS.values() if op.group == group]
    if group == "attention":
        [attention] = rows
        return f"## {group}\n\n### {attention.name}\n\n```text\n{attention.definition}\n```\n"
    column = ("| if left out ", "|---") if group == "named" else ("", "")
    lines = [f"## {group}", "", f"| operation {column[0]}| parameters | result |", f"|---{column[1]}|---|---|"]
    lines += map(row, rows)
    return "\n".join(lines) + "\n"


def row(op: GraphOperation) -> str:
    """One operation in a table."""
    summary = op.summary.replace("|", "\\|")
    left_out = "" if op.if_left_out is None else f" {op.if_left_out} |"
    return f"| `{op.name}` |{left_out} {', '.join(f'`{name}`' for name in op.parameters)} | {summary} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
