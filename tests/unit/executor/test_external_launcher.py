"""The launcher's environment variables, and the settings that must be equal on all ranks."""

from __future__ import annotations

import pytest

from mvllm.config.engine_config import replace_field
from mvllm.errors import ConfigError
from mvllm.executor.external_launcher import (
    LaunchedRank,
    _check_equal_settings,
    _drawn_seed,
    _settings,
    _with_common_seed,
)
from mvllm.executor.uniproc import DeferredOutputFuture
from mvllm.messages.scheduler_output import ModelRunnerOutput
from tests.unit.engine.builders import make_config

ENV = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_reads_the_variables_of_torchrun() -> None:
    assert LaunchedRank.from_environment(ENV) == LaunchedRank(5, 8, 1, 4, "node0")


def test_all_ranks_are_local_without_local_world_size() -> None:
    env = {name: value for name, value in ENV.items() if name != "LOCAL_WORLD_SIZE"}
    assert LaunchedRank.from_environment(env).local_world_size == 8


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_missing_variable_is_named_with_the_launch_command(missing: str, how: str) -> None:
    env = dict(ENV)
    if how == "absent":
        del env[missing]
    else:
        env[missing] = ""
    with pytest.raises(ConfigError, match=rf"requires {missing}, which is not set\. .*torchrun"):
        LaunchedRank.from_environment(env)


def test_all_variables_are_named_without_a_launcher() -> None:
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, which are not"):
        LaunchedRank.from_environment({})


@pytest.mark.parametrize("value", ["x", "-1", "1.0", " 1", "٣"])
def test_a_value_that_is_not_a_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK in the environment must be a whole number"):
        LaunchedRank.from_environment({**ENV, "LOCAL_RANK": value})


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}, {"WORLD_SIZE": "0"}])
def test_variables_that_contradict_each_other_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="contradict each other: RANK="):
        LaunchedRank.from_environment({**ENV, **wrong})


class TestSettingsOfAllRanks:
    def test_equal_settings_are_accepted(self) -> None:
        _check_equal_settings([_settings(make_config())] * 3)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model.seed", 7),
            ("model.max_model_len", 9),
            ("scheduler.max_num_seqs", 9),
            ("scheduler.max_num_batched_tokens", 9),
            ("scheduler.policy", "priority"),
            ("cache.block_size", 8),
            ("cache.enable_prefix_caching", False),
            ("cache.kv_cache_memory_bytes", 9),
            ("parallel.pipeline_parallel_size", 2),
        ],
    )
    def test_a_difference_is_named_with_both_values_and_the_rank(self, field: str, value: object) -> None:
        config = make_config()
        other = replace_field(config, field, value)
        name = field.split(".")[1]
        with pytest.raises(ConfigError, match=rf"{name} is .* on rank 0 and {value!r} on rank 1"):
            _check_equal_settings([_settings(config), _settings(other)])

    def test_ranks_without_a_seed_use_the_random_seed_of_rank_0(self) -> None:
        drawn = [make_config(seed=100 + rank, seed_is_random=True) for rank in range(3)]
        agreed = [_with_common_seed(config, [_drawn_seed(each) for each in drawn]) for config in drawn]
        assert {config.model.seed for config in agreed} == {drawn[0].model.seed}
        _check_equal_settings([_settings(config) for config in agreed])

    def test_a_seed_that_only_some_ranks_were_given_is_refused(self) -> None:
        configs = [make_config(seed=100, seed_is_random=True), make_config(seed=4)]
        with pytest.raises(ConfigError, match="seed is None on rank 0 and 4 on rank 1"):
            _check_equal_settings(
                [_settings(_with_common_seed(c, [_drawn_seed(each) for each in configs])) for c in configs]
            )

    def test_roots_of_block_names_may_differ(self) -> None:
        config = make_config()
        _check_equal_settings([_settings(config), _settings(replace_field(config, "cache.prefix_caching_seed", 3))])


class TestOutputOfLastStage:
    def test_it_is_fetched_once_and_only_on_request(self) -> None:
        calls = []

        def fetch():
            calls.append(1)
            return ModelRunnerOutput(step=3)

        future = DeferredOutputFuture(fetch)
        assert not calls and not future.done()
        assert future.result().step == future.result().step == 3
        assert len(calls) == 1

    def test_an_error_is_kept(self) -> None:
        def fetch():
            raise OSError("gone")

        future = DeferredOutputFuture(fetch)
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                future.result()
