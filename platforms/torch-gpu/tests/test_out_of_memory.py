"""Out-of-memory errors are recognized in every form, and no other error is."""

from __future__ import annotations

import pytest
import torch

from mvllm_torch_gpu.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "Triton Error [CUDA]: out of memory",
        "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 'out of memory'",
        "NCCL error: Last error: Cuda failure 2 'out of memory'",
        "Last error: HIP failure '2'",
        "cudaErrorMemoryAllocation",
        "hipErrorOutOfMemory",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "L0 error: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    ],
)
def test_texts_of_full_memory(text):
    assert is_out_of_memory(RuntimeError(text))


class OutOfResources(Exception):
    """As Triton's, which is no RuntimeError in every version."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources("out of resource: shared memory, Required: 264192, Hardware limit: 232448."),
        RuntimeError("out of resource: shared memory, Required: 264192, Hardware limit: 232448."),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("NCCL error: Last error: Cuda failure 1 'invalid argument'"),
        RuntimeError("HIP failure '200'"),
        ValueError("the prompt mentions that a device is out of memory"),
    ],
)
def test_other_errors(error):
    assert not is_out_of_memory(error)


def test_errors_of_the_allocators_and_causes():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    wrapped = ValueError("the backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)
