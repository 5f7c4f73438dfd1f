"""Turns the engine core's outputs into what callers receive: text, stop strings, joined sequences.

    EngineCoreOutputs ──> OutputProcessor ──> RequestState ──> RequestOutputStream ──> the caller's iterator   AsyncLLM
                                                   └──> RequestOutput, one per request and step                LLMEngine

A step costs one `list.extend` per sequence in the usual case. Everything else (text, log-probabilities, the
`RequestOutput` itself) is left to `RequestState.make_request_output`, which a RequestOutputStream calls when its caller
asks for the next output, or when it offers one to its consumer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mvllm.engine.frontend.beam_search import BeamSearch
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds, fan_out
from mvllm.engine.frontend.request_state import BeamRequest, GeneratedSequence, RequestState
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from mvllm.structured_output.output_validator import TextToValidate


@dataclass(slots=True)
class OutputProcessorOutput:
    """What follows from one step's outputs, for callers, for the engine core and for the metrics.

    Attributes:
        request_outputs: Of the requests without a stream, at most one each.
        texts_to_validate: By request id, ended sequences of these whose JSON schema is not enforced whole.
        requests_to_abort: Core ids of sequences that ended in the front end (on a stop string) and still run in the
            engine core.
        requests_to_add: Requests that beam searches send to the engine core next; those of one search together.
        num_new_tokens: Tokens of all requests in this step.
        started: Requests whose first token arrived.
        finished: Requests that have ended.
        inter_token_gaps: Seconds since the sequence's previous output, and how many sequences had that gap.
        gaps_by_priority: Of these, the ones of sequences with a priority class, by class and seconds.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    texts_to_validate: dict[str, list[tuple[CompletionOutput, TextToValidate]]] = field(default_factory=dict)
    requests_to_abort: list[str] = field(default_factory=list)
    requests_to_add: list[list[EngineCoreRequest]] = field(default_factory=list)
    num_new_tokens: int = 0
    started: list[RequestState] = field(default_factory=list)
    finished: list[RequestState] = field(default_factory=list)
    inter_token_gaps: dict[float, int] = field(default_factory=dict)
    gaps_by_priority: dict[tuple[str, float], int] = field(default_factory=dict)


