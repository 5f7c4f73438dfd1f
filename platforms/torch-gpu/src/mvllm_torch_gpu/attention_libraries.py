"""The attention libraries that are installed and support a layer; none is required.

All of them read the cache that the Triton kernels write, so each step may use any of them. The layers that a library
supports are derived from the parameters of its functions and from its documentation of sizes and dtypes.

    flash_attn    FlashAttention 2; blocks are multiples of 256 tokens
    varlen_attn   torch's own, with FlashAttention 3
    flashinfer    plans on the host; prompts, and decode steps of the sizes that are captured
    cudnn         torch's own; long prompts
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from mvllm.plugin_api import AttentionSpec, get_logger
from mvllm_torch_gpu.attention_library import AttentionLibrary
from mvllm_torch_gpu.cudnn_attention import CudnnAttention
from mvllm_torch_gpu.flash_attention import FlashAttention, VarlenAttention
from mvllm_torch_gpu.flashinfer_attention import FlashInfer

logger = get_logger("mvllm.torch_gpu.attention_libraries")

LIBRARIES: tuple[type[AttentionLibrary], ...] = (FlashAttention, VarlenAttention, FlashInfer, CudnnAttention)


def libraries_for(spec: AttentionSpec, names: tuple[str, ...]) -> tuple[list[AttentionLibrary], list[str]]:
    """The libraries of `names` that are installed and support a layer, and the reasons why the others do not."""
    found: list[AttentionLibrary] = []
    reasons: list[str] = []
    for kind in LIBRARIES:
        if kind.name not in names:
            continue
        module = _installed(kind.module_name)
        refused = [f"{kind.name} is not installed"] if module is None else kind.refusals(module, spec)
        reasons += refused
        if module is not None and not refused:
            found.append(kind(module, spec))
    return found, reasons


def _installed(name: str) -> ModuleType | None:
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and name.startswith(e.name):
            return None  # a parent of the module
        logger.warning("%s is installed, but cannot be imported, and is left out: %s", name, e)
        return None
    except (ImportError, OSError, RuntimeError, AttributeError) as e:  # for example, it was built for another torch
        logger.warning("%s is installed, but cannot be imported, and is left out: %s: %s", name, type(e).__name__, e)
        return None
