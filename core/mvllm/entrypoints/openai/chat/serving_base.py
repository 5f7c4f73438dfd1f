"""Base of the handlers of conversations of all APIs: prompt, tools, structured output and output parser."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, cast

import msgspec

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer, check_tools
from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.common.reasoning_tokens import count_reasoning_tokens
from mvllm.entrypoints.openai.common.request_sampling_params import chat_sampling_params
from mvllm.entrypoints.openai.common.serving_base import GenerationHandler
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.parsers.interface import Delta
from mvllm.entrypoints.parsers.output_parser import OutputParser, OutputParserStream
from mvllm.entrypoints.parsers.registry import reasoning_parser_names, tool_parser_names
from mvllm.entrypoints.parsers.tool_choice import ToolChoice, parse_tool_choice
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.structured_outputs import StructuredOutputsParams


class ChatHandler(GenerationHandler):
    """Answers a conversation with the assistant's next message.

    Args:
        context, model, id_prefix: As for RequestHandler.
        request: The body of the HTTP request, or the chat completion request that it amounts to.

    Raises:
        RequestError: On construction: a setting is not acceptable.

    Attributes:
        field_names: Fields of a chat completion request, with the corresponding fields of the API that the handler
            serves. Errors of `start` have these names.
        requires_thinking_tags: Whether a budget of thinking tokens is an error if the server does not know the tags of
            the model's thoughts. Otherwise those of `DEFAULT_TAGS` are assumed.
    """

    field_names: ClassVar[Mapping[str, str]] = {}
    requires_thinking_tags: ClassVar[bool] = True
    _request: ChatCompletionRequest

    def __init__(self, context: ServingContext, model: str, id_prefix: str, request: ChatCompletionRequest) -> None:
        renderer = context.prompt_renderer
        check_tools(request.tools)
        self._tool_choice = parse_tool_choice(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        constraint = output_constraint(request, self._tool_choice, renderer.tool_parser)
        params = chat_sampling_params(request, context.engine.model_config.generation_defaults, constraint)
        self._output_parser = _build_output_parser(
            request,
            renderer,
            self._tool_choice,
            is_constrained=constraint is not None and self._tool_choice.mode != "auto",
        )
        if self._output_parser.needs_special_tokens(renderer.special_tokens):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if params.thinking_token_budget is not None and self.requires_thinking_tags:
            _check_thinking_tags(self._output_parser)
        super().__init__(context, model, id_prefix, request, params, constraint)

    async def start(self) -> None:
        """Adds the prompt to the engine. See RequestHandler."""
        with renamed_fields(self.field_names):
            await super().start()

    async def _read_deltas(self) -> AsyncGenerator[tuple[RequestOutput, list[Delta]], None]:
        """The outputs of a request for one sequence, each with the deltas of its text. Counts the usage.

        Raises:
            RequestError, APIError: The sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """
        parser_stream: OutputParserStream | None = None
        async with contextlib.aclosing(self._engine_requests.outputs()) as outputs:
            async for _, output in outputs:
                self._usage.add(0, output)
                if parser_stream is None:
                    parser_stream = self._make_parser_stream(output)
                deltas: list[Delta] = []
                for sequence in output.outputs:  # there is one
                    if sequence.finish_reason == "error":
                        raise self._engine_requests.error_of(sequence)
                    deltas += parser_stream.feed(sequence.text)
                    if sequence.finish_reason is not None:
                        deltas += parser_stream.finish(sequence.finish_reason)
                yield output, deltas

    async def _build_prompts(self) -> Sequence[PromptType]:
        prompt = await self._context.prompt_renderer.render(self._request)
        if self._request.cache_salt is not None:
            prompt["cache_salt"] = self._request.cache_salt
        if self._params.thinking_token_budget is not None and self._output_parser.thinking_tags is not None:
            thinking_tags = self._output_parser.thinking_tags_for(self._parser_prompt(prompt.get("prompt")))
            self._params = (
                msgspec.structs.replace(self._params, thinking_token_budget=None)
                if thinking_tags is None
                else msgspec.structs.replace(self._params, thinking_tags=thinking_tags)
            )
        constraint = self._params.structured_outputs
        tags = None
        if constraint is not None:
            tags = self._output_parser.reasoning_tags_for(self._parser_prompt(prompt.get("prompt")))
        if isinstance(constraint, StructuredOutputsParams) and tags is not None:
            start, end = tags
            after_reasoning = msgspec.structs.replace(constraint, thoughts_start=start, thoughts_end=end)
            self._params = msgspec.structs.replace(self._params, structured_outputs=after_reasoning)
        return [cast(PromptType, prompt)]

    def _make_parser_stream(self, output: RequestOutput) -> OutputParserStream:
        """Parses the text of one sequence."""
        return self._output_parser.stream(self._parser_prompt(output.prompt), self._tool_choice.stream())

    def _parser_prompt(self, prompt: str | None) -> str | None:
        """The prompt, as the output parser gets it."""
        if prompt is None or not self._request.continue_final_message or not self._request.messages:
            return prompt
        content = self._request.messages[-1].get("content") or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
        return self._output_parser.continued_prompt(prompt, content)

    def _count_reasoning_tokens(self, token_ids: Sequence[int], prompt: str | None, at_least: int = 0) -> int:
        """The number of tokens up to the end of the reasoning. Only if the output parser separates it.

        Args:
            token_ids: The tokens of one sequence.
            prompt: The prompt, if known.
            at_least: A lower bound that is known.
        """
        decode = partial(self._engine.tokenizer.decode, skip_special_tokens=self._params.skip_special_tokens)
        stream = partial(self._output_parser.reasoning_stream, self._parser_prompt(prompt))
        return count_reasoning_tokens(stream, decode, token_ids, at_least)


def _check_thinking_tags(parser: OutputParser) -> None:
    """Checks that the tags of the thoughts are known whose budget a request limits.

    Raises:
        RequestError: They are not.
    """
    if parser.thinking_tags is None:
        raise RequestError(
            "thinking_token_budget needs a parser that knows where the model's thoughts end: start the server with "
            f"--reasoning-parser (one of {', '.join(reasoning_parser_names())}). The chat template does not show "
            "which, or the format has no fixed tags.",
            parameter="thinking_token_budget",
        )


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields in errors: from those of the chat completion request to those of another API.

    Args:
        names: The other API's name of each field that differs.
    """
    try:
        yield
    except RequestError as e:
        if e.parameter is None or e.parameter not in names:
            raise
        raise RequestError(str(e), parameter=names[e.parameter]) from e


