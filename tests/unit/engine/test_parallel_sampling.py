"""A request for n sequences is split into n requests for one sequence."""

from __future__ import annotations

from mvllm import SamplingParams
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds, fan_out
from mvllm.messages.requests import EngineCoreRequest
from mvllm.sampling.uniforms import stream_seed


def children_of(request_id="r", ids=None, **params):
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**params),
        cache_salt="salt",
        priority=3,
        eos_token_ids=[9],
    )
    return fan_out(request, ids or CoreRequestIds())


def test_each_request_is_for_one_sequence():
    children = children_of(n=4)
    assert [child.sampling_params.n for child in children] == [1] * 4
    assert len({child.request_id for child in children}) == 4


def test_other_fields_are_the_same():
    for child in children_of(n=2, top_k=5):
        assert (child.prompt_token_ids, child.cache_salt, child.priority, child.eos_token_ids) == (
            [1, 2],
            "salt",
            3,
            [9],
        )
        assert child.sampling_params.top_k == 5


def test_they_are_siblings():
    first, second = children_of(n=2)
    assert first.sibling_group == second.sibling_group
    assert first.sibling_group is not None


def test_a_single_sequence_has_no_sibling_group():
    (child,) = children_of()
    assert child.sibling_group is None


def test_seeds_differ_and_the_first_is_the_callers():
    assert [c.sampling_params.seed for c in children_of(n=3, seed=7)] == [7, 8, 9]
    assert [c.sampling_params.seed for c in children_of(n=2)] == [None, None]


def test_seeds_at_the_limits_stay_seeds():
    for seed in (2**63 - 1, -(2**63), -2):
        seeds = [c.sampling_params.seed for c in children_of(n=3, seed=seed)]
        assert None not in seeds
        assert len(set(seeds)) == 3


def test_only_the_first_requests_prompt_logprobs():
    assert [c.sampling_params.prompt_logprobs for c in children_of(n=3, prompt_logprobs=2)] == [2, None, None]


def test_ids_are_unique_whatever_callers_choose():
    ids = CoreRequestIds()
    names = ["a", "0:a", "1:a", "a", ":", "0"]
    handed_out = [child.request_id for name in names for child in children_of(name, ids, n=2)]
    assert len(set(handed_out)) == len(handed_out)


def test_sequences_sample_differently_across_front_ends_and_replicas():
    """Replicas have one seed; their requests differ by ids, which are unique across front ends."""
    names = [child.request_id for name in ("", "0-", "1-") for child in children_of(n=3, ids=CoreRequestIds(name))]
    assert len({stream_seed(None, engine_seed=5, request_id=each) for each in names}) == 9
