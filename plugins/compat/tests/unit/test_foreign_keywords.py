"""Keywords of other engines are accepted with their effect or one warning."""

from __future__ import annotations

import logging

import pytest

from mvllm import EngineArgs
from mvllm.errors import ConfigError
from mvllm.utils import FlexibleArgumentParser
from mvllm_compat.foreign_keywords import FOREIGN_KEYWORDS

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
