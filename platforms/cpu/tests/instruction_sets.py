"""Instruction sets of the processor that runs the tests."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

_AVX2 = {"avx2", "fma", "f16c", "bmi2"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDS = {
    "generic": set[str](),
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    "amx_int8": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"},
    "neon_bf16": {"asimd", "bf16"},
}
"""Processor features (in /proc/cpuinfo) that each instruction set needs."""


@functools.cache
def features() -> set[str]:
    """Features of this processor according to the operating system, not to the library under test."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def skip_unless_supported(isa: str) -> None:
    """Skips the test if the processor lacks the instruction set."""
    missing = sorted(NEEDS[isa] - features())
    if missing:
        pytest.skip(f"this processor has no {isa}: no {', '.join(missing)}")
