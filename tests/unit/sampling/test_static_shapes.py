"""Static shapes: the same tokens, from operations whose shapes do not depend on the sampling parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.batch_plan import warm_up_params
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.token_masks import TokenMasks, mask_from_token_ids
from tests.unit.sampling.builders import Bench, Sampled, random_logits

VOCAB = 256
PADDED = 8

GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=0.8)
FILTERED = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.5),
    SamplingParams(min_p=0.3),
    SamplingParams(top_k=60, top_p=0.7, temperature=0.5),
]
MIXED = [
    GREEDY,
    *FILTERED,
    SamplingParams(temperature=0, presence_penalty=1.0, logprobs=3, logit_bias={4: 3.0}),
    SamplingParams(min_tokens=9, repetition_penalty=1.2, frequency_penalty=1.0, logprobs=1),
]


def sample(params, *, static, rows=None, masks=None):
    """One token for each of `params`, from logits with padding rows behind them."""
    bench = Bench(vocab_size=VOCAB, max_rows=PADDED)
    bench.sampler = Sampler(static=static)
    for row, each in enumerate(params):
        bench.set_row(row, Sampled(each, output=(7, 9), eos=[3]))
    logits = random_logits(PADDED, VOCAB)
    given = logits if static else logits[: len(params)]
    return bench.sampler.sample(given, np.arange(len(params)), bench.state, bench.history, masks=masks)


@pytest.mark.parametrize("params", [[GREEDY] * 3, [RANDOM, GREEDY], FILTERED, MIXED], ids=len)
def test_samples_are_the_same_with_static_shapes(params):
    expected, found = sample(params, static=False), sample(params, static=True)
    assert found.tolist() == expected.tolist() and not found.errors
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, one in expected.logprobs.items():
        assert found.logprobs[row].token_ids == one.token_ids
        assert found.logprobs[row].logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_masks_of_some_rows_do_not_affect_the_others():
    masks = TokenMasks([1], mask_from_token_ids([11], VOCAB).tobytes())
    params = [GREEDY, GREEDY, RANDOM, SamplingParams(temperature=0, allowed_token_ids=[5])]
    expected, found = sample(params, static=False, masks=masks), sample(params, static=True, masks=masks)
    assert found.tolist() == expected.tolist()
    assert found.tolist()[1] == 11 and found.tolist()[3] == 5


class Shapes(TorchDispatchMode):
    """Records every operation with the shapes of its arguments, like a compiler for static shapes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.name(), [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def shapes_of(params):
    with Shapes() as shapes:
        sample(params, static=True)
    return shapes.seen


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([GREEDY], [GREEDY] * 7),
        ([RANDOM], [GREEDY, RANDOM, RANDOM, GREEDY]),
        (FILTERED, [GREEDY, FILTERED[1]]),
        ([FILTERED[0]], [FILTERED[2], RANDOM, GREEDY]),
    ],
)
def test_shapes_depend_on_the_kind_of_a_batch_alone(one, other):
    assert shapes_of(one) == shapes_of(other)


def test_the_warm_up_covers_all_kinds_of_batches():
    warm = [shapes_of([kind]) for kind in warm_up_params(VOCAB)]
    for params in ([GREEDY], [RANDOM, GREEDY], *([each] for each in FILTERED), [SamplingParams(top_k=200), GREEDY]):
        assert shapes_of(params) in warm
