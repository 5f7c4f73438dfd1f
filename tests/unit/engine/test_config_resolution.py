"""A platform's plan: changes are applied and logged with their reasons, all refusals are reported, and the dtype is
resolved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm.engine.core.config_resolution import DEFAULT_MEMORY_UTILIZATION, resolve_config
from mvllm.errors import ConfigError, PlatformError
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.phases import Phase
from mvllm.platform.spec import ConfigChange, Plan, Refusal, Refusals
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


def config_for(dtype="float32", **model):
    config = make_config(**model)
    return replace(config, model=replace(config.model, dtype=dtype))


def test_changes_are_applied_and_logged_with_their_reasons(caplog):
    changes = (
        ConfigChange("cache.block_size", 128, "the kernel wants it"),
        ConfigChange("scheduler.max_num_seqs", 8, "few registers"),
    )
    asked = config_for()
    with caplog.at_level("INFO", logger="mvllm"):
        settled = resolve_config(asked, FakePlatform(plan=Plan(changes)))
    assert (settled.cache.block_size, settled.scheduler.max_num_seqs) == (128, 8)
    assert "cache.block_size = 128: the kernel wants it" in caplog.text
    assert "scheduler.max_num_seqs = 8: few registers" in caplog.text
    assert asked.cache.block_size is None, "what was asked is left as it was"


def test_plan_is_called_in_the_frontend_phase():
    platform = FakePlatform()
    resolve_config(config_for(), platform)
    assert platform.phases["plan"] is Phase.FRONTEND


def test_every_refusal_is_shown_with_its_remedy():
    refusals = Refusals(
        (
            Refusal("model.dtype", "no such arithmetic.", "Use float32."),
            Refusal("cache.dtype", "no such storage.", "Use auto."),
        )
    )
    with pytest.raises(ConfigError) as caught:
        resolve_config(config_for(), FakePlatform(plan=refusals))
    text = str(caught.value)
    for words in ("'acme'", "model.dtype: no such arithmetic. Remedy: Use float32.", "cache.dtype", "Use auto."):
        assert words in text


def test_a_change_of_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"cache\.colour"):
        resolve_config(config_for(), FakePlatform(plan=Plan((ConfigChange("cache.colour", 1, "fun"),))))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("scheduler.max_num_seqs", "9", r"takes <class 'int'>, found '9'"),
        ("scheduler.max_num_seqs", True, "found True"),
        ("cache.block_size", 16.5, "found 16.5"),
        ("scheduler", None, "found None"),
        ("model", None, "found None"),
        (5, 5, "no setting '5'"),
        ("a.b.c", 5, r"no setting 'a\.b\.c'"),
    ],
)
def test_a_change_to_a_value_of_another_type_is_refused_with_the_platforms_name(field, value, words):
    with pytest.raises(ConfigError, match=f"'acme' changes a setting to an invalid value: .*{words}"):
        resolve_config(config_for(), FakePlatform(plan=Plan((ConfigChange(field, value, "why not"),))))


@pytest.mark.parametrize("answer", [Plan(("x",)), Plan("x"), Plan(None), Refusals(("x",)), Refusals(5), "yes", 5])
def test_a_result_that_is_no_plan_is_refused(answer):
    with pytest.raises(PlatformError, match=r"'acme' returned an? \w+ from plan"):
        resolve_config(config_for(), FakePlatform(plan=answer))


class TestMemoryShare:
    def test_unset_it_is_the_default(self):
        settled = resolve_config(config_for(), FakePlatform())
        assert settled.cache.memory_utilization == DEFAULT_MEMORY_UTILIZATION

    def test_the_platforms_value_replaces_the_default(self):
        plan = Plan((ConfigChange("cache.memory_utilization", 0.5, "shared"),))
        assert resolve_config(config_for(), FakePlatform(plan=plan)).cache.memory_utilization == 0.5

    def test_the_users_value_stays(self):
        config = config_for()
        config = replace(config, cache=replace(config.cache, memory_utilization=0.3))
        assert resolve_config(config, FakePlatform()).cache.memory_utilization == 0.3


class TestAsyncScheduling:
    @pytest.mark.parametrize("async_copies", [False, True])
    def test_unset_it_is_on_if_the_device_computes_in_parallel_to_the_host(self, async_copies):
        platform = FakePlatform()
        platform.capabilities = replace(platform.capabilities, async_copies=async_copies)
        assert resolve_config(config_for(), platform).scheduler.async_scheduling is async_copies

    @pytest.mark.parametrize("value", [False, True])
    def test_an_explicit_value_stays_on_every_device(self, value):
        config = config_for()
        config = replace(config, scheduler=replace(config.scheduler, async_scheduling=value))
        platform = FakePlatform()
        platform.capabilities = replace(platform.capabilities, async_copies=not value)
        assert resolve_config(config, platform).scheduler.async_scheduling is value

    def test_a_platform_may_set_it(self):
        plan = Plan((ConfigChange("scheduler.async_scheduling", True, "faster here"),))
        assert resolve_config(config_for(), FakePlatform(plan=plan)).scheduler.async_scheduling is True


class TestDtype:
    def test_auto_is_the_checkpoints_dtype_if_the_platform_offers_it(self):
        config = config_for("auto", checkpoint_dtype="bfloat16")
        assert resolve_config(config, FakePlatform()).model.dtype == "bfloat16"

    def test_auto_is_otherwise_the_platforms_first_dtype_and_is_logged(self, caplog):
        with caplog.at_level("INFO", logger="mvllm"):
            settled = resolve_config(config_for("auto", checkpoint_dtype="float16"), FakePlatform())
        assert settled.model.dtype == "float32"
        assert "model.dtype = float32" in caplog.text and "float16" in caplog.text

    def test_an_explicit_dtype_is_accepted_or_refused_with_those_offered(self):
        assert resolve_config(config_for("bfloat16"), FakePlatform()).model.dtype == "bfloat16"
        with pytest.raises(ConfigError, match=r"'float16' was asked for.*'acme' computes in float32, bfloat16"):
            resolve_config(config_for("float16"), FakePlatform())

    def test_the_plan_may_set_it(self):
        plan = Plan((ConfigChange("model.dtype", "bfloat16", "faster"),))
        assert resolve_config(config_for("auto"), FakePlatform(plan=plan)).model.dtype == "bfloat16"


def test_a_platform_without_a_compute_dtype_is_named():
    platform = FakePlatform()
    platform.capabilities = Capabilities(dtypes=(), kv_dtypes=())
    with pytest.raises(PlatformError, match="claims no compute dtype"):
        resolve_config(config_for("auto"), platform)
