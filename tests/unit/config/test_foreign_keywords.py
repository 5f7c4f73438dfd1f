"""Keywords of other engines are accepted with their effect or one warning; misspellings get honest suggestions."""

from __future__ import annotations

import argparse
import logging

import pytest

from mvllm import EngineArgs
from mvllm.config.foreign_keywords import FOREIGN_KEYWORDS
from mvllm.config.keyword_arguments import nearest_setting
from mvllm.errors import ConfigError
from mvllm.utils import FlexibleArgumentParser

NAMES = {name for option in EngineArgs.options() for name in (option.name, *option.aliases)}


def test_the_table_has_no_setting_of_ours_and_says_what_happens() -> None:
    assert not NAMES & FOREIGN_KEYWORDS.keys()
    for name, keyword in FOREIGN_KEYWORDS.items():
        assert (keyword.setting in NAMES) if keyword.setting else keyword.instead.endswith((".", "`.")), name


def test_a_value_that_changes_nothing_is_silent_and_another_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mvllm"):
        EngineArgs(model="demo", runner="pooling", task=None, tokenizer_mode="auto", swap_space=0, enable_dbo=False)
        assert caplog.messages == []
        EngineArgs(model="demo", worker_cls="my.Worker")
    assert caplog.messages == ["worker_cls='my.Worker' has no effect. The platform plugin provides the worker."]


def test_a_keyword_with_an_equivalent_sets_it() -> None:
    args = EngineArgs(
        model="demo", rope_scaling={"rope_type": "linear"}, hf_overrides={"a": 1}, gpu_memory_utilization=0.5
    )
    assert args.hf_overrides == {"rope_scaling": {"rope_type": "linear"}, "a": 1}
    assert args.memory_utilization == 0.5
    with pytest.raises(ConfigError, match="override_pooler_config and pooler_config are the same setting"):
        EngineArgs(model="demo", override_pooler_config={"a": 1}, pooler_config={"a": 2})


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
    assert len(str(caught.value)) < 120


def test_a_script_parses_engine_arguments_with_dashes_or_underscores_and_from_a_file(tmp_path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 8\nmax_model_len: 64\n")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--my_own", type=int)
    parser.set_defaults(model="demo", runner="pooling")
    args = parser.parse_args(
        ["--my-own=3", "--max_model_len=128", "--config", str(file), "--enable-dbo", "--tokenizer-mode", "slow"]
    )
    assert (args.my_own, args.max_model_len, args.max_num_seqs, args.runner) == (3, 128, 8, "pooling")
    assert not hasattr(args, "config")
    settings = EngineArgs.from_cli_args(args)
    assert (settings.model, settings.max_model_len, settings.block_size) == ("demo", 128, None)
    del args.my_own
    assert EngineArgs.from_kwargs(**vars(args)) == settings


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
