"""Output parsers: split a model's text into reasoning, content and tool calls. They know nothing of HTTP.

All parsing is incremental, and a whole output is parsed as a single piece, so streamed and complete responses cannot
differ. A parser never retracts a delta, returns text that matches no format as content, and does a bounded amount of
work per character.

    prompt ──┐
             v
    text ─> ReasoningStream ─> ReasoningDelta, ...                         `<think>...</think>`
             └─ the rest ─> ToolStream ─> ContentDelta, ToolCallDelta, ...  `<tool_call>...</tool_call>`

Use for one sequence of one request:

    parser = OutputParser(tools=tool_parser("hermes")(request_tools), reasoning=reasoning_parser("qwen3")())
    # before generating: params.skip_special_tokens = False, if parser.needs_special_tokens(special token texts)
    stream = parser.stream(prompt)
    for text in pieces:
        for delta in stream.feed(text):
            send(delta.as_json())
    for delta in stream.finish():
        send(delta.as_json())
    finish_reason = stream.finish_reason(reason)  # "tool_calls" in place of "stop", never of "length"

Without streaming, `parser.parse(text, prompt)` returns a `ParsedOutput`; its `as_json()` is a message.
`tool_choice.parse_tool_choice` parses the request's `tools` and `tool_choice`. If they constrain the output with a
grammar, `OutputParserStream(choice.stream(), reasoning)` parses the constrained text.
"""
