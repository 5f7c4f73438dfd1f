"""Writes torch (ATen) operations of a trace as array operations of a StepGraph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mvllm.extension_api.models import dtype_name
from mvllm.plugin_api import Dim, Kind, Node, PlatformError, Value
from mvllm_graph.activations import ACTIVATIONS, Elementwise

_UNARY = {
    "neg": "neg", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos",
    "logical_not": "logical_not", "bitwise_not": "logical_not",
}  # fmt: skip
_BINARY = {
    "mul": "mul", "pow": "pow", "maximum": "maximum", "minimum": "minimum", "floor_divide": "floor_div",
}  # fmt: skip
_COMPARISONS = {"eq": ("eq", False, False), "ne": ("eq", False, True), "lt": ("lt", False, False),
                "gt": ("lt", True, False), "le": ("le", False, False), "ge": ("le", True, False)}  # fmt: skip
"""Operation, whether the operands change places, whether the result is negated."""

_SAME_ELEMENTS = frozenset(
    {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_reshape_alias"}
)
_SAME_ARRAY = frozenset({"alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh"})
_VIEWS = frozenset({"slice", "select", "view", "expand", "permute", "transpose", "t", "split", "unbind", "alias"})

Names = str | list[str]


class ArrayOperationWriter:
    """The nodes of a graph while it is written.

    Args:
        dims: The size of each symbol of the trace.
        operations: Operations of the compiler: activations that are not among them become array operations. None: all.

    Attributes:
        nodes: The nodes so far.
        names: Names of the values of each traced node.
    """

    def __init__(self, dims: Mapping[Any, Dim], operations: Collection[str] | None = None) -> None:
        self._dims, self._operations = dims, operations
        self.nodes: list[Node] = []
        self.names: dict[Any, Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._count = 0

    # ------------------------------------------------------------------------------------------------------- values

    def dim(self, size: Any) -> Dim:
        """The size that an int, a SymInt, or a node of the trace stands for."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if type(size) is int:
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        symbols = list(expression.free_symbols)
        if len(symbols) != 1 or symbols[0] not in self._dims:
            raise PlatformError(f"A size of the model's graph is {expression}, which depends on several sizes.")
        symbol = symbols[0]
        factor, offset = expression.coeff(symbol, 1), expression.subs(symbol, 0)
        if expression != factor * symbol + offset:
            raise PlatformError(f"A size of the model's graph is {expression}, which is not linear.")
        known = self._dims[symbol]
        if known == "R+1":
            known, offset = "R", offset + factor
        left = str(known) if factor == 1 else f"{int(factor)}*{known}"
        return left if offset == 0 else f"{left}{int(offset):+d}"

    def shape(self, array: torch.Tensor) -> tuple[Dim, ...]:
        """The shape of an array of the trace."""
        return tuple(self.dim(size) for size in array.shape)

    def value(self, name: str, kind: Kind, array: torch.Tensor) -> Value:
        """A value like an array of the trace."""
        self._dtypes[name] = array.dtype
        return Value(name, kind, self.shape(array), dtype_name(array.dtype))

    def add(self, op: str, inputs: Sequence[str | None], like: Any, attributes: Mapping[str, Any] | None = None) -> Any:
        """Adds a node; returns the name of its result, or a list of names.

        Args:
            like: An array of the trace like the result, or a list of them.
        """
        arrays = [like] if isinstance(like, torch.Tensor) else list(like)
        outputs = []
        for array in arrays:
            outputs.append(self.value(f"v{self._count}", "result", array))
            self._count += 1
        self.nodes.append(Node(op, tuple(inputs), tuple(outputs), dict(attributes or {})))
        names = [output.name for output in outputs]
        return names[0] if isinstance(like, torch.Tensor) else names

    # --------------------------------------------------------------------------------------------------- operations

    def write(self, node: fx.Node) -> None:
        """Adds the nodes for one operation of the trace."""
        if node.target is operator.getitem:
            self.names[node] = self.names[node.args[0]][node.args[1]]
            return
        if "val" in node.meta and isinstance(node.meta["val"], int | torch.SymInt | torch.SymBool | torch.SymFloat):
            return  # a size: read where it is used
        name = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node)
        if name.endswith("_") and not name.startswith("_"):
            self._check_in_place(node, name)
            name = name[:-1]
        arguments = _arguments(node)
        self.names[node] = self._write(name, node, arguments, node.meta["val"])

    def _check_in_place(self, node: fx.Node, name: str) -> None:
        """An operation in place is one on a new array, unless a part of another array is overwritten."""
        target = node.args[0]
        if isinstance(target, fx.Node) and target.op == "call_function":
            packet = getattr(target.target, "overloadpacket", None)
            if packet is None or packet.__name__ not in _VIEWS:
                return
        raise PlatformError(
            f"The model overwrites a part of an array ({name}), which a graph cannot do. Use an operation whose result "
            "is a new array."
        )

    def _write(self, name: str, node: fx.Node, given: dict[str, Any], like: Any) -> Any:
        if name in _UNARY:
            return self.add(_UNARY[name], [self._converted(given["self"], like.dtype)], like)
        if name in ACTIVATIONS and name != "gelu":  # it has two forms, see _write_gelu
            return self._write_activation(name, given["self"], like)
        if name in _BINARY:
            return self._binary(_BINARY[name], given["self"], given.get("other", given.get("exponent")), like)
        if name in _COMPARISONS:
            return self._compare(*_COMPARISONS[name], given["self"], given["other"], like)
        if name in _SAME_ELEMENTS:
            return self.add("reshape", [self._name(given["self"])], like, {"shape": self.shape(like)})
        if name in _SAME_ARRAY:
            return self._name(given["self"])
        handler: Callable[..., Any] | None = getattr(self, f"_write_{name}", None)
        if handler is None:
            raise PlatformError(f"The model uses torch's operation {node.target}, which is no operation of graphs.")
        return handler(given, like)

    def _name(self, node: Any) -> str:
        name: str = self.names[node]
        return name

    def _converted(self, node: Any, dtype: torch.dtype) -> str:
        """The name of an array, converted to a dtype."""
        return self._as_dtype(self._name(node), node.meta["val"], dtype)

    def _as_dtype(self, name: str, array: torch.Tensor, dtype: torch.dtype) -> str:
        if self._dtypes.get(name, array.dtype) == dtype:
            return name
        found: str = self.add("to_dtype", [name], _with_dtype(array, dtype), {"dtype": dtype_name(dtype)})
        return found

    def _operands(self, x: Any, y: Any, dtype: torch.dtype) -> tuple[list[str | None], dict[str, Any]]:
        """Inputs and attributes of an operation with two operands, of which one may be a number."""
        inputs: list[str | None] = []
        attributes: dict[str, Any] = {}
        for operand in (x, y):
            if isinstance(operand, fx.Node) and isinstance(operand.meta["val"], torch.Tensor):
                inputs.append(self._converted(operand, dtype))
            else:
                number = self.dim(operand) if isinstance(operand, fx.Node | torch.SymInt) else operand
                attributes["other"] = number
                inputs.append(None)
        return inputs, attributes

    def _binary(self, op: str, x: Any, y: Any, like: torch.Tensor) -> Any:
        inputs, attributes = self._operands(x, y, like.dtype)
        return self.add(op, inputs, like, attributes)

    def _compare(self, op: str, swapped: bool, negated: bool, x: Any, y: Any, like: torch.Tensor) -> Any:
        values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (x, y)]
        inputs, attributes = self._operands(x, y, torch.result_type(*values))
        name = self.add(op, inputs[::-1] if swapped else inputs, like, attributes)
        return self.add("logical_not", [name], like) if negated else name

    def _scaled(self, operand: Any, alpha: Any, like: torch.Tensor) -> Any:
        """alpha · operand as an operand."""
        if alpha in (None, 1):
            return operand
        if not isinstance(operand, fx.Node):
            return operand * alpha
        raise PlatformError("The model adds an array with a factor (alpha), which is no operation of graphs.")

    def _write_add(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._binary("add", given["self"], self._scaled(given["other"], given.get("alpha"), like), like)

    def _write_sub(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._binary("sub", given["self"], self._scaled(given["other"], given.get("alpha"), like), like)

    def _write_rsub(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._binary("sub", self._scaled(given["other"], given.get("alpha"), like), given["self"], like)

    def _write_div(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        mode = given.get("rounding_mode")
        if mode not in (None, "floor"):
            raise PlatformError(f"The model divides with rounding_mode={mode!r}, which is no operation of graphs.")
        return self._binary("div" if mode is None else "floor_div", given["self"], given["other"], like)

    def _write_square(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._binary("mul", given["self"], given["self"], like)

    def _write_log1p(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("log", [self._binary("add", given["self"], 1.0, like)], like)

    def _write_logical_and(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("logical_and", [self._name(given["self"]), self._name(given["other"])], like)

    def _write_bitwise_and(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        if like.dtype != torch.bool:
            raise PlatformError("The model combines the bits of integers, which is no operation of graphs.")
        return self._write_logical_and(given, like)

    def _write_gelu(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._write_activation(
            "gelu_tanh" if given.get("approximate") == "tanh" else "gelu", given["self"], like
        )

    def _write_activation(self, name: str, x: Any, like: torch.Tensor) -> Any:
        """The named operation if the compiler has it, else array operations, computed in float32."""
        if self._operations is None or name in self._operations:
            return self.add(name, [self._converted(x, like.dtype)], like)
        wide = _with_dtype(like, torch.promote_types(like.dtype, torch.float32))
        steps = Elementwise(self.add, wide)
        return self._as_dtype(ACTIVATIONS[name](steps, self._converted(x, wide.dtype)), wide, like.dtype)

    def _write_softplus(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        if given.get("beta", 1) != 1 or given.get("threshold", 20) != 20:
            raise PlatformError("The model uses softplus with beta or threshold, which is no operation of graphs.")
        return self.add("softplus", [self._name(given["self"])], like)

    def _write__softmax(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("softmax", [self._converted(given["self"], like.dtype)], like, {"dim": _dim(given, like)})

    def _write_where(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        inputs, attributes = self._operands(given["self"], given["other"], like.dtype)
        return self.add("where", [self._name(given["condition"]), *inputs], like, attributes)

    def _write_masked_fill(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        inputs, attributes = self._operands(given["value"], given["self"], like.dtype)
        return self.add("where", [self._name(given["mask"]), *inputs], like, attributes)

    def _write_clamp(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        bounds = {"min": given.get("min"), "max": given.get("max")}
        if any(isinstance(bound, fx.Node) for bound in bounds.values()):
            raise PlatformError("The model clamps with bounds that are arrays, which is no operation of graphs.")
        return self.add("clamp", [self._converted(given["self"], like.dtype)], like, bounds)

    _write_clamp_min = _write_clamp_max = _write_clamp

    def _reduce(self, op: str, given: dict[str, Any], like: torch.Tensor) -> Any:
        rank = given["self"].meta["val"].dim()
        dims = given.get("dim")
        dims = range(rank) if dims is None or dims == [] else dims
        dims = tuple(dim % rank for dim in ([dims] if isinstance(dims, int) else dims))
        attributes = {"dims": dims, "keepdim": bool(given.get("keepdim", False))}
        return self.add(op, [self._converted(given["self"], like.dtype)], like, attributes)

    def _write_sum(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._reduce("sum", given, like)

    def _write_mean(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._reduce("mean", given, like)

    def _write_amax(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._reduce("max", given, like)

    def _write_topk(self, given: dict[str, Any], like: Any) -> Any:
        return self.add("topk", [self._name(given["self"])], like, {"k": self.dim(given["k"]), "dim": _dim(given)})

    def _write_cumsum(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("cumsum", [self._converted(given["self"], like.dtype)], like, {"dim": _dim(given)})

    # ------------------------------------------------------------------------------------------------------ products

    def _write_mm(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("matmul", [self._name(given["self"]), self._name(given["mat2"])], like)

    _write_bmm = _write_mm

    def _write_addmm(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        product = self.add("matmul", [self._name(given["mat1"]), self._name(given["mat2"])], like)
        return self.add("add", [product, self._name(given["self"])], like)

    def _write_embedding(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._write_index({"self": given["weight"], "indices": [given["indices"]]}, like)

    # -------------------------------------------------------------------------------------------------------- shapes

    def _write_permute(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        dims = tuple(dim % like.dim() for dim in given["dims"])
        return self.add("permute", [self._name(given["self"])], like, {"dims": dims})

    def _write_transpose(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        dims = list(range(like.dim()))
        a, b = given["dim0"] % like.dim(), given["dim1"] % like.dim()
        dims[a], dims[b] = b, a
        return self.add("permute", [self._name(given["self"])], like, {"dims": tuple(dims)})

    def _write_t(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("permute", [self._name(given["self"])], like, {"dims": tuple(range(like.dim()))[::-1]})

    def _write_expand(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self.add("expand", [self._name(given["self"])], like, {"shape": self.shape(like)})

    def _slice(self, name: str, like: torch.Tensor, dim: int, start: Dim, stop: Dim, step: int = 1) -> str:
        attributes = {"dim": dim, "start": start, "stop": stop, "step": step}
        found: str = self.add("slice", [name], like, attributes)
        return found

    def _write_slice(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        array = given["self"].meta["val"]
        dim, size = given.get("dim", 0) % array.dim(), self.dim(array.shape[given.get("dim", 0)])
        start, stop = (given.get(key) for key in ("start", "end"))
        start, stop = (None if bound is None else self.dim(bound) for bound in (start, stop))
        start = 0 if start is None else start
        if isinstance(stop, int) and (stop >= 2**31 or (isinstance(size, int) and stop > size)):
            stop = size
        stop = size if stop is None else stop
        if isinstance(size, int):
            start = start + size if isinstance(start, int) and start < 0 else start
            stop = stop + size if isinstance(stop, int) and stop < 0 else stop
        if any(isinstance(bound, int) and bound < 0 for bound in (start, stop)):
            raise PlatformError("The model takes the last elements of a size of the step, which graphs do not have.")
        if start == 0 and stop == size and given.get("step", 1) == 1:
            return self._name(given["self"])
        return self._slice(self._name(given["self"]), like, dim, start, stop, given.get("step", 1))

    def _write_select(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        array = given["self"].meta["val"]
        dim, index = given["dim"] % array.dim(), given["index"]
        index = index + int(array.shape[dim]) if index < 0 else index
        row = self._slice(self._name(given["self"]), array.narrow(dim, index, 1), dim, index, index + 1)
        return self.add("reshape", [row], like, {"shape": self.shape(like)})

    def _write_split(self, given: dict[str, Any], like: Sequence[torch.Tensor]) -> Any:
        dim, start, names = given.get("dim", 0) % like[0].dim(), 0, []
        for part in like:
            stop = start + int(part.shape[dim])
            names.append(self._slice(self._name(given["self"]), part, dim, start, stop))
            start = stop
        return names

    _write_split_with_sizes = _write_chunk = _write_split

    def _write_unbind(self, given: dict[str, Any], like: Sequence[torch.Tensor]) -> Any:
        array = given["self"].meta["val"]
        dim = given.get("dim", 0) % array.dim()
        names = []
        for i, part in enumerate(like):
            row = self._slice(self._name(given["self"]), array.narrow(dim, i, 1), dim, i, i + 1)
            names.append(self.add("reshape", [row], part, {"shape": self.shape(part)}))
        return names

    def _write_cat(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        parts = [self._converted(part, like.dtype) for part in given["tensors"]]
        return self.add("cat", parts, like, {"dim": given.get("dim", 0) % like.dim()})

    def _write_stack(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        dim, parts = given.get("dim", 0) % like.dim(), []
        for part in given["tensors"]:
            array = part.meta["val"].unsqueeze(dim)
            parts.append(self.add("reshape", [self._name(part)], array, {"shape": self.shape(array)}))
        return self.add("cat", parts, like, {"dim": dim})

    def _write_index_select(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        inputs = [self._name(given["self"]), self._name(given["index"])]
        return self.add("index_select", inputs, like, {"dim": given["dim"] % given["self"].meta["val"].dim()})

    def _write_index(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        found = [(dim, index) for dim, index in enumerate(given["indices"]) if index is not None]
        if len(found) != 1 or found[0][1].meta["val"].dtype == torch.bool:
            raise PlatformError("The model indexes an array with several arrays, which is no operation of graphs.")
        dim, index = found[0]
        name, array = self._name(index), index.meta["val"]
        if array.dim() == 1:
            return self.add("index_select", [self._name(given["self"]), name], like, {"dim": dim})
        flat = array.reshape(-1)
        name = self.add("reshape", [name], flat, {"shape": self.shape(flat)})
        rows = like.flatten(dim, dim + array.dim() - 1)
        rows_name = self.add("index_select", [self._name(given["self"]), name], rows, {"dim": dim})
        return self.add("reshape", [rows_name], like, {"shape": self.shape(like)})

    def _write_gather(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        inputs = [self._name(given["self"]), self._name(given["index"])]
        return self.add("gather", inputs, like, {"dim": given["dim"] % like.dim()})

    def _write_scatter(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        source = given.get("src", given.get("value"))
        inputs: list[str | None] = [self._name(given["self"]), self._name(given["index"])]
        attributes: dict[str, Any] = {"dim": given["dim"] % like.dim()}
        if isinstance(source, fx.Node):
            inputs.append(self._converted(source, like.dtype))
        else:
            inputs.append(None)
            attributes["other"] = source
        return self.add("scatter", inputs, like, attributes)

    # ---------------------------------------------------------------------------------------------- dtypes, creation

    def _write__to_copy(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._converted(given["self"], like.dtype)

    _write_to = _write__to_copy

    def _write_full(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._full(given.get("fill_value"), like)

    _write_full_like = _write_new_full = _write_full

    def _write_zeros(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._full(0, like)

    _write_zeros_like = _write_new_zeros = _write_new_empty = _write_empty_like = _write_empty = _write_zeros

    def _write_ones(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._full(1, like)

    _write_ones_like = _write_new_ones = _write_ones

    def _write_scalar_tensor(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        return self._full(given["s"], like)

    def _full(self, value: Any, like: torch.Tensor) -> Any:
        attributes = {"shape": self.shape(like), "value": value, "dtype": dtype_name(like.dtype)}
        return self.add("full", [], like, attributes)

    def _write_arange(self, given: dict[str, Any], like: torch.Tensor) -> Any:
        start, stop, step = given.get("start", 0), given["end"], given.get("step", 1)
        attributes = {"start": self.dim(start), "stop": self.dim(stop), "step": step, "dtype": dtype_name(like.dtype)}
        return self.add("arange", [], like, attributes)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema, without defaults."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _dim(given: Mapping[str, Any], like: torch.Tensor | None = None) -> int:
    array = given["self"].meta["val"]
    return int(given.get("dim", -1)) % int(array.dim())


def _with_dtype(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(array, dtype=dtype)
