"""The parser registry: core's parsers and those of an installed package."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings

from mvllm.entrypoints.parsers.registry import (
    reasoning_parser,
    reasoning_parser_names,
    tool_parser,
    tool_parser_names,
)
from mvllm.errors import ConfigError
from tests.helpers.plugins import ROOT, prepend, write_metadata
from tests.unit.entrypoints.parsers.parser_helpers import (
    REASONING,
    TOOLS,
    cut,
    cuts,
    make_parser,
    streamed,
    without_ids,
)

FOLDER = ROOT / "plugins" / "example-parser"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Installs mvllm-example-parser."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    prepend(monkeypatch, [str(write_metadata(tmp_path, project["name"], points)), str(FOLDER / "src")])


def install(tmp_path, monkeypatch, group, name, value):
    folder = write_metadata(tmp_path, "acme-parsers", f"[{group}]\n{name} = {value}\n")
    prepend(monkeypatch, [str(folder)])


def test_cores_own():
    assert set(TOOLS) <= set(tool_parser_names()) and set(REASONING) <= set(reasoning_parser_names())
    for name in TOOLS:
        assert tool_parser(name)().parse("x").content == "x"
    for name in REASONING:
        assert reasoning_parser(name)().parse("<think>x</think>").reasoning == "x"


@pytest.mark.parametrize("find", [tool_parser, reasoning_parser])
def test_an_unknown_name_lists_the_known_ones(find):
    with pytest.raises(ConfigError, match=r"no (tool|reasoning) parser 'x'\. Choose one of: .*(hermes|qwen3)"):
        find("x")


@pytest.mark.parametrize(
    ("kind", "find", "word"), [("tool", tool_parser, "ToolParser"), ("reasoning", reasoning_parser, "ReasoningParser")]
)
def test_a_plugin_that_is_not_a_parser_is_rejected(kind, find, word, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, f"mvllm.{kind}_parsers", "acme", "json:dumps")
    with pytest.raises(ConfigError, match=rf"acme-parsers 0\.1\.0.*extension_api\.{word}"):
        find("acme")


def test_cores_parser_takes_precedence_with_a_warning(tmp_path, monkeypatch, caplog):
    install(tmp_path, monkeypatch, "mvllm.tool_parsers", "hermes", "there_is_no_such_module")
    assert tool_parser("hermes").__module__.startswith("mvllm.")
    assert "acme-parsers 0.1.0" in caplog.text


def test_reading_text_loads_no_web_framework_and_no_torch():
    program = (
        "import sys\nfrom mvllm.entrypoints.parsers.registry import tool_parser\n"
        "tool_parser('hermes')().parse('<tool_call>{}')\n"
        "sys.exit(str({'torch', 'pydantic', 'fastapi', 'transformers'} & set(sys.modules) or ''))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stderr.strip() == ""


class TestExample:
    TEXT = '<thought>\nhm\n</thought>\nI look: <function=get_weather>{"city": "Paris"}</function>\n<function=now>{}'

    def test_it_is_listed_and_reads_its_formats(self, example):
        assert "function_tag" in tool_parser_names() and "thought_tag" in reasoning_parser_names()
        parsed = make_parser("function_tag", "thought_tag").parse(self.TEXT)
        calls = [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
        assert without_ids(parsed) == ("I look:", calls, "hm")

    def test_the_prompt_may_open_the_reasoning(self, example):
        parsed = make_parser(None, "thought_tag").parse("hm</thought>4", "assistant\n<thought>\n")
        assert without_ids(parsed) == ("4", [], "hm")

    @pytest.mark.parametrize("text", ["<function=>{}", "<function=a b>{}", "<function=f>5", "<function"])
    def test_text_that_is_not_a_call_is_content(self, example, text):
        assert without_ids(make_parser("function_tag").parse(text)) == (text, [], None)

    def test_a_call_that_the_end_of_the_text_cuts_off_is_dropped(self, example):
        assert without_ids(make_parser("function_tag").parse("A\n<function=f")) == ("A\n", [], None)

    def test_the_output_does_not_depend_on_the_split(self, example):
        parser = make_parser("function_tag", "thought_tag")
        whole = without_ids(parser.parse(self.TEXT))

        @settings(max_examples=40)
        @given(at=cuts)
        def check(at):
            assert without_ids(streamed(parser, cut(self.TEXT, at))) == whole

        check()
        assert without_ids(streamed(parser, self.TEXT)) == whole

    def test_a_plugin_outside_the_allow_list_is_rejected(self, example, monkeypatch):
        monkeypatch.setenv("MVLLM_PLUGINS", "mvllm-example-ops")
        assert "function_tag" not in tool_parser_names()
        with pytest.raises(ConfigError, match=r"mvllm-example-parser 0\.1\.0"):
            tool_parser("function_tag")
