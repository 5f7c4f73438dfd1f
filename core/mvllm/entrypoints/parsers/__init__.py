"""What a model's text means: its thoughts, its answer, and the functions that it calls. Text in, plain values out.

The idea: there is one way to read a text, piece by piece, and reading all of it is a single piece. So an answer that is
streamed and one that is not can never differ. A reader shows nothing that it would have to take back, keeps everything
that it cannot place as content, and does a bounded amount of work per character whatever the model writes.

    prompt ──┐
             v
    text ─> ReasoningStream ─> ReasoningDelta, ...                         `<think>...</think>`
             └─ the rest ─> ToolStream ─> ContentDelta, ToolCallDelta, ...  `<tool_call>...</tool_call>`

How a caller drives them, for one sequence of one request:

    parser = OutputParser(tools=tool_parser("hermes")(request_tools), reasoning=reasoning_parser("qwen3")())
    # before generating: params.skip_special_tokens = False, if parser.needs_special_tokens(special token texts)
    stream = parser.stream(prompt)
    for text in pieces:
        for delta in stream.feed(text):
            send(delta.as_json())
    for delta in stream.finish():
        send(delta.as_json())
    finish_reason = stream.finish_reason(reason)  # "tool_calls" in place of "stop", never of "length"

Without streaming, `parser.parse(text, prompt)` gives all of it as one `ParsedOutput`, which is a message by
`as_json()`. What `tools` and `tool_choice` ask for is read by `tool_choice.parse_tool_choice`; where it is a grammar's
work, text that was held to it is read by `OutputParserStream(choice.stream(), reasoning)`. Nothing here knows HTTP.
"""
