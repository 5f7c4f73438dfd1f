"""Environment variables of one platform, with a common prefix (MVLLM_CUDA_*).

..._COMPILE   graphs (the default of most platforms): decode steps are captured in graphs
              inductor: torch.compile fuses the model's operations first, then as above
              none: neither; `--enforce-eager` does the same on any platform
..._SUMS      direct: all-reduce of small tensors through memory that ranks map from each other, if a trial works; the
              default where `direct_by_default`
              the vendor's library of collectives: it alone
..._ATTENTION measured (default): the Triton kernels, or an installed library (flash_attn, varlen_attn, flashinfer,
              torch's cudnn), whichever is fastest for the kind of step
              triton: the Triton kernels
              flash_attn, varlen_attn, flashinfer, cudnn: that library for every step that it supports
..._LINEAR    measured (default): unquantized products of few rows use torch's library or a Triton kernel, whichever is
              faster for the shape
              torch, triton: always one of them
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mvllm.plugin_api import ConfigError

COMPILE_MODES = ("graphs", "inductor", "none")
ATTENTION = ("measured", "triton", "flash_attn", "varlen_attn", "flashinfer", "cudnn")
LINEAR = ("measured", "torch", "triton")


@dataclass(frozen=True)
class Settings:
    """Reads the environment variables of one platform.

    Attributes:
        prefix: Prefix of the variables' names, without the last underscore.
        library: The library of collectives, as a value of the variable; None if there is no choice.
        compile_modes: All of COMPILE_MODES, the default first.
        attentions: Supported values of ATTENTION, the default first.
        direct_by_default: Whether CustomAllReduce is tried if the user says nothing.
        linears: Supported values of LINEAR, the default first.
    """

    prefix: str
    library: str | None
    compile_modes: tuple[str, ...] = COMPILE_MODES
    attentions: tuple[str, ...] = ATTENTION
    direct_by_default: bool = False
    linears: tuple[str, ...] = LINEAR

    def compile_mode(self) -> str:
        """One of COMPILE_MODES.

        Raises:
            ConfigError: The variable has another value.
        """
        return _one_of(f"{self.prefix}_COMPILE", self.compile_modes)

    def attention(self) -> str:
        """One of ATTENTION.

        Raises:
            ConfigError: The variable has another value.
        """
        return _one_of(f"{self.prefix}_ATTENTION", self.attentions)

    def linear(self) -> str:
        """One of LINEAR.

        Raises:
            ConfigError: The variable has another value.
        """
        return _one_of(f"{self.prefix}_LINEAR", self.linears)

    def custom_all_reduce(self) -> bool:
        """Whether CustomAllReduce adds small tensors.

        Raises:
            ConfigError: The variable has another value.
        """
        if self.library is None:
            return False
        values = ("direct", self.library) if self.direct_by_default else (self.library, "direct")
        return _one_of(f"{self.prefix}_SUMS", values) == "direct"

    def custom_all_reduce_is_named(self) -> bool:
        """Whether the user asks for CustomAllReduce, whatever connects the devices."""
        return os.environ.get(f"{self.prefix}_SUMS") == "direct"


def _one_of(variable: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or values[0]
    if value not in values:
        raise ConfigError(f"{variable}={value!r} is not supported; set it to one of {', '.join(values)}, or unset it.")
    return value
