"""Recognizes errors that mean that the device's memory is full, from torch and from libraries that allocate themselves.

    torch      OutOfMemoryError; for calls of the runtime a RuntimeError with the runtime's text
    Triton     RuntimeError "Triton Error [CUDA]: out of memory" when a compiled kernel is loaded
    libraries  the status of cuBLAS, cuDNN, cuSOLVER, hipBLAS, rocBLAS ... in the text of a RuntimeError
    NCCL       DistBackendError, a RuntimeError, with the text or the number of the runtime's error
    oneAPI     RuntimeError with the name of a result of Level Zero or of its adapter

An error of Triton that a kernel needs more shared memory than the device has (OutOfResources) is not among them: fewer
requests do not help.
"""

from __future__ import annotations

import re

import torch

_TEXTS = (
    r"out of memory",  # CUDA, HIP, Triton, NCCL, XPU
    r"\b(cuda|hip)ErrorMemoryAllocation\b",
    r"\b(CUDA_ERROR|hipError|cudaError)_?OUT_?OF_?MEMORY\b",
    r"\bCU[A-Z]*_STATUS_ALLOC_FAILED\b",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT
    r"\bCUFFT_ALLOC_FAILED\b",
    r"\b(HIPBLAS|HIPBLASLT|HIPSPARSE|HIPSOLVER|MIOPEN)_STATUS_ALLOC_FAILED\b",
    r"\bmiopenStatusAllocFailed\b",
    r"\brocblas_status_memory_error\b",
    r"\b(Cuda|HIP) failure '?2\b",  # NCCL and RCCL: the number of that error
    r"\b(UR_RESULT_ERROR|ZE_RESULT_ERROR|PI_ERROR)_OUT_OF_(DEVICE|HOST)_MEMORY\b",
    r"\bPI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE\b",
    r"\bUR_RESULT_ERROR_MEM_OBJECT_ALLOCATION_FAILURE\b",
)
_TEXT = re.compile("|".join(_TEXTS), re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or the error that it was raised from, says that the device's memory is full.

    Only RuntimeErrors are recognized by their texts: any other error may mention memory that it does not lack.
    """
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and _TEXT.search(str(error)):
            return True
        error = error.__cause__
    return False
