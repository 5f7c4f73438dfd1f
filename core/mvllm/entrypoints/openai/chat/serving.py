"""`POST /v1/chat/completions`: the model writes the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.logprobs import TokenFormatter, chat_logprobs, prompt_logprobs
from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.common.request_sampling_params import chat_sampling_params
from mvllm.entrypoints.openai.common.server_sent_events import DONE, ChunkEncoder, encode_json, error_event
from mvllm.entrypoints.openai.common.serving_base import GenerationHandler
from mvllm.entrypoints.openai.common.tokenizer_pool import MAX_TEMPLATE_LENGTH, TokenizerPool
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest, TokenizeRequest
from mvllm.entrypoints.parsers.interface import finish_reason_with_tools, merge_deltas
from mvllm.entrypoints.parsers.output_parser import OutputParser, OutputParserStream
from mvllm.entrypoints.parsers.registry import reasoning_parser as find_reasoning_parser
from mvllm.entrypoints.parsers.registry import tool_parser as find_tool_parser
from mvllm.entrypoints.parsers.registry import tool_parser_names
from mvllm.entrypoints.parsers.tool_choice import ToolChoice, parse_tool_choice
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType, TokensPrompt
from mvllm.messages.structured_outputs import StructuredOutputsParams

MAX_TRUNCATED_MESSAGES = 1 << 16
"""Messages and calls of a conversation whose prompt is cut; another has fewer than the model takes tokens."""

MAX_TOOLS = 4096
MAX_TEMPLATE_VARIABLES = 256


class ChatPromptRenderer:
    """Turns conversations into prompts.

    Args:
        engine: What the prompts are for.
        tokenizer_pool: Where templates run.
        chat_template: Template in place of the tokenizer's own, from the server's settings.
        trust_request_chat_template: Whether requests may bring their own.
        tool_parser, reasoning_parser: Names of what takes the answers apart, if anything does.

    Raises:
        ConfigError: There is no parser of such a name.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer_pool: TokenizerPool,
        *,
        chat_template: str | None = None,
        trust_request_chat_template: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.tool_parser = find_tool_parser(tool_parser) if tool_parser is not None else None
        self.reasoning_parser = find_reasoning_parser(reasoning_parser) if reasoning_parser is not None else None
        self.special_tokens = frozenset(map(engine.tokenizer.token_text, engine.tokenizer.special_ids))
        self.tokenizer_pool = tokenizer_pool
        self._engine = engine
        self._chat_template = chat_template
        self._trust_request_template = trust_request_chat_template

    async def render(self, request: ChatCompletionRequest | TokenizeRequest) -> TokensPrompt:
        """The prompt of a request's conversation, as text and as token ids.

        Raises:
            RequestError: The conversation or the template is not acceptable.
        """
        if request.messages is None:
            raise RequestError("messages is missing.", parameter="messages")
        self._check_length(request)
        foreign = bool(request.chat_template)
        if foreign and not self._trust_request_template:
            raise RequestError(
                "chat_template is refused, since a template is a program: this server uses the model's own. Start it "
                "with --trust-request-chat-template to permit others.",
                parameter="chat_template",
            )
        if len(request.chat_template or "") > MAX_TEMPLATE_LENGTH:
            raise RequestError(f"chat_template may have {MAX_TEMPLATE_LENGTH} characters.", parameter="chat_template")
        render = self.tokenizer_pool.render_with_request_template if foreign else self.tokenizer_pool.render
        text = await render(request.messages, self._template_arguments(request))
        return await self.tokenizer_pool.run(lambda: self._tokenize(text, request))

    def _check_length(self, request: ChatCompletionRequest | TokenizeRequest) -> None:
        """Refuses a conversation that fits no model of this length, before anything is done with its messages."""
        most = self._engine.model_config.max_model_len
        if getattr(request, "truncate_prompt_tokens", None) is not None:
            most = max(most, MAX_TRUNCATED_MESSAGES)
        messages = request.messages or ()
        calls = [message.get("tool_calls") for message in messages]
        found = len(messages) + sum(len(each) for each in calls if isinstance(each, list))
        if found > most:
            raise RequestError(
                f"The conversation has {found} messages and calls, which is at least as many tokens, but prompt and "
                f"output together may have {most} (max_model_len). Shorten the conversation.",
                parameter="messages",
            )
        check_tools(request.tools)
        if len(request.chat_template_kwargs or ()) > MAX_TEMPLATE_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs may have {MAX_TEMPLATE_VARIABLES} entries.", parameter="chat_template_kwargs"
            )

    def _template_arguments(self, request: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
        """What `render_chat` is to be told."""
        go_on = bool(request.continue_final_message)
        extra = dict(request.chat_template_kwargs or {})
        effort = getattr(request, "reasoning_effort", None)
        if effort is not None:
            extra.setdefault("reasoning_effort", effort)
        return {
            "chat_template": request.chat_template or self._chat_template,
            "add_generation_prompt": not go_on
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            "continue_final_message": go_on,
            "tools": request.tools,
            "chat_template_kwargs": extra,
        }

    def _tokenize(self, text: str, request: ChatCompletionRequest | TokenizeRequest) -> TokensPrompt:
        self._engine.input_processor.check_text(text)
        # The template has written the special tokens already.
        truncated = getattr(request, "truncate_prompt_tokens", None) is not None
        ids = self.tokenizer_pool.encode_sync(text, add_special_tokens=False, truncated=truncated)
        return TokensPrompt(prompt_token_ids=ids, prompt=text)


def check_tools(tools: Sequence[Any] | None) -> None:
    """Refuses tools of which there are too many.

    Raises:
        RequestError: There are.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise RequestError(f"tools may have {MAX_TOOLS} entries; found {len(tools or ())}.", parameter="tools")


class ChatHandler(GenerationHandler):
    """One request for an assistant's turn, in whatever shape it is answered.

    Args:
        engine: What answers it.
        prompts: Makes the prompt.
        model: The model's name in the answer.
        request: As it was sent.
        kind: What its id begins with.

    Raises:
        RequestError: On construction: a setting is not acceptable.
    """

    _request: ChatCompletionRequest

    def __init__(
        self, engine: AsyncLLM, prompts: ChatPromptRenderer, model: str, request: ChatCompletionRequest, kind: str
    ) -> None:
        self._prompt_renderer = prompts
        check_tools(request.tools)
        self._tool_choice = parse_tool_choice(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        form = output_constraint(request, self._tool_choice)
        params = chat_sampling_params(request, engine.model_config.generation_defaults, form)
        self._output_parser = _build_output_parser(request, prompts, self._tool_choice, in_form=form is not None)
        if self._output_parser.needs_special_tokens(prompts.special_tokens):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        super().__init__(engine, model, request, kind, params, form)

    async def _build_prompts(self) -> Sequence[PromptType]:
        prompt = await self._prompt_renderer.render(self._request)
        if self._request.cache_salt is not None:
            prompt["cache_salt"] = self._request.cache_salt
        form = self._params.structured_outputs
        thoughts = None if form is None else self._output_parser.reasoning_tags_for(prompt.get("prompt"))
        if isinstance(form, StructuredOutputsParams) and thoughts is not None:
            start, end = thoughts
            behind = msgspec.structs.replace(form, thoughts_start=start, thoughts_end=end)
            self._params = msgspec.structs.replace(self._params, structured_outputs=behind)
        return [cast(PromptType, prompt)]

    def _make_output_stream(self, output: RequestOutput) -> OutputParserStream:
        """What takes one choice apart."""
        return self._output_parser.stream(output.prompt, self._tool_choice.stream())


class ChatCompletionHandler(ChatHandler):
    """One request for the next message. See ChatHandler."""

    def __init__(
        self, engine: AsyncLLM, prompts: ChatPromptRenderer, model: str, request: ChatCompletionRequest
    ) -> None:
        super().__init__(engine, prompts, model, request, "chatcmpl-")
        self._token_formatter = TokenFormatter(
            engine.tokenizer,
            as_ids=bool(request.return_tokens_as_token_ids),
            skip_special=self._params.skip_special_tokens,
        )
        self._is_passthrough = self._output_parser.is_passthrough and not self._tool_choice.is_constrained

    async def full_response(self) -> bytes:
        """The whole answer."""
        assert self._engine_requests is not None
        [output] = await self._engine_requests.collect()
        self._usage.add(0, output)

        def build() -> bytes:
            answer: dict[str, Any] = {
                **self._common_fields("chat.completion"),
                "choices": [self._full_choice(sequence, output) for sequence in output.outputs],
                "usage": self._usage.to_usage(),
            }
            self._add_prompt_fields(answer, output)
            return encode_json(answer)

        if self._params.prompt_logprobs is None:
            return build()
        return await self._prompt_renderer.tokenizer_pool.run(build)  # there may be many

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events; an error is one of them."""
        assert self._engine_requests is not None
        request = self._request
        include, continuous = self._stream_usage_options()
        frame = ChunkEncoder(self._common_fields("chat.completion.chunk"), with_usage=include)
        plain = self._is_passthrough and not (request.logprobs or request.return_token_ids or continuous)
        streams: dict[int, OutputParserStream] = {}
        before = [b'{"index":%d,"delta":{"content":' % i for i in range(self._params.n)]
        begun: set[int] = set()
        written = b""
        try:
            async for _, output in self._engine_requests.outputs():
                self._usage.add(0, output)
                for sequence in output.outputs:
                    index = sequence.index
                    if index not in begun:
                        begun.add(index)
                        if output.prompt_logprobs:  # there may be many
                            opening = await self._prompt_renderer.tokenizer_pool.run(
                                partial(self._first_chunk, index, output)
                            )
                        else:
                            opening = self._first_chunk(index, output)
                        written += frame.encode(opening)
                    if plain:
                        if sequence.text:
                            content = encode_json(sequence.text)
                            written += frame.encode(
                                before[index] + content + b'},"logprobs":null,"finish_reason":null}'
                            )
                    elif sequence.text or sequence.token_ids or sequence.finish_reason is not None:
                        if index not in streams:
                            streams[index] = self._make_output_stream(output)
                        for piece in self._delta_chunks(sequence, streams[index]):
                            usage = self._usage.to_usage() if continuous else None
                            written += frame.encode(piece) if usage is None else frame.encode_with_usage(piece, usage)
                    if sequence.finish_reason is not None:
                        written += frame.encode(self._last_chunk(sequence, streams.get(index)))
                        if sequence.finish_reason == "error":
                            raise self._engine_requests.error_of(sequence)
                if written and not output.finished:  # else it leaves together with the stream's end
                    yield written
                    written = b""
        except Exception as e:  # noqa: BLE001  (logged where it is not an answer)
            yield written + error_event(to_api_error(e))
            return
        if include:
            written += frame.encode_with_usage(b"", self._usage.to_usage())
        yield written + DONE

    def _common_fields(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Why a choice ended: a call of the function that the request itself has named is no news."""
        return reason if self._tool_choice.mode == "named" else finish_reason_with_tools(reason, num_calls)

    def _full_choice(self, sequence: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        reader = self._make_output_stream(output)
        parsed = merge_deltas([*reader.feed(sequence.text), *reader.finish()])
        message = parsed.as_json()
        if self._request.echo and self._request.messages:
            message["content"] = _text_of(self._request.messages[-1]) + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": message,
            "logprobs": self._logprobs(sequence),
            "finish_reason": self._finish_reason(sequence.finish_reason, len(parsed.tool_calls)),
            "stop_reason": sequence.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        return choice

    def _first_chunk(self, index: int, output: RequestOutput) -> bytes:
        """The first piece of a choice: who speaks."""
        content = _text_of(self._request.messages[-1]) if self._request.echo and self._request.messages else ""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": content},
            "logprobs": None,
            "finish_reason": None,
        }
        self._add_prompt_fields(choice, output)
        return encode_json(choice)

    def _delta_chunks(self, sequence: CompletionOutput, stream: OutputParserStream) -> list[bytes]:
        """The next pieces of a choice; what concerns its tokens is in the first."""
        deltas = [delta.as_json() for delta in stream.feed(sequence.text)]
        if sequence.finish_reason is not None:
            deltas += [delta.as_json() for delta in stream.finish()]
        logprobs = self._logprobs(sequence)
        if not deltas and (logprobs is not None or self._request.return_token_ids):
            deltas = [{}]
        pieces = []
        for i, delta in enumerate(deltas):
            piece: dict[str, Any] = {
                "index": sequence.index,
                "delta": delta,
                "logprobs": logprobs if i == 0 else None,
                "finish_reason": None,
            }
            if self._request.return_token_ids:
                piece["token_ids"] = sequence.token_ids if i == 0 else []
            pieces.append(encode_json(piece))
        return pieces

    def _last_chunk(self, sequence: CompletionOutput, stream: OutputParserStream | None) -> bytes:
        """The last piece of a choice: why it ended."""
        reason = sequence.finish_reason
        return encode_json(
            {
                "index": sequence.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": reason if stream is None else self._finish_reason(reason, stream.num_calls),
                "stop_reason": sequence.stop_reason,
            }
        )

    def _logprobs(self, sequence: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs or sequence.logprobs is None:
            return None
        return chat_logprobs(
            self._token_formatter, sequence.token_ids, sequence.logprobs, self._request.top_logprobs or 0
        )

    def _add_prompt_fields(self, target: dict[str, Any], output: RequestOutput) -> None:
        if self._request.prompt_logprobs is not None:
            target["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self._request.return_token_ids:
            target["prompt_token_ids"] = output.prompt_token_ids


def _build_output_parser(
    request: ChatCompletionRequest, prompts: ChatPromptRenderer, choice: ToolChoice, *, in_form: bool
) -> OutputParser:
    """What takes the answers to a request apart.

    Args:
        in_form: Whether they are held to a form: then there is nothing else in them, but for thoughts before it.

    Raises:
        RequestError: The request wants what this server cannot do.
    """
    reasoning = prompts.reasoning_parser() if prompts.reasoning_parser is not None else None
    include_reasoning = request.include_reasoning is not False
    if in_form:
        tagged = reasoning if reasoning is not None and reasoning.tags is not None else None
        return OutputParser(reasoning=tagged, include_reasoning=include_reasoning)
    if choice.mode == "auto" and prompts.tool_parser is None:
        raise RequestError(
            "tools need a parser that finds calls in what the model writes, and the chat template does not show which: "
            f"start the server with --tool-call-parser (one of {', '.join(tool_parser_names())}), or send tool_choice "
            "'none' to show them to the model all the same.",
            parameter="tools",
        )
    return OutputParser(
        tools=prompts.tool_parser(choice.tools) if choice.mode == "auto" and prompts.tool_parser else None,
        reasoning=reasoning,
        include_reasoning=include_reasoning,
        single_call=not choice.parallel,
    )


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
