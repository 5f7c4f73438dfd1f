"""The XPU platform's own environment variables (MVLLM_XPU_*).

MVLLM_XPU_COMPILE   none (default): the model's operations run eagerly, as with `--enforce-eager`
                    graphs: decode steps are captured in XPU graphs, if torch has them
                    inductor: torch.compile fuses the model's operations first, then as above
MVLLM_XPU_LINEAR    torch (default): torch's library computes unquantized products
                    triton: a Triton kernel computes those of few rows
"""

from __future__ import annotations

from mvllm_torch_gpu.settings import Settings

SETTINGS = Settings(
    prefix="MVLLM_XPU",
    library=None,
    compile_modes=("none", "graphs", "inductor"),
    attentions=("triton",),
    linears=("torch", "triton"),
)
