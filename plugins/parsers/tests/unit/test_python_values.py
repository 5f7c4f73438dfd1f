"""Arguments in Python's syntax: every literal, what is not one, and any split of the text."""

from __future__ import annotations

import ast
import json
import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import tool_parser
from tests.unit.entrypoints.parsers.parser_helpers import cut, cuts, streamed, without_ids

PARSERS = {name: tool_parser(name) for name in ("pythonic", "llama4_pythonic", "olmo3")}
AROUND = {
    "pythonic": ("[", "]"),
    "llama4_pythonic": ("<|python_start|>[", "]<|python_end|>"),
    "olmo3": ("<function_calls>\n", "\n</function_calls>"),
}
every_parser = pytest.mark.parametrize("name", PARSERS)


def parse(name, arguments, pieces=None):
    """The arguments of a call of `f`; None if it is content."""
    start, end = AROUND[name]
    text = f"{start}f({arguments}){end}"
    parser = OutputParser(tools=PARSERS[name]())
    parsed = parser.parse(text)
    for split in (list(text), *([cut(text, pieces)] if pieces is not None else [])):
        assert without_ids(streamed(parser, split)) == without_ids(parsed), text
    if not parsed.tool_calls:
        return None
    [call] = parsed.tool_calls
    assert (call.name, parsed.content) == ("f", ""), (text, parsed)
    return json.loads(call.arguments)


LITERALS = {
    r'"\d+"': r"\d+",
    r'r"\d+\n"': r"\d+\n",
    r'R"""a\"b"""': r"a\"b",
    '"""two\nlines "quoted" """': 'two\nlines "quoted" ',
    "'''it's'''": "it's",
    '""': "",
    '""""""': "",
    '"a" "b"': "ab",
    '"a" "b" + \'c\'': "abc",
    '("a"\n "b")': "ab",
    '["a" "b", "c" + "d"]': ["ab", "cd"],
    r'u"\u00e9\x41\101\N{BULLET}\t\'\"\\\a"': "éAA•\t'\"\\\a",
    r'"\ud83d\ude00 \ud83d"': "\U0001f600 \ufffd",
    r'["\ud83d\ude00", "\ude00"]': ["\U0001f600", "\ufffd"],
    '"a\nb"': "a\nb",
    '["a\nb\x00"]': ["a\nb\0"],
    '"a\\\nb"': "ab",
    r'"\q\u12\xg\N{no such name}"': r"\q\u12\xg\N{no such name}",
    'b"abc"': "abc",
    r'[b"\xc3\xa9", rb"\n"]': ["é", r"\n"],
    "0x1F": 31,
    "0o17": 15,
    "0b101": 5,
    "1_000": 1000,
    ".5": 0.5,
    "1.": 1.0,
    "1e3": 1000.0,
    "-3": -3,
    "- 2.5": -2.5,
    "+4": 4,
    "10000000000000000000000": 10**22,
    "True": True,
    "None": None,
    "[true, false, null, False]": [True, False, None, False],
    "(1, 2)": [1, 2],
    "(1)": 1,
    "(1,)": [1],
    "()": [],
    "[1, 2,]": [1, 2],
    "{1, 2}": [1, 2],
    '{"a": 1, "b": {"c": (None,)},}': {"a": 1, "b": {"c": [None]}},
    "{1: 2, None: 3, True: 4}": {"1": 4, "null": 3},
    "{}": {},
    "[-1, [], [[{}]]]": [-1, [], [[{}]]],
    "[1, # one\n 2]": [1, 2],
    "[1, \\\n 2]": [1, 2],
    "1 # one, (\n": 1,
    '"#" # "\n': "#",
    '"<not a marker>"': "<not a marker>",
}

EXPRESSIONS = [
    'f"{x}"',
    'rf"{x}"',
    "1j",
    "1 + 2j",
    "...",
    "Paris",
    "g(x=1)",
    'g("(,", [1])',
    "a.b",
    "[1][0]",
    "lambda: 1",
    "1 if x else 2",
    "[x for x in y]",
    "not True",
    "1 + 2",
    "-'a'",
    "{**a}",
    "{[1]: 2}",
    "*a",
    "007",
    "1e999",
    "x := 1",
    "__import__('os').system('x')",
    "[" * 80 + "]" * 80,
    "-" * 200 + "1",
    "9" * 5000,
    "[1}",
]
"""Values that are not literals, or too deep or too large."""


@every_parser
@pytest.mark.parametrize("written", LITERALS)
def test_literals_become_json(name, written):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(name, f"a={written}, b=1") == {"a": LITERALS[written], "b": 1}
        assert parse(name, f"b=1, a = {written}") == {"b": 1, "a": LITERALS[written]}


