"""Repeats the kernel tests in one process for each other instruction set of this processor.

By default every twelfth case of each test runs; with `ci/dev.py test --all`, every case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.cpu.tests.instruction_sets import skip_unless_supported

from mvllm_cpu import kernels
from mvllm_cpu.doctor import ISAS, QUANTIZED_ISAS

LOADED = kernels.load()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}"),
]
FILES = {
    "isa": (
        *("test_linear.py", "test_moe.py", "test_state_ops.py", "test_sparse_attention.py"),
        "test_encoder_attention.py",
    ),
    "quantized_isa": ("test_quantized_linear.py", "test_block_quantized_linear.py", "test_quantized_moe.py"),
}
"""Test files by the attribute of `Kernels` with their instruction set."""
NAMES = {"isa": ISAS.split(", "), "quantized_isa": QUANTIZED_ISAS.split(", ")}


TESTS_WITH_ISA = """
import sys
from collections import Counter

import pytest

from mvllm_cpu import kernels


class EveryNth:
    def __init__(self, n):
        self.n = n

    def pytest_collection_modifyitems(self, items):
        forms = Counter()
        for item in list(items):
            place = item.path, item.originalname
            if forms[place] % self.n:
                items.remove(item)
            forms[place] += 1


loaded = kernels.load()
print(loaded.isa, loaded.quantized_isa, flush=True)
plugin = EveryNth(int(sys.argv[1]))
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[plugin]))
"""


def kinds_of(isa: str) -> list[str]:
    """The attributes of `Kernels` that support this instruction set and have another one in this process."""
    return [kind for kind, names in NAMES.items() if isa in names and isa != getattr(LOADED, kind)]


SAME_EVERYWHERE = "not more_tokens_than_one_batch and not do_not_depend_on_the_number_of_threads"
"""Excludes large tests of the division among batches and threads, which is the same code for all instruction sets. Only
the exhaustive runs repeat them.
"""
FURTHER = ("avx512", "avx512_vnni", "avx512_bf16", "avx2_vnni")
"""Instruction sets that only the exhaustive tests cover, in addition to the others."""
OTHERS = [isa for isa in dict.fromkeys(NAMES["isa"] + NAMES["quantized_isa"]) if kinds_of(isa)]


@pytest.mark.parametrize(
    ("isa", "nth"),
    [
        *(pytest.param(isa, 20, id=isa) for isa in OTHERS if isa not in FURTHER),
        *(pytest.param(isa, 1, id=f"{isa} in every form", marks=pytest.mark.exhaustive) for isa in OTHERS),
    ],
)
def test_every_kernel_is_correct_with(isa, nth):
    skip_unless_supported(isa)
    env = dict(os.environ, MVLLM_CPU_ISA=isa)
    kinds = kinds_of(isa)
    files = [str(Path(__file__).with_name(name)) for kind in kinds for name in FILES[kind]]
    chosen = ["-k", SAME_EVERYWHERE] if nth > 1 else []
    done = subprocess.run(
        [sys.executable, "-c", TESTS_WITH_ISA, str(nth), *files, *chosen], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = dict(zip(("isa", "quantized_isa"), done.stdout.splitlines()[0].split(), strict=True))
    assert all(found[kind] == isa for kind in kinds)
