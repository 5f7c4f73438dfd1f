"""Kernels for operations of torch that models use between this package's operations.

A step that contains an operation of torch cannot be replayed. While a step is recorded, these kernels replace torch's

    x + y, x - y, x * y, x / y        elementwise, of up to four dimensions, with broadcasting
    x * 2.5, x + 2.5, x - 2.5         with a number
    ids + 1, ids >= n, torch.where    of integers, and the choice of whole rows
    x.to(dtype)                       between floating-point dtypes
    x.reshape(...), torch.cat(...)    and others that copy elements to other places
    x.index_select(-1, order)         elements in another order: x [T, size] or [T, heads, size]
    table.index_select(0, ids)        rows of a table; likewise table[ids]

Results are bit-identical to torch's, except for the bits of NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel

ARITHMETIC = ("convert", "add", "subtract", "multiply", "divide")
"""In the order of `Arithmetic` in csrc/strided.h."""

INTEGERS = (
    *("sum", "difference", "product", "greater", "greater_equal", "less", "less_equal", "equal", "larger", "smaller"),
)
"""In the order of `IntegerOperation` in csrc/strided.h."""

COMPARISONS = {"gt": 3, "ge": 4, "lt": 5, "le": 6, "eq": 7}
"""Torch's names of comparisons, and their place in `INTEGERS`."""

WHOLE = (torch.bool, torch.int32, torch.int64)
"""Dtypes of integers and truth values."""

MAX_DIMS = 4
"""As in csrc/strided.h."""

COPIES = frozenset(
    ("aten::reshape", "aten::flatten.using_ints", "aten::contiguous", "aten::clone", "aten::_unsafe_view")
)
"""Operations whose result has the elements of the first argument in the same order."""


