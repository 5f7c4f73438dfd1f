"""Counter-based uniforms: uniform, independent, and reproducible."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mvllm.sampling.uniforms import stream_seed, uniforms

COUNT = 200_000


def make_samples(direction: str) -> tuple[np.ndarray, np.ndarray]:
    run, still = np.arange(COUNT), np.zeros(COUNT, dtype=np.int64)
    if direction == "positions of one seed":
        return uniforms(still.astype(np.uint64) + np.uint64(42), run)
    if direction == "positions of a large seed":
        return uniforms(still.astype(np.uint64) + np.uint64(2**64 - 1), run)
    if direction == "neighbouring seeds":
        return uniforms(run.astype(np.uint64), still + 7)
    if direction == "seeds that differ in high bits":
        return uniforms(run.astype(np.uint64) << np.uint64(40), still)
    return uniforms((run % 447).astype(np.uint64), run // 447)


DIRECTIONS = [
    "positions of one seed",
    "positions of a large seed",
    "neighbouring seeds",
    "seeds that differ in high bits",
    "both",
]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_are_uniform(direction):
    for values in make_samples(direction):
        assert values.dtype == np.float32
        assert values.min() >= 0.0 and values.max() < 1.0
        counts = np.bincount((values * 1000).astype(int), minlength=1000)
        assert stats.chisquare(counts).pvalue > 1e-4
        assert stats.kstest(values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_successive_values_are_independent(direction):
    coarse, fine = make_samples(direction)
    pairs = [(coarse[:-lag], coarse[lag:]) for lag in (1, 2, 17)] + [(coarse, fine), (fine[:-1], coarse[1:])]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(COUNT)
        cells = np.bincount((a * 16).astype(int) * 16 + (b * 16).astype(int), minlength=256)
        assert stats.chisquare(cells).pvalue > 1e-4


def test_low_bits_are_random_too():
    coarse, fine = make_samples("positions of one seed")
    for values in (coarse, fine):
        whole = (values.astype(np.float64) * 2**24).astype(np.int64)
        for bit in (0, 1, 12, 23):
            assert stats.chisquare(np.bincount(whole >> bit & 1)).pvalue > 1e-4


def test_values_are_exact_multiples_of_two_to_the_minus_24():
    for values in make_samples("both"):
        scaled = values.astype(np.float64) * 2**24
        assert (scaled == np.round(scaled)).all()


def test_values_depend_on_seed_and_position_only():
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50)
    together = uniforms(seeds, positions)
    for i in (0, 13, 49):
        alone = uniforms(seeds[i : i + 1], positions[i : i + 1])
        assert [a[0] for a in alone] == [t[i] for t in together]


def test_the_seed_of_a_request_overrides_engine_seed_and_id():
    assert stream_seed(5, engine_seed=0, request_id="a") == stream_seed(5, engine_seed=1, request_id="b")
    assert stream_seed(-7, engine_seed=0, request_id="a") == 2**64 - 7


def test_without_a_seed_values_depend_on_engine_seed_and_id():
    a = stream_seed(None, engine_seed=0, request_id="a")
    assert a == stream_seed(None, engine_seed=0, request_id="a")
    assert len({a, *(stream_seed(None, engine_seed=s, request_id=r) for s, r in [(1, "a"), (0, "b"), (1, "b")])}) == 4


def test_engine_seed_and_id_cannot_be_confused():
    assert stream_seed(None, engine_seed=1, request_id="1a") != stream_seed(None, engine_seed=11, request_id="a")
