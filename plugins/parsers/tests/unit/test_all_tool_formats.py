"""Every tool call format: published examples, every split of them, malformed and random text, types of arguments."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from mvllm.entrypoints.parsers.interface import ContentDelta, ToolCallDelta, merge_deltas
from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import tool_parser, tool_parser_names
from tests.unit.entrypoints.parsers.parser_helpers import stream_deltas, streamed, without_ids


def function(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TOOLS = [
    function("get_weather", city=STRING, days=INTEGER),
    function("get_time"),
    function("write", path=STRING, text=STRING, options={"type": "object"}, lines={"type": "array"}, backup=BOOLEAN),
]
W = ("get_weather", {"city": "Paris", "days": 3})
T = ("get_time", {})
CODE = 'if a < b and "x" > \'y\':\n\treturn {"é": "\\n</p>"}  # 北京 \U0001f600'
RICH = (
    "write",
    {"path": "/tmp/a b", "text": CODE, "options": {"a": [1, {"b": None}]}, "lines": [1, 2.5], "backup": True},
)

DS = "｜DSML｜"
HARMONY = "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>"


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def raw(value):
    return value if isinstance(value, str) else as_json(value)


def python(value):
    return repr(value)


def gemma(value, quotes):
    if isinstance(value, str):
        return quotes + value + quotes
    if isinstance(value, dict):
        return "{" + ",".join(f"{quotes}{k}{quotes}:{gemma(v, quotes)}" for k, v in value.items()) + "}"
    return "[" + ",".join(gemma(v, quotes) for v in value) + "]" if isinstance(value, list) else as_json(value)


def gemma_calls(start, end, quotes):
    def write(calls):
        return "".join(f"{start}call:{name}{{{members(a)}}}{end}" for name, a in calls)

    def members(arguments):
        return ",".join(f"{key}:{gemma(value, quotes)}" for key, value in arguments.items())

    return write


def objects(calls):
    return [as_json({"name": name, "arguments": a}) for name, a in calls]


def hermes(calls):
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))


def json_list(before, after=""):
    return lambda calls: f"{before}[{', '.join(objects(calls))}]{after}"


def llama3_json(calls):
    return "; ".join(as_json({"name": name, "parameters": a}) for name, a in calls)


def mistral(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(a)}" for name, a in calls)


def python_list(calls):
    return f"[{', '.join(python_call(*one) for one in calls)}]"


def python_call(name, arguments):
    return f"{name}({', '.join(f'{k}={python(v)}' for k, v in arguments.items())})"


def olmo3(calls):
    return "<function_calls>\n" + "\n".join(python_call(*one) for one in calls) + "\n</function_calls>"


def deepseek_v3(calls):
    start, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    inner = "\n".join(f"{start}{name}\n```json\n{as_json(a)}\n```{end}" for name, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    inner = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>" for name, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v32(calls):
    def one(key, value):
        string = str(isinstance(value, str)).lower()
        return f'<{DS}parameter name="{key}" string="{string}">{raw(value)}</{DS}parameter>\n'

    inner = "".join(
        f'<{DS}invoke name="{name}">\n' + "".join(one(*item) for item in a.items()) + f"</{DS}invoke>\n"
        for name, a in calls
    )
    return f"<{DS}function_calls>\n{inner}</{DS}function_calls>"


def kimi_k2(calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
        for i, (name, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def glm(line):
    def write(calls):
        return line.join(
            f"<tool_call>{name}{line}"
            + "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{raw(v)}</arg_value>{line}" for k, v in a.items())
            + "</tool_call>"
            for name, a in calls
        )

    return write


def qwen3_coder(calls):
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for name, a in calls
    )


def minimax_m2(calls):
    inner = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{raw(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for name, a in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def gpt_oss(calls):
    return "".join(HARMONY.format(name=name, json=as_json(a)) for name, a in calls)


WRITERS = [
    ("hermes", hermes), ("granite4", hermes), ("llama3_json", llama3_json), ("mistral", mistral),
    ("pythonic", python_list), ("llama4_pythonic", python_list),
    ("llama4_pythonic", lambda calls: f"<|python_start|>{python_list(calls)}<|python_end|>"), ("olmo3", olmo3),
    ("deepseek_v3", deepseek_v3), ("deepseek_v31", deepseek_v31), ("deepseek_v32", deepseek_v32), ("kimi_k2", kimi_k2),
    ("glm45", glm("\n")), ("glm47", glm("")), ("qwen3_coder", qwen3_coder), ("minimax_m2", minimax_m2),
    ("gpt_oss", gpt_oss), ("granite", json_list("<|tool_call|>")), ("granite", json_list("<tool_call>")),
    ("phi4_mini", json_list("functools")), ("phi4_mini", json_list("<|tool_call|>", "<|/tool_call|>")),
    ("gemma4", gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("functiongemma", gemma_calls("<start_function_call>", "<end_function_call>", "<escape>")),
]  # fmt: skip
every_format = pytest.mark.parametrize(
    ("name", "write"), WRITERS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(WRITERS)]
)


def make(name):
    return OutputParser(tools=tool_parser(name)(TOOLS))


def calls_of(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def random_cuts(rng, text, size):
    pieces, i = [], 0
    while i < len(text):
        n = rng.randint(1, size)
        pieces.append(text[i : i + n])
        i += n
    return pieces


def test_every_format_is_here():
    aliases = {"llama4_json", "openai", "phi4_mini_json", "qwen25", "qwen3_xml"}
    assert {name for name, _ in WRITERS} | aliases == set(tool_parser_names())


@every_format
class TestEveryFormat:
    def test_parallel_calls_are_found_with_text_around_them(self, name, write):
        parsed = make(name).parse("Let me look.\n" + write([W, T, RICH]) + "\nDone.")
        assert calls_of(parsed) == [W, T, RICH]
        assert parsed.content.split() == ["Let", "me", "look.", "Done."]
        assert len({call.id for call in parsed.tool_calls}) == 3

    def test_an_answer_of_calls_has_no_content(self, name, write):
        parsed = make(name).parse(write([W]) + ("" if name == "gpt_oss" else "\n"))
        assert calls_of(parsed) == [W] and parsed.as_json()["content"] is None

    def test_the_result_does_not_depend_on_the_split(self, name, write):
        parser, text = make(name), "Hi.\n" + write([W, RICH, T]) + "\nBye <x>"
        whole, rng = without_ids(parser.parse(text)), random.Random(name)
        assert without_ids(streamed(parser, list(text))) == whole
        for i in range(len(text)):
            assert without_ids(streamed(parser, [text[:i], text[i:]])) == whole
        for size in (4, 4, 12, 40):
            assert without_ids(streamed(parser, random_cuts(rng, text, size))) == whole
        tokens = re.findall(r"<[^<>\s]*>|\s?\w+|.", text, re.DOTALL)
        assert without_ids(streamed(parser, tokens)) == whole

    def test_a_truncated_text_keeps_what_it_has(self, name, write):
        """The text of a call that has not started is dropped, if tags show that it is one. The arguments of one that
        has are a prefix of the whole if the output was cut off, and closed if the model has ended it."""
        parser, text = make(name), write([W, RICH])
        whole = parser.parse(text).tool_calls
        for end in range(len(text)):
            stream = parser.stream()
            parsed = merge_deltas([*stream.feed(text[:end]), *stream.finish("length")])
            if parsed.content and not parsed.tool_calls:
                assert parsed.content == text[:end] and not re.search(r"<[^<>\s]*>|\[[A-Z_]+\]", text[:end])
            assert not (parsed.tool_calls and parsed.content.strip()) or name == "gpt_oss"
            for call, complete in zip(parsed.tool_calls, whole, strict=False):
                assert call.name == complete.name and complete.arguments.startswith(call.arguments)
            closed = parser.parse(text[:end])
            assert [call.name for call in closed.tool_calls] == [call.name for call in parsed.tool_calls]
            assert all(isinstance(arguments, dict) for _, arguments in calls_of(closed))

    def test_arguments_are_streamed(self, name, write):
        deltas = stream_deltas(make(name), list(write([RICH])))
        pieces = [d.arguments for d in deltas if isinstance(d, ToolCallDelta) and d.arguments]
        assert len(pieces) > 20 and json.loads("".join(pieces)) == RICH[1]

    def test_a_function_that_was_not_declared_is_called_too(self, name, write):
        assert calls_of(make(name).parse(write([("other", {"a": 1, "b": "x"})]))) == [("other", {"a": 1, "b": "x"})]

    def test_plain_text_is_content(self, name, write):
        for text in ("", "Yes.", "a < b, [1] and {x}", "<p>f(x) = [g(x)]</p>", "1. call:f{}", "import functools as f"):
            assert without_ids(make(name).parse(text)) == (text, [], None)

    def test_random_text_raises_nothing_and_does_not_depend_on_the_split(self, name, write):
        parser, rng = make(name), random.Random(name)
        parts = fragments(parser, write)
        for _ in range(150):
            text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
            whole = without_ids(parser.parse(text))
            assert without_ids(streamed(parser, random_cuts(rng, text, 6))) == whole, text
            if not whole[1] and name != "gpt_oss":
                rest = iter(text)  # the texts of unfinished calls are dropped, nothing is moved or repeated
                assert all(c in rest for c in whole[0])
            for _, arguments in whole[1]:
                assert isinstance(json.loads(arguments), dict)

    def test_long_texts_take_linear_time(self, name, write):
        parser = make(name)
        for unit in fragments(parser, write)[:12]:
            parser.parse(unit * (40_000 // len(unit)))


def fragments(parser, write):
    text = write([W, T])
    markers = [*re.findall(r"<[^<>\s]*>|\[[A-Z_]+\]", text), *parser.markers]
    return [
        *markers, *(m[: len(m) // 2] for m in markers), text, text[: len(text) // 3], text[: len(text) * 2 // 3],
        text[len(text) // 2 :], "get_time", "f", "(", ")", "=", "{", "}", "[", "]", ",", ":", '"', "'", "\\", "\n", " ",
        "<", ">", "/", "|", "call:", "to=f", "functools", '"name"', '"arguments"', "é", "1", "-", "None", "```", "a=1",
        "null", "\x00", "\U0001f600",
    ]  # fmt: skip


CASES = {
    "qwen3_coder": [
        # Without the outer tags; without closing tags; text in place of arguments.
        (
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
            "",
            [("get_weather", '{"city": "Paris"}')],
        ),
        (
            "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>",
            "",
            [("get_weather", '{"city": "Paris", "days": 3}')],
        ),
        ("<tool_call><function=f>oops", "<tool_call><function=f>oops", []),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\noops</tool_call>", "oops", [("f", '{"a": 1}')]),
        ("<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
        # Line breaks next to the tags are layout, others are not.
        (
            "<function=write>\n<parameter=text>\n\n a \n\n</parameter></function>",
            "",
            [("write", '{"text": "\\n a \\n"}')],
        ),
        ("<function=write>\n<parameter=text>\n</parameter></function>", "", [("write", '{"text": ""}')]),
        # Strings stay strings; other types are converted; a wrong type stays a string.
        (
            "<function=get_weather><parameter=city>3</parameter><parameter=days>x</parameter></function>",
            "",
            [("get_weather", '{"city": "3", "days": "x"}')],
        ),
        (
            "<function=write><parameter=options>{'a': None}</parameter><parameter=backup>True</parameter></function>",
            "",
            [("write", '{"options": {"a": null}, "backup": true}')],
        ),
        ("<function=get_weather><parameter=days>4.0</parameter></function>", "", [("get_weather", '{"days": 4}')]),
    ],
    "glm47": [
        ("<tool_call>get_weather<arg_key>city</arg_key>oops", "oops", [("get_weather", '{"city": null}')]),
        ("<tool_call></tool_call>", "", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
    "minimax_m2": [
        ("<minimax:tool_call>\nx</minimax:tool_call>", "<minimax:tool_call>\nx</minimax:tool_call>", []),
        ("<invoke name='get_time'>\n</invoke>", "", [("get_time", "{}")]),
    ],
    "deepseek_v32": [
        (
            f'<{DS}invoke name="f"><{DS}parameter name="a" string="true">1</{DS}parameter>'
            f'<{DS}parameter name="b" string="false">[1]</{DS}parameter></{DS}invoke>',
            "",
            [("f", '{"a": "1", "b": [1]}')],
        ),
    ],
    "deepseek_v31": [
        ("<｜tool▁calls▁begin｜>no", "no", []),
        ("<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", "a b{}", []),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} x<｜tool▁call▁end｜>y", " xy", [("f", "{}")]),
    ],
    "kimi_k2": [("<|tool_call_begin|>f<|tool_call_argument_begin|>5", "f5", [])],
    "pythonic": [
        ("[f(a='it\\'s \\x41', b=(1))]", "", [("f", '{"a": "it\'s A", "b": 1}')]),
        ("[f(a=1), 5]", ", 5]", [("f", '{"a": 1}')]),
        ("[f(1)]", "[f(1)]", []),
        ("[link](a=1)", "[link](a=1)", []),
        ("So: [f(a=1)]", "So: [f(a=1)]", []),
        ("So:\n [f(a=1)]\n\n[g()] ok", "So:\n \n\n ok", [("f", '{"a": 1}'), ("g", "{}")]),
    ],
    "olmo3": [("<function_calls>\nf(a=null, b=true)\n</function_calls>", "", [("f", '{"a": null, "b": true}')])],
    "gemma4": [
        ("<|tool_call>call:f{a:x y,b:nil,c:-1.5}<tool_call|>", "", [("f", '{"a": "x y", "b": null, "c": -1.5}')]),
        ("<|tool_call>f{}<tool_call|>", "f{}", []),
        ("<|tool_call>call:f{a:}<tool_call|>", "}", [("f", "{}")]),
    ],
    "gpt_oss": [
        (" to=functions.f<|channel|>commentary json<|message|><|call|>", "", [("f", "{}")]),
        ("<|channel|>commentary to=python code<|message|>print(1)<|call|>", "", [("python", '{"input": "print(1)"}')]),
        ("<|channel|>analysis to=functions.f code<|message|>{'a': None}", "", [("f", '{"a": null}')]),
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + HARMONY.format(name="f", json="{}"),
            "I look.",
            [("f", "{}")],
        ),
        ("<|channel|>commentary to=functions.f", "", []),
        ('<|channel|>commentary to=functions.f<|message|>{"a": <b>}', "<b>}", [("f", "{}")]),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_single_cases(name, text, content, calls):
    parser = make(name)
    assert without_ids(parser.parse(text)) == (content, calls, None)
    assert without_ids(streamed(parser, list(text))) == (content, calls, None)


def test_kimis_ids_are_the_models():
    text = kimi_k2([W, T]) + kimi_k2([W])
    ids = [call.id for call in make("kimi_k2").parse(text).tool_calls]
    assert ids[:2] == ["functions.get_weather:0", "functions.get_time:1"]
    assert re.fullmatch(r"call_[0-9a-f]{24}", ids[2])  # the model has repeated an id


def test_values_of_several_types_and_references_are_converted():
    either = {"anyOf": [{"type": "string"}, {"type": "null"}, {"$ref": "#/$defs/n"}]}
    tool = function("f", a=either, b={}, c={"enum": ["1", "2"]}, d={"const": 5})
    tool["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}}
    parser = tool_parser("qwen3_coder")([tool])
    text = qwen3_coder([("f", {"a": "%s", "b": "%s", "c": "%s", "d": "%s"})])
    for values, expected in [
        (("5", "5", "1", "5"), [5, 5, "1", 5]),
        (("null", "[1]", "x", "y"), [None, [1], "x", "y"]),
        (("x", "NaN", "null", "[" * 100_000), ["x", "NaN", "null", "[" * 100_000]),
    ]:
        [call] = parser.parse(text % values).tool_calls
        assert list(json.loads(call.arguments).values()) == expected


def test_a_long_value_is_streamed_without_delay():
    stream = make("qwen3_coder").stream()
    stream.feed("<function=write>\n<parameter=text>\n")
    assert merge_deltas(stream.feed("abc")) and stream.feed("def\n") == [ToolCallDelta(0, arguments="def")]
    assert stream.feed("</parameter") == []
    assert stream.feed("s>") == [ToolCallDelta(0, arguments="\\n</parameters>")]
    assert not any(isinstance(delta, ContentDelta) for delta in stream.finish())


def test_white_space_after_a_call_takes_linear_time():
    stream = make("pythonic").stream()
    deltas = stream.feed("[get_time()")
    start = time.process_time()
    for _ in range(30_000):
        deltas += stream.feed(" ")
    assert time.process_time() - start < 10  # at a quadratic cost, minutes
    assert len(merge_deltas([*deltas, *stream.finish()]).tool_calls) == 1


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2"])
def test_a_string_of_an_enum_is_no_null(name):
    """In the formats that write strings without quotes, whatever else the text is written like."""
    enum = ["none", "None", "null", "true", "3", None]
    schemas = {
        "a": {"type": ["string", "null"], "enum": enum},
        "b": {"enum": enum},
        "c": {"anyOf": [{"type": "string", "enum": enum[:-1]}, {"type": "null"}, {"type": "boolean"}]},
        "d": {"$ref": "#/$defs/mode"},
    }
    tool = function("f", **schemas, other={"type": ["string", "null"]})
    tool["function"]["parameters"]["$defs"] = {"mode": {"type": ["string", "integer", "null"], "enum": enum}}
    parser, write = tool_parser(name)([tool]), dict(WRITERS)[name]
    for text in enum[:-1]:
        assert calls_of(parser.parse(write([("f", dict.fromkeys(schemas, text))]))) == [
            ("f", dict.fromkeys(schemas, text))
        ]
    assert calls_of(parser.parse(write([("f", {"a": "NULL", "other": "null"})]))) == [("f", {"a": None, "other": None})]


def test_minimax_keeps_the_line_breaks_of_strings():
    """Its template writes values directly between the tags; those of Qwen3-Coder are lines of their own."""
    for text in ("line\n", "\nline\n\n", "\n", "a\n</x>\n"):
        for name, write in (("minimax_m2", minimax_m2), ("qwen3_coder", qwen3_coder), ("deepseek_v32", deepseek_v32)):
            call = ("write", {"path": "a", "text": text})
            assert calls_of(make(name).parse(write([call, T]))) == [call, T], name
