"""Responses and streams with a list of `choices`: one for each sequence of each prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.server_sent_events import ChunkEncoder, error_event
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.streaming_response import RequestConnection
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import StreamOptions

NULL_RESPONSE_FIELDS = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
"""Fields of a whole response with choices that are null unless they are set. Clients of other engines read them."""

ChoiceEncoder = Callable[[RequestOutput, CompletionOutput], bytes]
"""Encodes the chunks of one choice, output by output. Empty for an output that adds nothing."""
MakeChoiceEncoder = Callable[[int, ChunkEncoder], ChoiceEncoder]
"""Makes the encoder of the choice with an index."""


async def encode_whole(
    requests: EngineRequests,
    usage: UsageCounter,
    encode: Callable[[Sequence[RequestOutput]], bytes],
    run_in_thread: Callable[[Callable[[], bytes]], Any] | None,
) -> bytes:
    """The body of a response, when all outputs are there. Counts their tokens.

    Args:
        encode: Encodes the outputs of all prompts.
        run_in_thread: Runs `encode`, which may take long; None to run it in the event loop.

    Raises:
        As `EngineRequests.collect`.
    """
    outputs = await requests.collect()
    for position, output in enumerate(outputs):
        usage.add(position, output)
    if run_in_thread is None:
        return encode(outputs)
    encoded: bytes = await run_in_thread(lambda: encode(outputs))
    return encoded


def end_fields(requests: EngineRequests, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The last fields of a response: what may be missing."""
    return {**_kv_transfer_fields(outputs[0]), **requests.warning_fields}


class ChoicesStream:
    """The stream of one response, as server-sent events.

    Args:
        context: The engine, and what handlers share.
        requests: The engine requests, started.
        usage: Counts the tokens.
        fields: The fields of each chunk before `choices`.
        options: Of the request.
        num_sequences: Sequences of each prompt.
        make_encoder: Encodes the choices.
        connection: Where chunks may be written past the task of the response; None if nowhere.
    """

    def __init__(
        self,
        context: ServingContext,
        requests: EngineRequests,
        usage: UsageCounter,
        fields: dict[str, Any],
        options: StreamOptions | None,
        num_sequences: int,
        make_encoder: MakeChoiceEncoder,
        connection: RequestConnection | None,
    ) -> None:
        if context.force_include_usage:
            options = msgspec.structs.replace(options or StreamOptions(), include_usage=True)
        self._run_in_thread = context.tokenizer_pool.run  # for the log-probabilities of a prompt, which may be many
        self._requests = requests
        self._usage = usage
        self._chunks = ChunkEncoder(fields, usage, options)
        self._num_sequences = num_sequences
        self._num_open = requests.num_prompts
        self._make_encoder = make_encoder
        self._encoders: dict[int, ChoiceEncoder] = {}
        self._connection = connection
        self._unsent = b""  # encoded chunks

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events, to `[DONE]`. An error is an event, too."""
        if self._connection is not None:
            self._requests.set_consumer(self._write_now)
        try:
            async for position, output in self._requests.outputs():
                await self._encode(position, output)
                if self._unsent and self._num_open:  # the last chunks are sent with the stream's end
                    yield self._take_unsent()
        except Exception as e:  # noqa: BLE001  (to_api_error logs what the client does not see)
            yield self._take_unsent() + error_event(to_api_error(e))
            return
        yield self._take_unsent() + self._chunks.encode_end()

    async def _encode(self, position: int, output: RequestOutput) -> None:
        """Encodes the chunks of an output of the prompt at `position`.

        Raises:
            RequestError, APIError: A sequence failed in the engine.
        """
        self._usage.add_prompt(position, output)
        for sequence in output.outputs:
            self._usage.add_completion(sequence)
            if output.finished and sequence is output.outputs[-1]:
                transfer = _kv_transfer_fields(output) if position == 0 else {}
                warnings = self._requests.warning_fields if self._num_open == 1 else {}
                self._chunks.end_fields = {**transfer, **warnings}
            index = position * self._num_sequences + sequence.index
            encode = self._encoders.get(index)
            if encode is not None:
                self._unsent += encode(output, sequence)
            else:
                encode = self._encoders[index] = self._make_encoder(index, self._chunks)
                first = partial(encode, output, sequence)
                self._unsent += await self._run_in_thread(first) if output.prompt_logprobs else first()
            if sequence.finish_reason == "error":
                raise self._requests.error_of(sequence)
        self._num_open -= output.finished
        self._chunks.end_fields = {}

    def _write_now(self, output: RequestOutput) -> bool:
        """Writes the chunks of an output of the only prompt past the task and the layers above it, unless something is
        special; returns whether it has."""
        write = self._connection.write_chunk if self._connection is not None else None
        if write is None or output.prompt_logprobs:
            return False
        for sequence in output.outputs:
            if sequence.finish_reason is not None or sequence.index not in self._encoders:
                return False
        self._usage.add_prompt(0, output)
        for sequence in output.outputs:
            self._usage.add_completion(sequence)
            self._unsent += self._encoders[sequence.index](output, sequence)
        if self._unsent:
            write(self._take_unsent())
        return True

    def _take_unsent(self) -> bytes:
        taken, self._unsent = self._unsent, b""
        return taken


def _kv_transfer_fields(output: RequestOutput) -> dict[str, Any]:
    """The response's `kv_transfer_params`, if another engine may fetch the blocks of the (first) prompt."""
    params = output.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}
