"""Imports Triton with its interpreter, which computes with numpy on the host instead of a device.

Triton reads TRITON_INTERPRET when it decorates a function. So Triton's own library and every kernel here are imported
while the variable is set; it is unset afterwards, so that child processes do not inherit it. The first import applies
to the whole process, which cannot use Triton without the interpreter.

Raises ImportError without Triton.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
from types import SimpleNamespace

import numpy as np
import torch

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton.language as tl
    from triton.runtime import interpreter

    importlib.import_module("triton.experimental.gluon")  # imported at the first launch; it reads the variable, too
    import mvllm_triton
    import mvllm_triton.kernels

    for _package in (mvllm_triton.kernels, mvllm_triton):
        for _module in pkgutil.iter_modules(_package.__path__):
            importlib.import_module(f"{_package.__name__}.{_module.name}")
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before
if not isinstance(tl.sum, interpreter.InterpretedFunction):
    raise RuntimeError(
        "Something has imported Triton without its interpreter. Give these tests a process of their own: "
        "pytest platforms/triton-kernels/tests platforms/torch-gpu/tests platforms/cuda/tests platforms/xpu/tests"
    )

# Triton 3.7's interpreter stores bfloat16 and float8 as integers. It multiplies matrices of these integers, and rounds
# to these dtypes by dropping bits. Devices round to nearest, as these replacement methods do.
_ROUNDED = {
    tl.bfloat16: (np.int16, torch.bfloat16),
    tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
    tl.float8e5: (np.uint8, torch.float8_e5m2),
}


def _cast(builder, source, dtype, rounding=None):
    found, wanted = source.dtype.scalar, dtype.scalar
    data = _numbers(source)
    if wanted in _ROUNDED:
        bits, rounded = _ROUNDED[wanted]
        number = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(rounded)
        data = number.view(torch.uint8 if bits == np.uint8 else torch.int16).numpy()
        data = data.view(interpreter._get_np_dtype(wanted))
    else:
        assert found in _ROUNDED or rounding is None
        data = data.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(data, wanted)


def _numbers(handle):
    """Values of a handle in a dtype that numpy computes with."""
    if handle.dtype.scalar not in _ROUNDED:
        return handle.data
    bits, rounded = _ROUNDED[handle.dtype.scalar]
    data = torch.from_numpy(np.ascontiguousarray(handle.data).view(bits))
    return data.view(rounded).float().numpy()


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_fp_to_fp = _cast
interpreter.InterpreterBuilder.create_dot = _dot


# The interpreter's own work took two thirds of the time of a kernel. None of these replacements changes a result.

_patch = interpreter._patch_lang
_numpy_dtype = functools.cache(interpreter._get_np_dtype)


@functools.cache
def _patch_language():
    """Replaces the functions of triton.language with the interpreter's, for the rest of the process."""
    _patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_once(function):
    """Stands in for the interpreter's patch, which lists all members of triton.language at each call of a function."""
    _patch_language()
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
# The interpreter's own fills a dictionary of all dtypes in each call. Types of pointers cannot be hashed.
interpreter._get_np_dtype = lambda dtype: np.dtype(np.uint64) if dtype.scalar.is_ptr() else _numpy_dtype(dtype.scalar)
# Without the option `debug` the checks of sums and products of integers are computed, and their results are dropped.
assert not interpreter.interpreter_builder.options.debug
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
