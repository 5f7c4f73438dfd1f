"""PTX that unpacks four bytes at once: every number at every place, on an emulator of the instructions."""

from __future__ import annotations

import importlib
import itertools
import math
import random

importlib.import_module("platforms.triton-kernels.tests.interpreted")
ptx = importlib.import_module("platforms.triton-kernels.tests.ptx_emulator")

from mvllm_triton.kernels.packed_numbers import E2M1_PTX, INT4_PTX  # noqa: E402  once Triton is imported

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-number for number in E2M1]


def words():
    """Registers in which every code is at every place, and random ones."""
    rng = random.Random(0)
    for code, place in itertools.product(range(16), range(8)):
        yield code << 4 * place
    for _ in range(100):
        yield rng.getrandbits(32)


def nibbles(word):
    """Lower and upper codes of the four bytes."""
    data = word.to_bytes(4, "little")
    return [byte & 15 for byte in data], [byte >> 4 for byte in data]


def found(registers):
    low = ptx.bfloat16s(registers["$0"]) + ptx.bfloat16s(registers["$1"])
    return low, ptx.bfloat16s(registers["$2"]) + ptx.bfloat16s(registers["$3"])


def test_numbers_of_e2m1_are_exact_and_keep_their_signs():
    low_scale, high_scale = 2.0**-9, 2.0**5
    scales = dict.fromkeys(("$5", "$6"), ptx.two_bfloat16s(low_scale, low_scale))
    scales |= dict.fromkeys(("$7", "$8"), ptx.two_bfloat16s(high_scale, high_scale))
    for word in words():
        low, high = found(ptx.execute(E2M1_PTX.value, {"$4": word, **scales}))
        codes = nibbles(word)
        assert low == [E2M1[code] * low_scale for code in codes[0]], hex(word)
        assert high == [E2M1[code] * high_scale for code in codes[1]], hex(word)
        assert [math.copysign(1, x) for x in low] == [math.copysign(1, E2M1[code]) for code in codes[0]]


def test_integers_are_exact_for_every_zero_point():
    for zero in (-8, -3, 0, 7):
        base = dict.fromkeys(("$5", "$6"), ptx.two_bfloat16s(-136.0 - zero, -136.0 - zero))
        for word in words():
            low, high = found(ptx.execute(INT4_PTX.value, {"$4": word, **base}))
            codes = nibbles(word)
            assert low == [code - 8 - zero for code in codes[0]], hex(word)
            assert high == [code - 8 - zero for code in codes[1]], hex(word)
