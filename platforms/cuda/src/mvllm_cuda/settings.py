"""The CUDA platform's own environment variables (MVLLM_CUDA_*).

MVLLM_CUDA_COMPILE   graphs (default): decode steps are captured in CUDA graphs
                     inductor: torch.compile fuses the model's operations first, then as above
                     none: neither; `--enforce-eager` does the same on any platform
MVLLM_CUDA_SUMS      direct (default): all-reduce of small tensors through memory that ranks map from each other, if a
                     trial at start-up gives NCCL's sums on all ranks
                     nccl: NCCL's all-reduce for all tensors
MVLLM_CUDA_LINEAR    measured (default): unquantized products of few rows use the faster of torch's library and a kernel
                     torch, triton: always one of them
"""

from __future__ import annotations

from mvllm_torch_gpu.settings import Settings

SETTINGS = Settings(prefix="MVLLM_CUDA", library="nccl", direct_by_default=True)
