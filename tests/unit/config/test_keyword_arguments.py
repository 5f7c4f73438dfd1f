"""Keyword arguments of an engine: earlier names, keywords of packages, and honest suggestions for misspellings."""

from __future__ import annotations

import argparse
import logging
import sys

import pytest

from mvllm import EngineArgs, plugin_groups
from mvllm.config.foreign_keywords import engine_keywords
from mvllm.config.keyword_arguments import nearest_setting
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from mvllm.utils import FlexibleArgumentParser
from tests.helpers.plugins import prepend, write_metadata

NAMES = {name for option in EngineArgs.options() for name in (option.name, *option.aliases)}


def test_several_long_prompts_at_once_are_one_with_all_of_their_tokens(caplog: pytest.LogCaptureFixture) -> None:
    limits = {"long_prefill_token_threshold": 256, "max_long_partial_prefills": 3}
    with caplog.at_level(logging.WARNING, "mvllm"):
        assert EngineArgs(model="demo", **limits).long_prefill_token_threshold == 768
        assert (
            EngineArgs(model="demo", **(limits | {"max_long_partial_prefills": 1})).long_prefill_token_threshold == 256
        )
    name = "max_long_partial_prefills=3"
    assert caplog.messages == [f"{name} multiplies long_prefill_token_threshold, which is 768 instead of 256."]
    with pytest.raises(ConfigError, match=r"max_long_partial_prefills must be an integer >= 1, not 0\."):
        EngineArgs(model="demo", **(limits | {"max_long_partial_prefills": 0}))


def test_limits_of_long_prompts_without_an_equivalent_have_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "demo", "--max-long-partial-prefills", "2", "--max-num-partial-prefills", "4"])
    with caplog.at_level(logging.WARNING, "mvllm"):
        assert EngineArgs.from_cli_args(args).long_prefill_token_threshold is None
    assert [message.split(". ")[0] for message in caplog.messages] == [
        "max_long_partial_prefills=2 has no effect",
        "max_num_partial_prefills=4 has no effect",
    ]
    args = parser.parse_args(
        ["--model", "demo", "--long-prefill-token-threshold", "100", "--max-long-partial-prefills", "2"]
    )
    assert EngineArgs.from_cli_args(args).long_prefill_token_threshold == 200


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("max_modle_len", "max_model_len"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("max_num_seq", "max_num_seqs"),
        ("disable_prefix_caching", None),
        ("min_num_seqs", None),
        ("expert_parallel_size", None),
        ("max_gpu_loras", None),
        ("frobnicate", None),
    ],
)
def test_a_suggestion_has_the_same_meaning(word: str, nearest: str | None) -> None:
    assert nearest_setting(word, NAMES) == nearest
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model="demo", **{word: 1})
    assert len(str(caught.value).partition(" A keyword of another engine")[0]) < 120


ACME = """
from mvllm.extension_api.foreign_keywords import ForeignKeyword, ForeignKeywords

KEYWORDS = ForeignKeywords(engine={
    "acme_tokens": ForeignKeyword(setting="max_num_batched_tokens"),
    "acme_mode": ForeignKeyword("There is one mode.", ("fast",)),
    "acme_*_key": ForeignKeyword("There are no keys.", is_refused=True),
})
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs a package that knows keywords."""
    points = "[mvllm.foreign_keywords]\nacme = acme_keywords:KEYWORDS\n"
    (tmp_path / "acme_keywords.py").write_text(ACME, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "acme_keywords", raising=False)
    prepend(monkeypatch, [str(write_metadata(tmp_path, "acme-keywords", points))])
    return tmp_path


def test_keywords_of_a_package_have_their_effect_or_a_line_in_the_log(acme, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mvllm"):
        args = EngineArgs(model="demo", acme_tokens=512, acme_mode="fast")
        assert args.max_num_batched_tokens == 512 and not caplog.messages
        EngineArgs(model="demo", acme_mode="slow")
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        assert EngineArgs.from_cli_args(parser.parse_args(["--model", "demo", "--acme-tokens", "640"])) == EngineArgs(
            model="demo", max_num_batched_tokens=640
        )
    assert caplog.messages == ["acme_mode='slow' has no effect. There is one mode."]
    with pytest.raises(ConfigError, match=r"acme_own_key is not supported. There are no keys\."):
        EngineArgs(model="demo", acme_own_key=1)


def test_a_package_without_keywords_is_named(acme) -> None:
    (acme / "acme_keywords.py").write_text("KEYWORDS = 5", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"acme-keywords 0\.1\.0 .* must name ForeignKeywords, found 5"):
        engine_keywords()


def test_an_unknown_keyword_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(
        plugin_groups,
        "list_plugins",
        lambda group: [] if group is plugin_groups.FOREIGN_KEYWORDS else list_plugins(group),
    )
    with pytest.raises(ConfigError) as caught:
        EngineArgs(model="demo", swap_space=4)
    assert str(caught.value) == (
        "There is no engine setting 'swap_space'. `help(mvllm.LLM)` lists the settings. A keyword of another engine "
        f"needs the package mvllm-compat, which is not installed. Run: {install_command('mvllm-compat')}"
    )


def test_engine_options_can_be_added_to_a_group() -> None:
    parser = argparse.ArgumentParser()
    group = EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    group.set_defaults(model="demo")
    assert EngineArgs.from_cli_args(parser.parse_args([])).model == "demo"


def test_logits_processors_may_be_classes() -> None:
    class Mine:
        pass

    args = EngineArgs(model="demo", logits_processors=["installed", Mine])
    assert args.logits_processors == f"installed,{__name__}:{Mine.__qualname__}"
