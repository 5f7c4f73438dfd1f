"""Environment variables of one platform, with a common prefix (MVLLM_CUDA_*).

..._COMPILE   graphs (the default of most platforms): decode steps are captured in graphs
              inductor: torch.compile fuses the model's operations first, then as above
              none: neither; `--enforce-eager` does the same on any platform
..._SUMS      the vendor's library of collectives (default)
              direct: all-reduce of small tensors through memory that ranks map from each other, if that works
..._ATTENTION measured (default): the Triton kernels, or flash_attn or flashinfer if installed, whichever is faster for
              the kind of step
              triton: the Triton kernels
              flash_attn, flashinfer: that library for every step that it supports
..._LINEAR    measured (default): unquantized products of few rows use torch's library or a Triton kernel, whichever is
              faster for the shape
              torch, triton: always one of them
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mvllm.plugin_api import ConfigError

COMPILE_MODES = ("graphs", "inductor", "none")
ATTENTION = ("measured", "triton", "flash_attn", "flashinfer")
LINEAR = ("measured", "torch", "triton")


@dataclass(frozen=True)
class Settings:
    """Reads the environment variables of one platform.

    Attributes:
        prefix: Prefix of the variables' names, without the last underscore.
        library: The library of collectives, as a value of the variable; None if there is no choice.
        compile_modes: All of COMPILE_MODES, the default first.
        attentions: Supported values of ATTENTION, the default first.
        linears: Supported values of LINEAR, the default first.
    """

    prefix: str
    library: str | None
    compile_modes: tuple[str, ...] = COMPILE_MODES
    attentions: tuple[str, ...] = ATTENTION
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
        return self.library is not None and _one_of(f"{self.prefix}_SUMS", (self.library, "direct")) == "direct"


def _one_of(variable: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or values[0]
    if value not in values:
        raise ConfigError(f"{variable}={value!r} is not supported; set it to one of {', '.join(values)}, or unset it.")
    return value
