"""Detection of parsers from chat templates: core's own formats, and the rules of packages."""

from __future__ import annotations

import argparse
import logging
import sys

import pytest

from mvllm import plugin_groups
from mvllm.entrypoints.cli.chat_arguments import add_parser_arguments
from mvllm.entrypoints.parsers.auto_detect import ParserNames, resolve_parsers
from mvllm.entrypoints.parsers.parser_rules import (
    DetectionRule,
    ParserRules,
    find_reasoning_rule,
    find_tool_rule,
    parser_rules,
)
from mvllm.entrypoints.parsers.registry import canonical_reasoning_parser, tool_parser
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from tests.helpers.plugins import prepend, write_metadata

# Short templates like those of the families, with their distinctive parts.
QWEN = r"""{{- "Within <tool_call></tool_call>:\n
<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}"""
HERMES = r"""{{- "<tool_call>\n" }}
{{- '{"arguments": <args-dict>, "name": <function-name>}\n' }}
{{- '</tool_call><|im_end|>' }}"""
CHATML = r"""{{- '<|im_start|>' + message['role'] }}{%- if tools %}{{- tools | tojson }}{% endif %}"""
QWEN3_THINKS = r"""{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"""
ALWAYS_THINKS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n<think>\n' }}"""
R1 = r"""{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\n'}}"""
DROPS_THOUGHTS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n' }}"""


@pytest.mark.parametrize(("template", "parser"), [(QWEN, "hermes"), (HERMES, "hermes"), (CHATML, None)])
def test_a_tool_parser_is_detected(template, parser):
    rule = find_tool_rule(template)
    assert (rule and rule.parser) == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN3_THINKS, "qwen3"),
        (ALWAYS_THINKS, "qwen3"),
        (QWEN3_THINKS + ALWAYS_THINKS, "qwen3"),
        (R1, "deepseek_r1"),
        (DROPS_THOUGHTS, None),  # removes the reasoning of earlier messages, and has none itself
        (QWEN, None),
    ],
)
def test_a_reasoning_parser_is_detected(template, parser):
    rule = find_reasoning_rule(template)
    assert (rule and rule.parser) == parser


ACME = """
from mvllm.extension_api.parsers import DetectionRule, ParserRules

RULES = ParserRules(
    tools=(DetectionRule("acme", "<acme>", ("<acme>",)), DetectionRule("acme", "<acme:2>", ("<acme:2>",))),
    reasoning=(DetectionRule("acme", "<acme>", ("<acme>", "<think>")),),
    tool_exclusions={"hermes": ("<ours>",)},
    reasoning_exclusions={"qwen3": ("<acme>",)},
    reasoning_aliases={"acme_2": "acme", "qwen3_like": "qwen3"},
)
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs a package with rules of its own."""
    points = "[mvllm.parser_rules]\nacme = acme_parsers:RULES\n"
    (tmp_path / "acme_parsers.py").write_text(ACME, encoding="utf-8")
    for module in ("acme_parsers", "acme_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    prepend(monkeypatch, [str(write_metadata(tmp_path, "acme-parsers", points))])
    return tmp_path


def test_a_packages_rules_join_cores(acme):
    rule = find_tool_rule("<acme>")
    assert rule is not None and (rule.parser, rule.shows) == ("acme", "<acme>")
    assert find_tool_rule(f"<acme>{QWEN}") is None  # two formats in one template
    assert find_tool_rule(f"<ours>{QWEN}") is None  # excluded
    rule = find_reasoning_rule(f"<acme>{QWEN3_THINKS}")
    assert rule is not None and rule.parser == "acme"
    assert (canonical_reasoning_parser("acme-2"), canonical_reasoning_parser("qwen3-like")) == ("acme", "qwen3")


def test_rules_of_packages_that_are_not_allowed_are_not_loaded(acme, monkeypatch):
    monkeypatch.setenv("MVLLM_PLUGINS", "mvllm-example-ops")
    (acme / "acme_parsers.py").write_text("raise SystemExit(1)", encoding="utf-8")
    assert find_tool_rule("<acme>") is None


@pytest.mark.parametrize(
    ("code", "words"), [("raise ValueError('no')", "cannot be loaded: ValueError: no"), ("RULES = 5", "ParserRules")]
)
def test_rules_that_are_none_are_rejected_by_name(acme, code, words, monkeypatch):
    (acme / "acme_broken.py").write_text(code, encoding="utf-8")
    write_metadata(acme, "acme-parsers", "[mvllm.parser_rules]\nacme = acme_broken:RULES\n")
    plugin_groups._plugins.cache_clear()
    with pytest.raises(ConfigError, match=rf"acme-parsers 0\.1\.0.*{words}"):
        parser_rules()


def test_a_rule_needs_all_patterns_and_none_of_the_excluded():
    rule = DetectionRule("x", "a and b", ("a", "b"), ("c",))
    assert [rule.applies(text) for text in ("ab", "a", "abc")] == [True, False, False]
    assert ParserRules() == ParserRules((), ())


@pytest.fixture
def only_core(monkeypatch):
    """Hides the parsers of all packages."""
    groups = (plugin_groups.TOOL_PARSERS, plugin_groups.REASONING_PARSERS, plugin_groups.PARSER_RULES)
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: [] if group in groups else list_plugins(group))


