"""Beam search in the OutputProcessor: rounds of requests, errors and aborts."""

from __future__ import annotations

from unittest.mock import Mock

from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.engine.frontend.request_state import RequestState
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PositionLogprobs,
)
from mvllm.messages.sampling_params import SamplingParams


def begin(processor: OutputProcessor, **settings: object) -> tuple[RequestState, list[EngineCoreRequest]]:
    given = {"use_beam_search": True, "n": 2, "max_tokens": 3, "detokenize": False, **settings}
    params = SamplingParams(**given)  # type: ignore[arg-type]
    core = EngineCoreRequest(request_id="r", prompt_token_ids=[7, 8], sampling_params=params, eos_token_ids=[1])
    state, requests = processor.add_request(ProcessedRequest(None, params, core))
    state.stream = Mock()
    return state, requests


def answer(request: EngineCoreRequest, logprobs: dict[int, float]) -> EngineCoreOutput:
    found = PositionLogprobs([next(iter(logprobs)), *logprobs], [0.0, *logprobs.values()], 1)
    return EngineCoreOutput(request.request_id, [next(iter(logprobs))], FinishReason.LENGTH, logprobs=[found])


def process(
    processor: OutputProcessor, *outputs: EngineCoreOutput
) -> tuple[list[EngineCoreRequest], list[str], list[str]]:
    """Returns the next requests, core ids to abort, and ids of finished requests."""
    processed = processor.process_outputs(EngineCoreOutputs(outputs=list(outputs)))
    assert len(processed.requests_to_add) <= 1
    added = processed.requests_to_add[0] if processed.requests_to_add else []
    return added, processed.requests_to_abort, [request.request_id for request in processed.finished]


def shown(state: RequestState) -> RequestOutput:
    output = state.make_request_output()
    assert output is not None and output.finished and not state.undecodable_core_ids
    return output


def test_a_round_requests_one_token_per_beam_and_waits_for_all() -> None:
    processor = OutputProcessor(None, CoreRequestIds())
    state, [first] = begin(processor)
    assert first.prompt_token_ids == [7, 8] and first.sampling_params.max_tokens == 1
    assert first.sampling_params.logprobs == 3, "two that go on, one that ends"
    second, _, _ = process(processor, answer(first, {5: -1.0, 6: -2.0, 1: -0.5}))
    assert [each.prompt_token_ids for each in second] == [[7, 8, 5], [7, 8, 6]]
    assert len({each.sibling_group for each in (first, *second)}) == 1 and first.sibling_group is not None
    assert process(processor, answer(second[1], {9: -0.1, 3: -5.0, 4: -6.0})) == ([], [], [])
    third, _, _ = process(processor, answer(second[0], {9: -2.0, 3: -3.0, 4: -6.0}))
    assert [each.prompt_token_ids for each in third] == [[7, 8, 6, 9], [7, 8, 5, 9]]
    _, _, ended = process(processor, *(answer(each, {2: -1.0, 3: -2.0, 4: -3.0}) for each in third))
    assert ended == ["r"] and processor.num_requests == 0
    found = shown(state).outputs
    assert [each.token_ids for each in found] == [[1], [6, 9, 2]], "-0.5 for one token, -3.1 for three"
    assert [each.finish_reason for each in found] == ["stop", "length"]


def test_an_error_in_one_beam_ends_the_search() -> None:
    processor = OutputProcessor(None, CoreRequestIds())
    state, [first] = begin(processor)
    second, _, _ = process(processor, answer(first, {5: -1.0, 6: -2.0, 4: -3.0}))
    broken = EngineCoreOutput(second[0].request_id, [], FinishReason.ERROR, error="NaN")
    added, aborted, ended = process(processor, broken)
    assert (added, aborted, ended) == ([], [second[1].request_id], ["r"])
    assert [(each.finish_reason, each.error) for each in shown(state).outputs] == [("error", "NaN")] * 2
    assert process(processor, answer(second[1], {5: -1.0, 6: -2.0, 4: -3.0})) == ([], [], []), "too late to matter"


def test_an_aborted_search_sends_no_more_requests() -> None:
    processor = OutputProcessor(None, CoreRequestIds())
    state, [first] = begin(processor)
    second, _, _ = process(processor, answer(first, {5: -1.0, 6: -2.0, 4: -3.0}))
    processed = processor.finish_requests([state])
    assert processed.requests_to_abort == [each.request_id for each in second] and not processed.requests_to_add
    assert [each.finish_reason for each in shown(state).outputs] == ["abort"] * 2
    assert processor.num_requests == 0
    state, [first] = begin(processor)
    assert processor.remove_requests([state]).requests_to_abort == [first.request_id]
    assert process(processor, answer(first, {5: -1.0, 6: -2.0, 4: -3.0})) == ([], [], [])


def test_all_log_probabilities_of_each_token_can_be_requested() -> None:
    processor = OutputProcessor(None, CoreRequestIds())
    state, [first] = begin(processor, max_tokens=1, logprobs=-1)
    assert first.sampling_params.logprobs == -1
    everything = {5: -1.0, 6: -2.0, 1: -3.0, 9: -4.0, 8: -5.0}
    assert process(processor, answer(first, everything))[2] == ["r"]
    found = shown(state).outputs
    assert [[set(position) for position in each.logprobs or ()] for each in found] == [[set(everything)]] * 2
