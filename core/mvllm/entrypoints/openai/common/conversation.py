"""A conversation of any API as the engine runs it: prompt, tools, structured output and output parser."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer, check_tools
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.common.request_sampling_params import chat_sampling_params
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.parsers.interface import Delta, ReasoningDelta, ReasoningStream
from mvllm.entrypoints.parsers.output_parser import OutputParser, OutputParserStream
from mvllm.entrypoints.parsers.registry import reasoning_parser_names, tool_parser_names
from mvllm.entrypoints.parsers.tool_choice import ToolChoice, parse_tool_choice
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.structured_outputs import StructuredOutputsParams


class Conversation:
    """What a chat completion request asks of the engine, and how the output of the model is read.

    Args:
        context: The engine, and what handlers share.
        request: The body of the HTTP request, or the chat completion request that it amounts to.
        requires_thinking_tags: Whether a budget of thinking tokens is an error if the server does not know the tags of
            the model's thoughts. Otherwise those of `DEFAULT_TAGS` are assumed.

    Attributes:
        request: The request; replaced to shorten it before the prompt is built.
        params: Sampling parameters. `build_prompts` completes them.
        constraint: Structured output that the request asks for.
        tool_choice: Which tools the model may or must call.
        output_parser: Separates reasoning and tool calls from the text.

    Raises:
        RequestError: On construction: a setting is not acceptable.
    """

    def __init__(
        self, context: ServingContext, request: ChatCompletionRequest, *, requires_thinking_tags: bool = True
    ) -> None:
        renderer = context.prompt_renderer
        check_tools(request.tools)
        self._context = context
        self.request = request
        self.tool_choice = parse_tool_choice(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
        self.constraint = output_constraint(request, self.tool_choice, renderer.tool_parser)
        params = chat_sampling_params(request, context.engine.model_config.generation_defaults, self.constraint)
        self.output_parser = _build_output_parser(
            request,
            renderer,
            self.tool_choice,
            is_constrained=self.constraint is not None and self.tool_choice.mode != "auto",
        )
        if self.output_parser.needs_special_tokens(renderer.special_tokens):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        has_tags = self.output_parser.thinking_tags is not None
        if params.thinking_token_budget is not None and requires_thinking_tags and not has_tags:
            raise RequestError(
                "thinking_token_budget needs a parser that knows where the model's thoughts end: start the server with "
                f"--reasoning-parser (one of {', '.join(reasoning_parser_names())}). The chat template does not show "
                "which, or the format has no fixed tags.",
                parameter="thinking_token_budget",
            )
        self.params = params

    async def build_prompts(self) -> list[PromptType]:
        """The prompt. Sets what `params` need of it.

        Raises:
            RequestError: The request is not acceptable.
        """
        prompt = await self._context.prompt_renderer.render(self.request)
        if self.request.cache_salt is not None:
            prompt["cache_salt"] = self.request.cache_salt
        text = self._parser_prompt(prompt.get("prompt"))
        if self.params.thinking_token_budget is not None and self.output_parser.thinking_tags is not None:
            thinking_tags = self.output_parser.thinking_tags_for(text)
            self.params = (
                msgspec.structs.replace(self.params, thinking_token_budget=None)
                if thinking_tags is None
                else msgspec.structs.replace(self.params, thinking_tags=thinking_tags)
            )
        constraint = self.params.structured_outputs
        tags = None if constraint is None else self.output_parser.reasoning_tags_for(text)
        if isinstance(constraint, StructuredOutputsParams) and tags is not None:
            start, end = tags
            after_reasoning = msgspec.structs.replace(constraint, thoughts_start=start, thoughts_end=end)
            self.params = msgspec.structs.replace(self.params, structured_outputs=after_reasoning)
        return [cast(PromptType, prompt)]

    async def read_deltas(
        self, requests: EngineRequests, usage: UsageCounter
    ) -> AsyncGenerator[tuple[RequestOutput, list[Delta]], None]:
        """The outputs of one sequence, each with the deltas of its text.

        Args:
            requests: The request of the prompt.
            usage: Counts the tokens.

        Raises:
            RequestError, APIError: The sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """
        parser_stream: OutputParserStream | None = None
        async with contextlib.aclosing(requests.outputs()) as outputs:
            async for _, output in outputs:
                usage.add(0, output)
                if parser_stream is None:
                    parser_stream = self.parser_stream(output)
                deltas: list[Delta] = []
                for sequence in output.outputs:  # there is one
                    if sequence.finish_reason == "error":
                        raise requests.error_of(sequence)
                    deltas += parser_stream.feed(sequence.text)
                    if sequence.finish_reason is not None:
                        deltas += parser_stream.finish(sequence.finish_reason)
                yield output, deltas

    def parser_stream(self, output: RequestOutput) -> OutputParserStream:
        """Parses the text of one sequence."""
        return self.output_parser.stream(self._parser_prompt(output.prompt), self.tool_choice.stream())

    def count_reasoning_tokens(self, token_ids: Sequence[int], prompt: str | None, at_least: int = 0) -> int:
        """The number of tokens up to the end of the reasoning. Only if the output parser separates it.

        Args:
            token_ids: The tokens of one sequence.
            prompt: The prompt, if known.
            at_least: A lower bound that is known.
        """
        tokenizer = self._context.engine.tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=self.params.skip_special_tokens)
        stream = partial(self.output_parser.reasoning_stream, self._parser_prompt(prompt))
        return _count_reasoning_tokens(stream, decode, token_ids, at_least)

    def _parser_prompt(self, prompt: str | None) -> str | None:
        """The prompt, as the output parser gets it."""
        if prompt is None or not self.request.continue_final_message or not self.request.messages:
            return prompt
        content = self.request.messages[-1].get("content") or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
        return self.output_parser.continued_prompt(prompt, content)


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


def _count_reasoning_tokens(
    make_stream: Callable[[], ReasoningStream],
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    at_least: int = 0,
) -> int:
    """The number of tokens up to the end of the reasoning, tags included; 0 without reasoning.

    Decodes and parses beginnings of the output, a logarithmic number of times.

    Args:
        make_stream: Makes a parser for the output.
        decode: The text of tokens, as the parser gets it.
        token_ids: The output.
        at_least: A lower bound that is known.
    """

    def parse(num_tokens: int) -> tuple[bool, int]:
        """Whether the reasoning is open after that many tokens, and its length in characters."""
        stream = make_stream()
        deltas = stream.feed(decode(token_ids[:num_tokens]))
        return stream.in_reasoning, sum(len(delta.text) for delta in deltas if isinstance(delta, ReasoningDelta))

    is_open, length = parse(len(token_ids))
    if is_open:
        return len(token_ids)
    if not length:
        return 0
    return bisect.bisect_left(range(len(token_ids)), True, lo=at_least, key=lambda n: parse(n) == (False, length))
