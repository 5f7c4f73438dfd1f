"""Pooling of hidden states: independent of chunks, and errors of single rows."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mvllm.messages.pooling_params import Activation, PoolingParams, PoolingTask, PoolingType
from mvllm.platform.runtime import FinishedHostCopy
from mvllm.pooling.pooler import PooledRows, PoolingState, pool_step, postprocess_vector

RUNTIME = cast(Any, SimpleNamespace(to_host=FinishedHostCopy))


def states(num_tokens: int, size: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


def step(state: PoolingState, batch: list[tuple[int, torch.Tensor, int, int]]) -> PooledRows:
    """One step over (row, hidden states of its tokens, first position, prompt length), and some padding."""
    pieces = [piece for _, piece, _, _ in batch]
    starts = [0, *np.cumsum([len(piece) for piece in pieces]).tolist()]
    return pool_step(
        state,
        RUNTIME,
        torch.cat([*pieces, torch.full_like(pieces[0][:1], torch.nan)]),
        rows=[row for row, _, _, _ in batch],
        starts=[*starts, starts[-1]],
        firsts=[first for _, _, first, _ in batch],
        prompt_lens=[length for _, _, _, length in batch],
    )


def expected(kind: PoolingType, hidden: torch.Tensor) -> np.ndarray:
    hidden = hidden.float()
    vectors = {
        PoolingType.LAST: hidden[-1],
        PoolingType.CLS: hidden[0],
        PoolingType.MEAN: hidden.mean(0),
        PoolingType.MAX: hidden.amax(0),
        PoolingType.MEAN_SQRT_LEN: hidden.sum(0) / len(hidden) ** 0.5,
        PoolingType.ALL: hidden.flatten(),
    }
    return vectors[kind].numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PoolingType)
@pytest.mark.parametrize("cuts", [[], [1], [3, 4], [10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
def test_the_vector_does_not_depend_on_the_chunks_of_the_prompt(
    kind: PoolingType, cuts: list[int], dtype: torch.dtype
) -> None:
    state, hidden, other = PoolingState(), states(11, dtype=dtype), states(4, dtype=dtype)
    state.set_row(3, PoolingParams(pooling_type=kind, normalize=False))
    state.set_row(1, PoolingParams(pooling_type=PoolingType.MEAN, normalize=False))
    state.set_row(0, None)
    bounds = [0, *cuts, 11]
    for begin, end in pairwise(bounds):
        # In the same batch: a generating request, and a prompt that does not end in this step.
        found = step(state, [(0, other, 0, 4), (3, hidden[begin:end], begin, 11), (1, other, 0, 99)])
        vectors, errors = found.read()
        assert not errors and list(vectors) == ([1] if end == 11 else [])
    np.testing.assert_allclose(np.frombuffer(vectors[1], "<f4"), expected(kind, hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", PoolingType)
def test_a_restarted_prompt_drops_the_state_of_its_first_run(kind: PoolingType) -> None:
    state, hidden = PoolingState(), states(8)
    for given_up in (True, False):
        state.set_row(2, PoolingParams(pooling_type=kind, normalize=False))
        step(state, [(2, hidden[:5] + given_up, 0, 8)])
        if given_up:
            state.clear_row(2)
            assert not state.params and not state.partial
    vectors, _ = step(state, [(2, hidden[5:], 5, 8)]).read()
    np.testing.assert_allclose(np.frombuffer(vectors[0], "<f4"), expected(kind, hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_vector_fails_only_its_row(bad: float) -> None:
    state, hidden = PoolingState(), states(4)
    for row in (0, 1):
        state.set_row(row, PoolingParams(pooling_type=PoolingType.LAST, normalize=True))
    broken = hidden.clone()
    broken[-1, 2] = bad
    vectors, errors = step(state, [(0, broken, 0, 4), (1, hidden, 0, 4)]).read()
    assert list(vectors) == [1] and list(errors) == [0] and "not finite" in errors[0]


def test_vectors_are_truncated_before_they_are_normalized() -> None:
    vector = np.array([3, 4, 12], dtype=np.float32)

    def finished(**settings: Any) -> list[float]:
        data = postprocess_vector(vector, PoolingParams(**settings))
        assert data is not None
        return np.frombuffer(data, "<f4").tolist()

    assert finished(normalize=False) == [3, 4, 12]
    assert finished(normalize=False, dimensions=2) == [3, 4]
    np.testing.assert_allclose(finished(normalize=True, dimensions=2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(finished(normalize=True), vector / 13, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_vectors_of_any_length_are_normalized(scale: float) -> None:
    data = postprocess_vector(np.array([3, 4], dtype=np.float32) * np.float32(scale), PoolingParams(normalize=True))
    assert data is not None
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), [0.6, 0.8], rtol=1e-6)


def test_a_zero_vector_stays_zero() -> None:
    data = postprocess_vector(np.zeros(3, dtype=np.float32), PoolingParams(normalize=True))
    assert data == bytes(12)


def test_the_head_scores_only_classify_requests() -> None:
    state, hidden = PoolingState(), states(6)
    wanted = PoolingParams(
        pooling_type=PoolingType.LAST, normalize=False, task=PoolingTask.CLASSIFY, activation=Activation.SOFTMAX
    )
    state.set_row(0, wanted)
    state.set_row(1, PoolingParams(pooling_type=PoolingType.LAST, normalize=False))
    asked = []

    def head(pooled: torch.Tensor) -> torch.Tensor:
        asked.append(pooled.clone())
        return torch.tensor([[1e5, -1e5]])

    pooled = pool_step(
        state, RUNTIME, hidden, rows=[0, 1], starts=[0, 2, 6], firsts=[0, 0], prompt_lens=[2, 4], scores=head
    )
    vectors, errors = pooled.read()
    assert not errors and len(asked) == 1 and torch.equal(asked[0], hidden[1:2])
    scores = np.frombuffer(vectors[0], "<f4")
    assert scores.tolist() == [1.0, 0.0]
    np.testing.assert_array_equal(np.frombuffer(vectors[1], "<f4"), hidden[5].numpy())


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Activation.SIGMOID, [1.0, 0.5, 0.0]),
        (Activation.TANH, [1.0, 0.0, -1.0]),
        (Activation.IDENTITY, [1e4, 0.0, -1e4]),
        (Activation.SOFTMAX, [1.0, 0.0, 0.0]),
    ],
)
def test_activations_do_not_overflow(how: Activation, expected: list[float]) -> None:
    params = PoolingParams(pooling_type=PoolingType.CLS, normalize=False, activation=how)
    with np.errstate(all="raise", under="ignore"):
        found = postprocess_vector(np.array([1e4, 0, -1e4], dtype=np.float32), params)
    assert found is not None and np.frombuffer(found, "<f4").tolist() == expected