class OutputProcessor:
    """The unfinished requests of one front end. Used from one thread.

    Args:
        tokenizer: None if no request is detokenized.
        core_ids: Makes the ids that sequences have in the engine core.

    Attributes:
        num_requests, num_sequences, num_prompt_tokens: Of the unfinished requests.
    """

    def __init__(self, tokenizer: Tokenizer | None, core_ids: CoreRequestIds) -> None:
        self._tokenizer = tokenizer
        self._core_ids = core_ids
        self._requests: dict[str, list[RequestState]] = {}  # by the caller's id, which need not be unique
        self._sequences: dict[str, GeneratedSequence | BeamRequest] = {}  # by id in the engine core
        self.num_requests = 0
        self.num_sequences = 0
        self.num_prompt_tokens = 0

    @property
    def requests(self) -> list[RequestState]:
        """The unfinished requests."""
        return [request for same_id in self._requests.values() for request in same_id]

    def find_requests(self, request_ids: Iterable[str]) -> list[RequestState]:
        """The unfinished requests with these ids; unknown ids are skipped."""
        return [request for request_id in request_ids for request in self._requests.get(request_id, ())]

    def add_request(self, request: ProcessedRequest) -> tuple[RequestState, list[EngineCoreRequest]]:
        """Tracks a request. Returns its state and the single-sequence requests to send to the engine core."""
        search = BeamSearch(request.core, self._core_ids) if request.params.use_beam_search else None
        children = fan_out(request.core, self._core_ids) if search is None else search.make_requests()
        state = RequestState(request, self._tokenizer, [child.request_id for child in children], search)
        if search is None:
            self._sequences.update((sequence.core_id, sequence) for sequence in state.sequences)
        else:
            self._add_beam_requests(state, children)
        self._requests.setdefault(state.request_id, []).append(state)
        self.num_requests += 1
        self.num_sequences += state.num_sequences
        self.num_prompt_tokens += state.num_prompt_tokens
        return state, children

    def process_outputs(self, core_outputs: EngineCoreOutputs) -> OutputProcessorOutput:
        """Appends one step's outputs to their requests, and notifies the streams of requests that have new output.

        A request without a stream gives its `RequestOutput` at once. Outputs of unknown sequences are skipped: they
        were aborted during the step.
        """
        result = OutputProcessorOutput()
        if core_outputs.weight_version:
            self._set_weight_versions(core_outputs)
        for request in self._append_outputs(core_outputs.outputs, result):
            if request.stream is not None:
                request.stream.notify()
                continue
            output = request.make_request_output()
            if output is not None:
                result.request_outputs.append(output)
                if output.relaxations and (texts := request.texts_to_validate(output)):
                    result.texts_to_validate[request.request_id] = texts
            if request.undecodable_core_ids:
                self.finish_undecodable(request, result)
        return result

    def finish_requests(self, requests: Iterable[RequestState]) -> OutputProcessorOutput:
        """Ends requests with the output they have and `finish_reason` "abort"; ended requests are skipped."""
        running = [core_id for request in requests for core_id in request.core_ids if core_id in self._sequences]
        aborted = [EngineCoreOutput(core_id, [], FinishReason.ABORT) for core_id in running]
        result = self.process_outputs(EngineCoreOutputs(aborted))
        result.requests_to_abort += running
        return result

    def remove_requests(self, requests: Iterable[RequestState]) -> OutputProcessorOutput:
        """Ends requests without further output; ended requests are skipped."""
        result = OutputProcessorOutput()
        for request in requests:
            if request.is_tracked:
                ids = request.core_ids
                result.requests_to_abort += [i for i in ids if self._sequences.pop(i, None) is not None]
                result.finished.append(request)
                self._remove_request(request)
        return result

    def finish_undecodable(self, request: RequestState, result: OutputProcessorOutput) -> None:
        """Ends the sequences whose tokens `RequestState.make_request_output` could not turn into text."""
        core_ids, request.undecodable_core_ids = request.undecodable_core_ids, []
        for core_id in core_ids:
            self._sequences.pop(core_id, None)
        result.requests_to_abort += core_ids
        if request.num_unfinished == 0 and request.is_tracked:
            self._finish_request(request, time.monotonic(), result)

    # --- one step

    def _set_weight_versions(self, core_outputs: EngineCoreOutputs) -> None:
        """Tells sequences whose tokens come from other weights than their last ones."""
        version, sequences = core_outputs.weight_version, self._sequences
        for output in core_outputs.outputs:
            sequence = sequences.get(output.request_id)
            if isinstance(sequence, GeneratedSequence) and sequence.weight_version != version:
                sequence.set_weight_version(version)

    def _append_outputs(self, outputs: Sequence[EngineCoreOutput], result: OutputProcessorOutput) -> list[RequestState]:
        """Returns the requests that have new output and had none before."""
        updated: list[RequestState] = []
        now = time.monotonic()
        sequences, last_times = self._sequences, dict[float, int]()
        num_new_tokens = 0
        for output in outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:
                continue
            request, last = sequence.request, sequence.last_token_time
            new = output.new_token_ids
            if new:
                num_new_tokens += len(new)
                sequence.last_token_time = now
                if last:
                    last_times[last] = last_times.get(last, 0) + 1
                    if request.priority_class is not None:
                        key = request.priority_class, now - last
                        result.gaps_by_priority[key] = result.gaps_by_priority.get(key, 0) + 1
                elif request.metrics.first_token_time is None:
                    result.started.append(request)
            if last and sequence.uses_fast_path and output.finish_reason is None:
                sequence.token_ids += new  # the usual case, once per token
            elif isinstance(sequence, BeamRequest):
                if not self._append_beam_output(sequence, output, now, result):
                    continue
            elif not self._append_output(sequence, output, now, result):
                continue
            if not request.has_new_output:
                request.has_new_output = True
                updated.append(request)
        result.num_new_tokens = num_new_tokens
        result.inter_token_gaps = {now - last: count for last, count in last_times.items()}
        return updated

    def _append_output(
        self, sequence: GeneratedSequence, output: EngineCoreOutput, now: float, result: OutputProcessorOutput
    ) -> bool:
        """Appends an output that may be a sequence's first or last, or hold more than tokens. Returns whether the
        request has new output."""
        request = sequence.request
        try:
            request.update_from_output(output, now)
            sequence.append_output(output)
        except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends)
            sequence.fail(e)
        if sequence.finish_reason is None:
            return not request.final_only
        if output.finish_reason is None:
            result.requests_to_abort.append(sequence.core_id)
        del self._sequences[sequence.core_id]
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._finish_request(request, now, result)
        return True

    def _append_beam_output(
        self, beam: BeamRequest, output: EngineCoreOutput, now: float, result: OutputProcessorOutput
    ) -> bool:
        """Records the candidates for one beam's next token. Returns whether the search has ended; an error in one beam
        ends it."""
        request, search = beam.request, beam.search
        request.update_from_output(output, now)
        del self._sequences[beam.core_id]
        is_round_complete = search.record_output(output)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            if output.finish_reason is FinishReason.ERROR:
                result.requests_to_abort += search.core_ids
            for core_id in search.core_ids:
                self._sequences.pop(core_id, None)
            request.fail_beam_search(output, now)
        elif not is_round_complete:
            return False
        elif search.advance():
            request.finish_beam_search(now)
        else:
            children = search.make_requests()
            self._add_beam_requests(request, children)
            result.requests_to_add.append(children)
            return False
        self._finish_request(request, now, result)
        return True

    def _add_beam_requests(self, request: RequestState, children: Sequence[EngineCoreRequest]) -> None:
        self._sequences.update((child.request_id, BeamRequest(request, child.request_id)) for child in children)

    def _finish_request(self, request: RequestState, now: float, result: OutputProcessorOutput) -> None:
        request.metrics.finished_time = now
        result.finished.append(request)
        self._remove_request(request)

    def _remove_request(self, request: RequestState) -> None:
        request.is_tracked = False
        if request.item_lease is not None:
            request.item_lease.release()
        same_id = self._requests[request.request_id]
        same_id.remove(request)
        if not same_id:
            del self._requests[request.request_id]
        self.num_requests -= 1
        self.num_sequences -= request.num_sequences
        self.num_prompt_tokens -= request.num_prompt_tokens
