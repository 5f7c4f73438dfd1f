"""OutputProcessor and RequestState, with engine-core outputs made by the test."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from mvllm import Logprob, SamplingParams, StructuredOutputsParams
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.output_processor import OutputProcessor, OutputProcessorOutput
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PositionLogprobs,
)
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.multimodal.item_memory import ItemMemory
from tests.unit.engine.tokenizers import make_tokenizer

TOKENIZER = make_tokenizer()
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
kinds = pytest.mark.parametrize("kind", list(RequestOutputKind))


def ids_of(text):
    return TOKENIZER.encode(text)


class Run:
    """One request whose engine-core outputs are made by the test."""

    def __init__(self, kind=CUMULATIVE, tokenizer=TOKENIZER, prompt_ids=(1, 2, 3), **params):
        self.processor = OutputProcessor(tokenizer, CoreRequestIds())
        core = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=list(prompt_ids),
            sampling_params=SamplingParams(output_kind=kind, max_tokens=None, **params),
            arrival_time=1.0,
        )
        self.state, self.children = self.processor.add_request(ProcessedRequest("prompt", core.sampling_params, core))
        self.aborted = []

    def step(self, ids, finish=None, child=0, **output):
        """Processes one output of one sequence. Returns the RequestOutput, or None."""
        return self.steps({child: (ids, finish)}, **output)

    def steps(self, children, **output):
        outputs = [
            EngineCoreOutput(self.children[c].request_id, list(i), f, **output) for c, (i, f) in children.items()
        ]
        processed = self.processor.process_outputs(EngineCoreOutputs(outputs=outputs))
        self.aborted += processed.requests_to_abort
        assert len(processed.request_outputs) <= 1
        return processed.request_outputs[0] if processed.request_outputs else None

    def feed(self, ids, finish=FinishReason.LENGTH):
        """Processes one output per token; the last one ends the sequence. Returns all RequestOutputs."""
        outputs = [self.step([i], finish if n == len(ids) - 1 else None) for n, i in enumerate(ids)]
        return [output for output in outputs if output is not None]


def text_of(outputs, kind):
    """The whole text of a list of outputs."""
    if kind == DELTA:
        return "".join(output.outputs[0].text for output in outputs)
    return outputs[-1].outputs[0].text


@kinds
def test_each_output_kind_gives_the_same_text(kind):
    ids = ids_of("The cat sat on the 🎉 mat.")
    outputs = Run(kind).feed(ids)
    assert text_of(outputs, kind) == "The cat sat on the 🎉 mat."
    token_ids = (
        [i for o in outputs for i in o.outputs[0].token_ids] if kind == DELTA else outputs[-1].outputs[0].token_ids
    )
    assert token_ids == ids
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert [o.finished for o in outputs[:-1]] == [False] * (len(outputs) - 1)


@kinds
def test_outputs_that_are_not_requested_accumulate(kind):
    ids = ids_of("The cat sat on the 🎉 mat.")
    run = Run(kind)
    (child,) = run.children
    run.state.stream = stream = Mock()
    for n, token in enumerate(ids):
        end = FinishReason.LENGTH if n == len(ids) - 1 else None
        processed = run.processor.process_outputs(EngineCoreOutputs([EngineCoreOutput(child.request_id, [token], end)]))
        assert not processed.request_outputs
    stream.notify.assert_called_once_with()  # only when the first output arrived
    output = run.state.make_request_output()
    assert output.finished and not run.state.undecodable_core_ids
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("The cat sat on the 🎉 mat.", ids)


@pytest.mark.parametrize("decoder", ["byte_fallback", "marks_first", "metaspace"])
class TestTextAfterThePrompt:
    """The text is what follows that of the prompt, with decoders that drop the space of the first word."""

    @staticmethod
    def run_of(decoder, kind, prompt="the cat is", **params):
        tokenizer = make_tokenizer(decoder)
        run = Run(kind, tokenizer, tokenizer.encode(prompt), **params)
        return run, tokenizer.encode("a small text", add_special_tokens=False)

    @kinds
    @pytest.mark.parametrize("n", [1, 2])
    def test_the_first_word_has_its_space_in_all_sequences(self, decoder, kind, n):
        run, ids = self.run_of(decoder, kind, n=n, temperature=1.0)
        outputs = []
        for at, token in enumerate(ids):
            end = FinishReason.LENGTH if at == len(ids) - 1 else None
            outputs.append(run.steps({child: ([token], end) for child in range(n)}))
        outputs = [output for output in outputs if output is not None]
        for index in range(n):
            texts = [output.outputs[index].text for output in outputs]
            assert ("".join(texts) if kind == DELTA else texts[-1]) == " a small text"

    @kinds
    def test_a_stop_string_may_begin_with_the_space(self, decoder, kind):
        run, ids = self.run_of(decoder, kind, stop=[" a small"])
        outputs = run.feed(ids, None)
        assert text_of(outputs, kind) == "" and outputs[-1].outputs[0].stop_reason == " a small"

    def test_log_probabilities_have_the_same_text(self, decoder):
        run, ids = self.run_of(decoder, FINAL_ONLY, logprobs=0)
        output = run.step(ids, FinishReason.LENGTH, logprobs=[PositionLogprobs([i], [-1.0], 1) for i in ids])
        texts = [position[i].decoded_token for i, position in zip(ids, output.outputs[0].logprobs, strict=True)]
        assert "".join(texts) == output.outputs[0].text == " a small text"


def test_an_aborted_request_returns_its_output_so_far():
    run = Run(DELTA, n=2, temperature=1.0)
    shown = run.steps({0: (ids_of("The cat"), None), 1: (ids_of("A dog"), FinishReason.STOP)})
    (request,) = run.processor.find_requests(["r", "unknown"])
    assert request is run.state and shown is not None and not shown.finished
    processed = run.processor.finish_requests([request])
    assert processed.requests_to_abort == [run.children[0].request_id] and processed.finished == [request]
    (output,) = processed.request_outputs
    assert output.finished and [(c.index, c.finish_reason) for c in output.outputs] == [(0, "abort")]
    assert (run.processor.num_requests, run.processor.num_sequences, run.processor.num_prompt_tokens) == (0, 0, 0)
    assert run.processor.finish_requests([request]) == OutputProcessorOutput()
    assert run.processor.remove_requests([request]) == OutputProcessorOutput()


def test_inter_token_gaps_are_counted_once_per_token():
    run = Run(DELTA, n=2, temperature=1.0)
    ids = [child.request_id for child in run.children]

    def take(*which):
        return run.processor.process_outputs(EngineCoreOutputs([EngineCoreOutput(ids[i], [5]) for i in which]))

    first = take(0)
    assert len(first.started) == 1 and not first.inter_token_gaps
    second = take(0, 1)  # a first token of another sequence is not the request's first token
    assert not second.started and list(second.inter_token_gaps.values()) == [1]
    assert list(take(0, 1).inter_token_gaps.values()) == [2]


def test_final_only_gives_one_output_at_the_end():
    assert len(Run(FINAL_ONLY).feed(ids_of("The cat sat."))) == 1


def test_returned_outputs_do_not_change_afterwards():
    run = Run(CUMULATIVE, logprobs=0)
    first = run.step([5], logprobs=[PositionLogprobs([5], [-1.0], 1)])
    run.step([6], logprobs=[PositionLogprobs([6], [-2.0], 1)])
    sequence = first.outputs[0]
    assert (sequence.token_ids, len(sequence.logprobs), sequence.cumulative_logprob) == ([5], 1, -1.0)


@kinds
def test_the_end_token_is_in_token_ids_but_not_in_the_text(kind):
    run = Run(kind, skip_special_tokens=False)
    outputs = run.feed([*ids_of("Hello"), TOKENIZER.eos_token_id], FinishReason.STOP)
    assert text_of(outputs, kind) == "Hello"
    assert outputs[-1].outputs[0].token_ids[-1] == TOKENIZER.eos_token_id


def test_the_end_token_is_in_the_text_if_requested():
    run = Run(FINAL_ONLY, include_stop_str_in_output=True)
    (output,) = run.feed(ids_of("Hello!"), FinishReason.STOP)
    assert output.outputs[0].text == "Hello!"


def test_the_stop_reason_is_the_stop_token():
    run = Run()
    output = run.step([5, 6], FinishReason.STOP, stop_reason=6)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 6)


def test_an_error_ends_the_request_with_its_reason():
    output = Run().step([], FinishReason.ERROR, error="the logits are NaN")
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "the logits are NaN")


def test_without_detokenize_there_is_no_text():
    (output,) = Run(FINAL_ONLY, detokenize=False).feed([5, 6])
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5, 6])


class TestStopStrings:
    @kinds
    def test_the_text_ends_before_it_and_the_core_request_is_aborted(self, kind):
        run = Run(kind, stop=["on the"])
        outputs = run.feed(ids_of("The cat sat on the mat."), None)
        assert text_of(outputs, kind) == "The cat sat "
        last = outputs[-1]
        assert last.finished
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "on the")
        assert run.aborted == [run.children[0].request_id]

    @kinds
    def test_it_is_kept_if_requested(self, kind):
        outputs = Run(kind, stop=["on the"], include_stop_str_in_output=True).feed(
            ids_of("The cat sat on the mat."), None
        )
        assert text_of(outputs, kind) == "The cat sat on the"

    def test_nothing_of_it_is_ever_streamed(self):
        outputs = Run(DELTA, stop=["Köln, x", "naïve"]).feed(ids_of("Grüße aus Köln, naïve café"), None)
        shown = "".join(o.outputs[0].text for o in outputs)
        assert shown == "Grüße aus Köln, "
        assert all("Köln" not in o.outputs[0].text or "Köln, " in o.outputs[0].text for o in outputs)

    def test_held_back_text_is_returned_when_it_is_no_stop_string(self):
        outputs = Run(DELTA, stop=["cat sat down"]).feed(ids_of("The cat sat on the mat"))
        assert "".join(o.outputs[0].text for o in outputs) == "The cat sat on the mat"

    def test_held_back_text_is_returned_at_the_end(self):
        outputs = Run(DELTA, stop=["mat and more"]).feed(ids_of("The cat sat on the mat"))
        assert "".join(o.outputs[0].text for o in outputs) == "The cat sat on the mat"

    def test_nothing_is_aborted_if_the_core_has_ended_the_sequence(self):
        run = Run(stop=["mat"])
        outputs = run.feed(ids_of("The cat sat on the mat"))
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert run.aborted == []

    def test_tokens_after_it_are_dropped(self):
        ids = ids_of("The cat sat on the mat.")
        output = Run(stop=["sat"], logprobs=0).step(ids, logprobs=[PositionLogprobs([i], [-1.0], 1) for i in ids])
        sequence = output.outputs[0]
        assert sequence.text == "The cat "
        assert TOKENIZER.decode(sequence.token_ids) == "The cat sat"
        assert len(sequence.logprobs) == len(sequence.token_ids)
        assert sequence.cumulative_logprob == -len(sequence.token_ids)

    def test_it_does_not_count_among_the_first_min_tokens(self):
        ids = ids_of("The cat sat. The cat sat.")
        within = len(ids_of("The cat sat"))
        outputs = Run(stop=["sat"], min_tokens=within).feed(ids, None)
        assert outputs[-1].outputs[0].text == "The cat sat. The cat "

    def test_it_is_found_across_a_split_character(self):
        outputs = Run(stop=["🦜"]).feed(ids_of("a bird 🦜 sings"), None)
        assert outputs[-1].outputs[0].text == "a bird "

    def test_later_outputs_of_the_sequence_are_ignored(self):
        run = Run(stop=["sat"])
        run.feed(ids_of("The cat sat"), None)
        assert run.step([5]) is None


class TestLogprobs:
    def test_the_sampled_token_comes_first_and_ranks_follow_the_order(self):
        position = PositionLogprobs([7, 4, 7, 9], [-2.0, -1.0, -2.0, -3.0], 2)
        entry = Run(logprobs=3).step([7], logprobs=[position]).outputs[0].logprobs[0]
        assert list(entry) == [7, 4, 9]
        assert entry[7] == Logprob(-2.0, 2, TOKENIZER.decode([7]))
        assert [entry[4].rank, entry[9].rank] == [1, 3]

    def test_a_token_outside_the_top_is_added_to_them(self):
        position = PositionLogprobs([7, 4], [-9.0, -1.0], 40)
        entry = Run(logprobs=1).step([7], logprobs=[position]).outputs[0].logprobs[0]
        assert {token: value.rank for token, value in entry.items()} == {7: 40, 4: 1}

    def test_cumulative_logprob_is_their_sum(self):
        run = Run(DELTA, logprobs=0)
        run.step([7], logprobs=[PositionLogprobs([7], [-1.5], 1)])
        second = run.step([8], logprobs=[PositionLogprobs([8], [-2.0], 1)])
        assert second.outputs[0].cumulative_logprob == -3.5
        assert [list(entry) for entry in second.outputs[0].logprobs] == [[8]]

    def test_there_are_none_unless_requested(self):
        sequence = Run().step([7]).outputs[0]
        assert (sequence.logprobs, sequence.cumulative_logprob) == (None, None)

    def test_prompt_logprobs_begin_with_none(self):
        positions = [PositionLogprobs([2], [-1.0], 1), PositionLogprobs([3], [-2.0], 4)]
        output = Run(prompt_logprobs=0).step([7], prompt_logprobs=positions)
        assert output.prompt_logprobs[0] is None
        assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[2], [3]]

    def test_prompt_logprobs_of_one_token_are_none_alone(self):
        assert Run(prompt_logprobs=0, prompt_ids=[4]).step([7]).prompt_logprobs == [None]

    def test_with_delta_outputs_prompt_logprobs_are_returned_once(self):
        run = Run(DELTA, prompt_logprobs=0)
        positions = [PositionLogprobs([2], [-1.0], 1), PositionLogprobs([3], [-2.0], 4)]
        assert run.step([7], prompt_logprobs=positions).prompt_logprobs is not None
        assert run.step([8]).prompt_logprobs is None

    def test_without_detokenize_tokens_have_no_text(self):
        run = Run(detokenize=False, logprobs=0)
        entry = run.step([7], logprobs=[PositionLogprobs([7], [-1.0], 1)]).outputs[0].logprobs[0]
        assert entry[7].decoded_token is None


class TestSeveralSequences:
    def test_the_final_output_has_all_of_them_in_order(self):
        run = Run(FINAL_ONLY, n=3)
        assert run.step(ids_of("c"), FinishReason.LENGTH, child=2) is None
        assert run.step(ids_of("a"), FinishReason.LENGTH, child=0) is None
        output = run.step(ids_of("b"), FinishReason.STOP, child=1)
        assert [(s.index, s.finish_reason) for s in output.outputs] == [(0, "length"), (1, "stop"), (2, "length")]
        assert output.finished

    def test_a_step_gives_one_output_for_all(self):
        run = Run(DELTA, n=2)
        output = run.steps({0: ([5], None), 1: ([6], None)})
        assert [(s.index, s.token_ids) for s in output.outputs] == [(0, [5]), (1, [6])]

    def test_a_delta_output_has_only_sequences_with_new_tokens(self):
        run = Run(DELTA, n=2)
        run.steps({0: ([5], FinishReason.LENGTH), 1: ([6], None)})
        output = run.step([7], child=1)
        assert [s.index for s in output.outputs] == [1]
        assert not output.finished

    def test_one_sequence_may_stop_while_the_others_continue(self):
        run = Run(CUMULATIVE, n=2, stop=["sat"])
        first = run.step(ids_of("The cat sat"), child=0)
        assert not first.finished
        assert run.aborted == [run.children[0].request_id]
        last = run.step(ids_of("The dog"), FinishReason.LENGTH, child=1)
        assert [s.text for s in last.outputs] == ["The cat ", "The dog"]
        assert last.finished


class TestAborting:
    def test_it_returns_the_ids_of_running_sequences(self):
        run = Run(n=3)
        run.step([5], FinishReason.LENGTH, child=1)
        removed = run.processor.remove_requests(run.processor.find_requests(["r", "unknown"]))
        assert removed.requests_to_abort == [run.children[0].request_id, run.children[2].request_id]
        assert run.processor.num_requests == 0

    def test_there_is_no_output_afterwards(self):
        run = Run()
        run.processor.remove_requests([run.state])
        assert run.step([5]) is None


def test_metrics_have_the_times_of_events():
    run = Run()
    first = run.step([5], scheduled_time=1.5)
    last = run.step([6], FinishReason.LENGTH)
    assert (first.metrics.arrival_time, first.metrics.first_scheduled_time) == (1.0, 1.5)
    assert first.metrics.finished_time is None
    assert first.metrics.first_token_time == last.metrics.first_token_time
    assert last.metrics.first_token_time <= last.metrics.last_token_time <= last.metrics.finished_time


def test_cached_tokens_are_those_of_the_first_sequence():
    run = Run(n=2)
    run.step([5], child=0, num_cached_tokens=0)
    assert run.step([5], child=1, num_cached_tokens=2).num_cached_tokens == 0


class _Picky:
    """A tokenizer that cannot decode one of its tokens."""

    special_ids = byte_ids = frozenset()
    decodes_bytewise = True
    length = 100

    def decode(self, token_ids, **options):
        if 13 in token_ids:
            raise KeyError("token 13")
        return "x" * len(token_ids)

    def token_text(self, token_id):
        return self.decode([token_id])


@kinds
def test_undecodable_tokens_end_their_sequence_only(kind):
    run = Run(kind, tokenizer=_Picky(), n=2)
    run.steps({0: ([5], None), 1: ([5], None)})
    run.steps({0: ([13], FinishReason.LENGTH if kind == FINAL_ONLY else None), 1: ([6], None)})
    output = run.step([7], FinishReason.LENGTH, child=1)
    assert output is not None and output.finished
    if kind != DELTA:  # the core has reported the end before
        assert [c.finish_reason for c in output.outputs] == ["error", "length"]
    assert output.outputs[-1].finish_reason == "length"
    assert run.aborted == ([] if kind == FINAL_ONLY else [run.children[0].request_id])
    assert run.processor.num_requests == 0


def test_log_probabilities_of_tokens_without_text_end_the_request_with_the_reason():
    run = Run(tokenizer=_Picky(), logprobs=0)
    output = run.step([5], logprobs=[PositionLogprobs([13], [-1.0], 1)])
    assert output.finished and output.outputs[0].finish_reason == "error"
    assert "token 13" in output.outputs[0].error


@kinds
def test_kv_transfer_params_are_in_the_last_output(kind):
    run = Run(kind)
    first = run.step([5])
    assert first is None or first.kv_transfer_params is None
    last = run.step([6], FinishReason.LENGTH, kv_transfer_params={"remote_request_id": "r"})
    assert last is not None and last.kv_transfer_params == {"remote_request_id": "r"}


@pytest.mark.parametrize("how", ["finished", "aborted", "removed"])
def test_the_memory_of_items_is_given_back_when_the_request_ends(how):
    memory = ItemMemory(1 << 30)
    run = Run(n=2)
    run.state.item_lease = memory.reserve({"image": 1}).result(0)
    run.steps({0: (ids_of("a"), FinishReason.STOP)})
    assert memory.num_bytes > 0  # the other sequence may be preempted
    if how == "finished":
        run.steps({1: (ids_of("b"), FinishReason.STOP)})
    elif how == "aborted":
        run.processor.finish_requests([run.state])
    else:
        run.processor.remove_requests([run.state])
    assert memory.num_bytes == 0


def test_a_wait_for_the_validation_that_is_cancelled_loses_no_output():
    schema = StructuredOutputsParams(json={"uniqueItems": True})
    run, calls = Run(DELTA, structured_outputs=schema), []

    class Validator:
        async def validate_async(self, texts, client):
            calls.append(texts)
            if len(calls) == 1:
                await asyncio.sleep(60)
            for output, _ in texts:
                output.warnings = ["wrong"]

    async def read():
        run.state.stream = stream = RequestOutputStream(run.state, lambda _: None, lambda _: None, Validator())
        run.step(ids_of("ab"), FinishReason.STOP, relaxations=("uniqueItems (at #)",))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        return [output async for output in stream]

    [output] = asyncio.run(read())
    assert output.finished and output.outputs[0].warnings == ["wrong"] and len(calls) == 2