class RecordableTorchOps:
    """The kernels, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._add = Kernel(library, "mvllm_cpu_add", (pointer, pointer, pointer, length, number))
        self._scale = Kernel(library, "mvllm_cpu_scale", (pointer, ctypes.c_float, pointer, length, number))
        places = (*(length,) * (3 * MAX_DIMS),)
        elementwise = (pointer, pointer, pointer, *places, number, number, number, number)
        self._elementwise = Kernel(library, "mvllm_cpu_elementwise", elementwise)
        self._copy = Kernel(library, "mvllm_cpu_copy", (pointer, pointer, *places, number))
        heads = (pointer, length, length, length, pointer, pointer, length, length, number)
        self._take_columns = Kernel(library, "mvllm_cpu_take_columns", heads)
        lookup = (pointer, number, pointer, length, pointer, length, length, length, length)
        self._embedding = Kernel(library, "mvllm_cpu_embedding", lookup)
        integers = (pointer, pointer, length, pointer, length, number, number, number, number)
        self._integers = Kernel(library, "mvllm_cpu_integers", integers)
        choice = (pointer, pointer, length, pointer, length, pointer, length, length)
        self._choose_rows = Kernel(library, "mvllm_cpu_choose_rows", choice)
        self._numbers: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # recorded calls read them
        self._whole_numbers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        # Each with the numbers of arguments that it takes; torch leaves out those with their default values.
        self._functions: dict[str, tuple[Callable[..., torch.Tensor | None], tuple[int, ...]]] = {
            "aten::add.Tensor": (self._sum, (2,)),
            "aten::sub.Tensor": (self._difference, (2,)),
            "aten::mul.Tensor": (self._product, (2,)),
            "aten::div.Tensor": (self._quotient, (2,)),
            "aten::to.dtype": (self._converted, (2,)),
            **{
                f"aten::{name}.{form}": (self._comparison(code), (2,))
                for name, code in COMPARISONS.items()
                for form in ("Scalar", "Tensor")
            },
            "aten::maximum": (partial(self._of_integers, INTEGERS.index("larger")), (2,)),
            "aten::clamp": (self._bounded_below, (2,)),
            "aten::where.self": (self._chosen, (3,)),
            "aten::where.ScalarSelf": (self._chosen, (3,)),
            "aten::cat": (self._joined, (1, 2)),
            "aten::index_select": (self._selected, (3,)),
            "aten::index.Tensor": (self._indexed, (2,)),
        }

    def compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Tensor | None:
        """The result of an operation; None if no kernel computes it.

        Args:
            name: The operation's name as torch reports it, such as `aten::add.Tensor`.
            args, kwargs: Its arguments.
        """
        if name == "aten::_to_copy" and kwargs and [*kwargs] == ["dtype"]:
            return self._converted(args[0], kwargs["dtype"])
        if name == "aten::ones_like" and [*(kwargs or {})] in ([], ["pin_memory"]):
            return self._ones(args[0])
        known = self._functions.get(name)
        if known is None or kwargs or len(args) not in known[1]:
            return None
        return known[0](*args)

    def copy(self, name: str, args: tuple[Any, ...], result: Any) -> torch.Tensor | None:
        """The result of an operation that copies, made by a kernel; None if it is no such operation.

        Args:
            name, args: As for `compute`.
            result: What torch returned, in memory of its own.
        """
        if name not in COPIES or not isinstance(result, torch.Tensor) or not result.is_contiguous():
            return None
        out = torch.empty(result.shape, dtype=result.dtype)
        # The result's elements are those of the argument in order, so both are written in the argument's shape.
        return out if self._copied(args[0], out.view(args[0].shape)) else None

    def _copied(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Copies elements between tensors of the same shape; False if no kernel does."""
        place = _dimensions(x.shape, x.stride(), out.stride())
        if place is None or x.dtype != out.dtype or x.element_size() > 8 or not x.numel():
            return False
        self._copy(x.data_ptr(), out.data_ptr(), *place, x.element_size())
        return True

    def _sum(self, x: Any, other: Any) -> torch.Tensor | None:
        if _has_kernel(x) and _has_kernel(other) and other.shape == x.shape and other.dtype == x.dtype:
            out = torch.empty_like(x)
            self._add(x.data_ptr(), other.data_ptr(), out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
            return out
        if _is_whole(x):
            return self._of_integers(INTEGERS.index("sum"), x, other)
        return self._with_number("add", x, other) if isinstance(other, int | float) else self._computed("add", x, other)

    def _with_number(self, operation: str, x: Any, number: float) -> torch.Tensor | None:
        """The result of an elementwise operation on a tensor and a number, which torch rounds before sums only."""
        if not _is_floats(x):
            return None
        dtype = torch.float32 if operation == "multiply" else x.dtype
        other = self._numbers.setdefault((number, dtype), torch.tensor([number], dtype=dtype))
        return self._run(operation, x, other, x.dtype, _dimensions(x.shape, x.stride(), [0] * x.dim()), x.shape)

    def _difference(self, x: Any, other: Any) -> torch.Tensor | None:
        if _is_whole(x):
            return self._of_integers(INTEGERS.index("difference"), x, other)
        if isinstance(other, int | float):
            return self._with_number("subtract", x, other)
        return self._computed("subtract", x, other)

    def _quotient(self, x: Any, other: Any) -> torch.Tensor | None:
        return self._computed("divide", x, other)

    def _product(self, x: Any, other: Any) -> torch.Tensor | None:
        if _is_whole(x) and not isinstance(other, float):
            return self._of_integers(INTEGERS.index("product"), x, other)
        if not isinstance(other, int | float):
            return self._computed("multiply", x, other)
        if not _has_kernel(x):
            return self._with_number("multiply", x, other)
        out = torch.empty_like(x)
        self._scale(x.data_ptr(), other, out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
        return out

    def _computed(self, operation: str, x: Any, other: Any) -> torch.Tensor | None:
        """The result of an elementwise operation on two tensors."""
        if not _is_floats(x) or not _is_floats(other):
            return None
        try:
            shape = torch.broadcast_shapes(x.shape, other.shape)
        except RuntimeError:
            return None
        strides = x.expand(shape).stride(), other.expand(shape).stride()
        dtype = torch.promote_types(x.dtype, other.dtype)
        return self._run(operation, x, other, dtype, _dimensions(shape, *strides), shape)

    def _converted(self, x: Any, dtype: Any) -> torch.Tensor | None:
        if not _is_floats(x) or dtype not in DTYPE_CODES or dtype == x.dtype:
            return None
        return self._run("convert", x, None, dtype, _dimensions(x.shape, x.stride(), x.stride()), x.shape)

    def _ones(self, x: torch.Tensor) -> torch.Tensor | None:
        out = torch.empty_like(x)
        one = self._numbers.setdefault((1, x.dtype), torch.ones(1, dtype=x.dtype))
        return out if _is_floats(x) and self._copied(one.expand(x.shape), out) else None

    def _run(
        self,
        operation: str,
        x: torch.Tensor,
        other: torch.Tensor | None,
        dtype: torch.dtype,
        place: Sequence[int] | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        if place is None:
            return None
        out = torch.empty(shape, dtype=dtype)
        codes = DTYPE_CODES[x.dtype], DTYPE_CODES[x.dtype if other is None else other.dtype], DTYPE_CODES[dtype]
        address = None if other is None else other.data_ptr()
        self._elementwise(x.data_ptr(), address, out.data_ptr(), *place, ARITHMETIC.index(operation), *codes)
        return out

    def _comparison(self, operation: int) -> Callable[..., torch.Tensor | None]:
        return partial(self._of_integers, operation, dtype=torch.bool)

    def _bounded_below(self, x: Any, bound: Any) -> torch.Tensor | None:
        return self._of_integers(INTEGERS.index("larger"), x, bound)

    def _of_integers(
        self, operation: int, x: Any, other: Any, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """The result of an elementwise operation on integers: two tensors of one shape, or a tensor and a number."""
        is_number = isinstance(other, int)
        if not _is_whole(x) or not (is_number or (_is_whole(other) and other.shape == x.shape)):
            return None
        dtype = torch.result_type(x, other) if dtype is None else dtype
        out = torch.empty(x.shape, dtype=dtype)
        self._integers(
            x.data_ptr(),
            None if is_number else other.data_ptr(),
            int(other) if is_number else 0,
            out.data_ptr(),
            x.numel(),
            operation,
            x.element_size(),
            0 if is_number else other.element_size(),
            out.element_size(),
        )
        return out

    def _chosen(self, condition: Any, x: Any, y: Any) -> torch.Tensor | None:
        """`torch.where` for whole rows: condition [T, 1, ...], x and y [T, ...]; x may be a number."""
        if not isinstance(y, torch.Tensor) or not y.is_contiguous() or condition.dtype != torch.bool:
            return None
        if condition.dim() != y.dim() or condition.numel() != len(y) or not condition.is_contiguous() or not len(y):
            return None
        row_bytes = y[0].numel() * y.element_size()
        if isinstance(x, int) and y.dtype in WHOLE and y.dim() == 1:
            x, x_stride = self._whole_numbers.setdefault((x, y.dtype), torch.tensor([x], dtype=y.dtype)), 0
        elif isinstance(x, torch.Tensor) and x.is_contiguous() and x.shape == y.shape and x.dtype == y.dtype:
            x_stride = row_bytes
        else:
            return None
        out = torch.empty_like(y)
        self._choose_rows(
            *(condition.data_ptr(), x.data_ptr(), x_stride, y.data_ptr(), row_bytes, out.data_ptr(), len(y), row_bytes)
        )
        return out

    def _joined(self, tensors: Any, dim: Any = 0) -> torch.Tensor | None:
        if not tensors or any(t.dtype != tensors[0].dtype or not t.numel() for t in tensors):
            return None
        shapes = [list(t.shape) for t in tensors]
        shape, dim = [*shapes[0]], dim % tensors[0].dim()
        shape[dim] = sum(each[dim] for each in shapes)
        out = torch.empty(shape, dtype=tensors[0].dtype)
        start = 0
        for tensor in tensors:
            if not self._copied(tensor, out.narrow(dim, start, tensor.shape[dim])):
                return None
            start += tensor.shape[dim]
        return out

    def _selected(self, x: Any, dim: Any, ids: Any) -> torch.Tensor | None:
        if not isinstance(x, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
            return None
        if dim == 0 and x.is_contiguous():
            return self._rows(x, ids)
        if x.dtype not in DTYPE_CODES or x.dim() not in (2, 3) or dim not in (-1, x.dim() - 1):
            return None
        if ids.dtype != torch.int64 or x.stride(-1) != 1 or not x.numel():
            return None
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        out = torch.empty((*x.shape[:-1], len(ids)), dtype=x.dtype)
        self._take_columns(
            heads.data_ptr(),
            heads.stride(0),
            heads.shape[1],
            heads.stride(1),
            ids.data_ptr(),
            out.data_ptr(),
            len(heads),
            len(ids),
            x.element_size(),
        )
        return out

    def _indexed(self, x: Any, places: Any) -> torch.Tensor | None:
        is_lookup = len(places) == 1 and isinstance(places[0], torch.Tensor) and x.is_contiguous()
        if not is_lookup or places[0].dtype not in (torch.int32, torch.int64) or not places[0].is_contiguous():
            return None
        return self._rows(x, places[0])

    def _rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a contiguous tensor, [*ids.shape, *row]. Ids are valid: models compute them."""
        out = torch.empty((*ids.shape, *table.shape[1:]), dtype=table.dtype)
        row_bytes = table[0].numel() * table.element_size()
        wide = ids.dtype == torch.int64
        self._embedding(
            ids.data_ptr(), wide, table.data_ptr(), row_bytes, out.data_ptr(), ids.numel(), row_bytes, 0, len(table)
        )
        return out


def _dimensions(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """Sizes and both tensors' strides, as four dimensions each; None if there are more.

    Dimensions of one element are left out, and adjacent ones are merged where both tensors permit.
    """
    merged: list[tuple[int, int, int]] = []
    for size, a, b in zip(shape, first, second, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * a and merged[-1][2] == size * b:
            merged[-1] = merged[-1][0] * size, a, b
        else:
            merged.append((size, a, b))
    if len(merged) > MAX_DIMS:
        return None
    padded = [(1, 0, 0)] * (MAX_DIMS - len(merged)) + merged
    return tuple(number for kind in zip(*padded, strict=True) for number in kind)


def _has_kernel(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in DTYPE_CODES and x.is_contiguous()


def _is_whole(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in WHOLE and x.is_contiguous() and x.dim() > 0


def _is_floats(x: Any) -> bool:
    """Whether it is a tensor of elements that kernels compute with. Torch promotes tensors without dimensions apart."""
    return isinstance(x, torch.Tensor) and x.dtype in DTYPE_CODES and x.dim() > 0 and x.numel() > 0