def _build_output_parser(
    request: ChatCompletionRequest, renderer: ChatPromptRenderer, choice: ToolChoice, *, is_constrained: bool
) -> OutputParser:
    """The parser of the request's outputs.

    Args:
        is_constrained: Whether the output is structured: then only reasoning may come before it.

    Raises:
        RequestError: The request has tools, and the server has no tool parser.
    """
    reasoning = renderer.reasoning_parser() if renderer.reasoning_parser is not None else None
    include_reasoning = request.include_reasoning is not False
    if is_constrained:
        tagged = reasoning if reasoning is not None and reasoning.tags is not None else None
        return OutputParser(reasoning=tagged, include_reasoning=include_reasoning)
    if choice.mode == "auto" and renderer.tool_parser is None:
        raise RequestError(
            "tools need a parser that finds calls in what the model writes, and the chat template does not show which: "
            f"start the server with --tool-call-parser (one of {', '.join(tool_parser_names())}), or send tool_choice "
            "'none' to show them to the model all the same.",
            parameter="tools",
        )
    return OutputParser(
        tools=renderer.tool_parser(choice.tools) if choice.mode == "auto" and renderer.tool_parser else None,
        reasoning=reasoning,
        include_reasoning=include_reasoning,
        single_call=not choice.parallel,
    )