MISSING = f"needs the package mvllm-parsers, which is not installed. Run: {install_command('mvllm-parsers')}"


def test_a_parser_of_a_missing_package_says_which_package_it_needs(only_core, capsys):
    with pytest.raises(ConfigError) as refused:
        tool_parser("kimi_k2")
    assert str(refused.value).endswith(f"Choose one of: hermes. A tool parser of mvllm itself {MISSING}")
    parser = argparse.ArgumentParser()
    add_parser_arguments(parser.add_argument_group())
    for option, kind in (("--tool-call-parser", "tool"), ("--reasoning-parser", "reasoning")):
        with pytest.raises(SystemExit):
            parser.parse_args([option, "kimi_k2"])
        assert f"A {kind} parser of mvllm itself {MISSING}" in capsys.readouterr().err
    assert parser.parse_args(["--tool-call-parser", "hermes"]).tool_call_parser == "hermes"


@pytest.mark.usefixtures("only_core")
def test_an_undetected_format_names_the_missing_package(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="mvllm"):
        assert resolve_parsers("auto", "auto", CHATML, tmp_path) == ParserNames(None, None)
    [message] = caplog.messages
    assert MISSING in message


def test_an_unknown_format_is_logged_if_the_template_has_tools(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="mvllm"):
        resolve_parsers("auto", "auto", DROPS_THOUGHTS, tmp_path)
        assert not caplog.messages
        resolve_parsers("auto", "auto", CHATML, tmp_path)
    [message] = caplog.messages
    assert message.startswith("Tool call parser none") and "--tool-call-parser" in message


def test_the_parsers_of_the_family_are_used_where_the_template_shows_no_known_format(tmp_path) -> None:
    family = ParserNames("gemma4", "olmo3")
    assert resolve_parsers("auto", "auto", CHATML, tmp_path, family) == family
    assert resolve_parsers("auto", "auto", DROPS_THOUGHTS, tmp_path, family).tool is None, "a template without tools"
    assert resolve_parsers("auto", "auto", QWEN + QWEN3_THINKS, tmp_path, family) == ParserNames("hermes", "qwen3")
    assert resolve_parsers("none", "qwen3", CHATML, tmp_path, family) == ParserNames(None, "qwen3")
    assert resolve_parsers("auto", "auto", None, tmp_path, family) == ParserNames(None, None), "no template"
    assert resolve_parsers("auto", "none", CHATML, tmp_path, ParserNames("absent", None)) == ParserNames(None, None)


def test_the_choice_is_logged_and_can_be_made_or_switched_off(tmp_path, caplog) -> None:
    (tmp_path / "chat_template.jinja").write_text(QWEN + QWEN3_THINKS, encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="mvllm"):
        assert resolve_parsers("auto", "auto", None, tmp_path) == ParserNames("hermes", "qwen3")
    tool, reasoning = caplog.messages
    assert "hermes: the chat template shows JSON between <tool_call> tags" in tool and "--tool-call-parser none" in tool
    assert "qwen3" in reasoning and "--reasoning-parser none" in reasoning
    assert resolve_parsers("none", "none", None, tmp_path) == ParserNames(None, None)
    assert resolve_parsers("mistral", "deepseek_r1", None, tmp_path) == ParserNames("mistral", "deepseek_r1")
    assert resolve_parsers("auto", "auto", CHATML, tmp_path) == ParserNames(
        None, None
    )  # replaces the tokenizer's template