@every_parser
@pytest.mark.parametrize("written", EXPRESSIONS)
def test_what_is_not_a_literal_is_a_string_of_its_source(name, written):
    """It is never evaluated. A bare list that begins with one is content: the answer may be code."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(name, f'b="x", a={written}, c=1') == {"b": "x", "a": written, "c": 1}
        expected = None if name == "pythonic" else {"a": written, "b": 1}
        assert parse(name, f"a={written}, b=1") == expected


@every_parser
def test_arguments_that_are_not_pairs(name):
    for text, expected in {
        "": {},
        "  \n": {},
        "a=1,": {"a": 1},
        "class='x', from=1, None=2, a.b=3, a-b=4": {"class": "x", "from": 1, "None": 2, "a.b": 3, "a-b": 4},
        '**{"a": 1, "b": [2]}, c=3': {"a": 1, "b": [2], "c": 3},
        "a=1, **{}": {"a": 1},
        "a=1, **rest, b=2": {"a": 1, "b": 2},
        "a=1, 2, b=3": {"a": 1, "b": 3},
        "a=1, [2, (3)], b": {"a": 1},
        "a=1, b=, c=3": {"a": 1, "c": 3},
        "a=1, b==2": {"a": 1, "b": "=2"},
        "# nothing\n a=1": {"a": 1},
        'a="x".upper(), b=1': {"a": "x.upper()", "b": 1},
        "1": None,
        "**rest": None,
        "a": None,
    }.items():
        assert parse(name, text) == expected, text


@every_parser
def test_calls_that_end_early_have_what_is_complete(name):
    parser, (start, _) = OutputParser(tools=PARSERS[name]()), AROUND[name]
    for text, expected in {
        "a=1, b=[1, 2": {"a": 1},
        "a=1, b=12": {"a": 1, "b": 12},
        'a="x': {"a": "x"},
        'a="x\\': {"a": "x"},
        'a="x" "y': {"a": "x"},
        'a=1, b=r"x': {"a": 1},
        "a=1, b=": {"a": 1},
        "a=1, b=tru": {"a": 1},
    }.items():
        [call] = parser.parse(f"{start}f({text}").tool_calls
        assert json.loads(call.arguments) == expected, text
        stream = parser.stream()
        deltas = stream.feed(f"{start}f({text}") + stream.finish("length")
        written = "".join(delta.arguments for delta in deltas)
        assert json.dumps(expected)[:-1].startswith(written.rstrip('"')) and not written.endswith("}")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.text("\\\"'nux0{}[](),#<\n", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab'\"\\", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@every_parser
@settings(max_examples=30)
@given(arguments=st.dictionaries(st.from_regex(r"[a-z_]\w{0,6}", fullmatch=True), values, max_size=3), at=cuts)
def test_what_repr_writes_is_read_again_however_the_text_is_split(name, arguments, at):
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    assert parse(name, text, at) == json.loads(json.dumps(arguments))


pieces_of_code = st.lists(
    st.sampled_from(
        [
            *LITERALS,
            *EXPRESSIONS[:24],
            "a=",
            ", ",
            "b=",
            '"',
            "'''",
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            "\\",
            "#",
            "\n",
            "r",
            "**",
            "<",
        ]
    ),
    max_size=8,
)


@every_parser
@settings(max_examples=60)
@example(pieces=['f"{x}"', "#"], at=[29])
@given(pieces=pieces_of_code, at=cuts)
def test_any_text_gives_json_and_does_not_depend_on_the_split(name, pieces, at):
    start, end = AROUND[name]
    text = f"{start}f(a={''.join(pieces)}){end}"
    parser = OutputParser(tools=PARSERS[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = parser.parse(text)
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)
    assert without_ids(streamed(parser, cut(text, at))) == without_ids(streamed(parser, text)) == without_ids(parsed)


@every_parser
@pytest.mark.parametrize("comment", ["# one", '"x" # (', "1, # {", 'f"{x}"#'])
def test_a_comment_may_end_with_a_piece(name, comment):
    start, _ = AROUND[name]
    text = f"{start}f(b=1, a={comment}\n<"
    parser = OutputParser(tools=PARSERS[name]())
    for i in range(len(text)):
        assert without_ids(streamed(parser, [text[:i], text[i:]])) == without_ids(parser.parse(text)), text[:i]


@settings(max_examples=60)
@given(body=st.text("ab\\'\"xuUN{}0189dDn\n\r", max_size=12))
def test_escapes_are_those_of_python(body):
    text = f'"{body}"'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return
    if isinstance(expected, str) and "\r" not in body and not any("\ud800" <= c < "\ue000" for c in expected):
        assert parse("olmo3", f"a={text}, b=[{text}]") == {"a": expected, "b": [expected]}


@pytest.mark.parametrize(
    "unit", ['"a", ', "'\\n'", "[", "-", "1, ", "\\", "(1)", "#", '"a" + ', "x", "**", "'''", "\\ud83d"]
)
def test_long_values_take_linear_time(unit):
    text = "<function_calls>f(b=1, a=" + unit * (200_000 // len(unit))
    start = time.process_time()
    parser = OutputParser(tools=PARSERS["olmo3"]())
    parser.parse(text + ")")
    stream = parser.stream()
    for i in range(0, len(text), 50):
        stream.feed(text[i : i + 50])
    stream.finish()
    assert time.process_time() - start < 20


def test_a_plain_string_is_streamed():
    stream = OutputParser(tools=PARSERS["pythonic"]()).stream()
    stream.feed("[write(text=")
    assert "".join(delta.arguments for delta in stream.feed('\'def f():\\n    return "a"\\')) == (
        '{"text": "def f():\\n    return \\"a\\"'
    )
