"""The ROCm platform's own environment variables (MVLLM_ROCM_*).

MVLLM_ROCM_COMPILE   graphs (default): decode steps are captured in HIP graphs
                     inductor: torch.compile fuses the model's operations first, then as above
                     none: neither; `--enforce-eager` does the same on any platform
MVLLM_ROCM_SUMS      rccl (default): RCCL's all-reduce
                     direct: all-reduce of small tensors through memory that ranks map from each other, if that works
MVLLM_ROCM_ATTENTION measured (default): the Triton kernels, or an installed library, whichever is fastest for the step
                     triton: the Triton kernels
                     flash_attn, flashinfer: that library for every step that it supports
MVLLM_ROCM_LINEAR    measured (default): unquantized products of few rows use the faster of torch's library and a kernel
                     torch, triton: always one of them
"""

from __future__ import annotations

from mvllm_torch_gpu.settings import Settings

SETTINGS = Settings(prefix="MVLLM_ROCM", library="rccl", attentions=("measured", "triton", "flash_attn", "flashinfer"))
