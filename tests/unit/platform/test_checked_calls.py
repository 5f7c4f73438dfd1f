"""Errors and wrong results of plugin calls name the platform and the call."""

from __future__ import annotations

import pytest

from mvllm.errors import ConfigError, ContractError, PlatformError
from mvllm.platform import checked_calls
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.shapes import ShapePolicy
from mvllm.plugin_groups import PluginSource
from tests.unit.worker.fake_platform import FakePlatform


def platform_that(answer):
    platform = FakePlatform()
    platform.shapes = answer
    return platform


def raises(error):
    def answer(*args):
        raise error

    return answer


def test_the_result_is_returned():
    assert call_checked(platform_that(ShapePolicy), "shapes", returns=ShapePolicy) == ShapePolicy()
    assert call_checked(FakePlatform(), "capabilities", returns=object) is FakePlatform.capabilities


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit("boom"), KeyError("boom"), GeneratorExit("boom")])
def test_exceptions_become_platform_errors_with_the_platforms_name(error):
    with pytest.raises(PlatformError, match=rf"'acme' failed in shapes: {type(error).__name__}: '?boom") as caught:
        call_checked(platform_that(raises(error)), "shapes", returns=ShapePolicy)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [PlatformError("no kernel"), ConfigError("no room"), KeyboardInterrupt()])
def test_a_platforms_own_mvllm_error_is_not_wrapped(error):
    with pytest.raises(type(error)) as caught:
        call_checked(platform_that(raises(error)), "shapes", returns=ShapePolicy)
    assert caught.value is error


@pytest.mark.parametrize(("answer", "found"), [(None, "NoneType"), (5, "int"), (ShapePolicy, "type")])
def test_a_result_of_another_type_is_refused(answer, found):
    with pytest.raises(PlatformError, match=f"returned a {found} from shapes; it must return ShapePolicy or str"):
        call_checked(platform_that(lambda: answer), "shapes", returns=(ShapePolicy, str))


def test_a_missing_method_is_an_error_of_the_platform():
    with pytest.raises(PlatformError, match="'acme' failed in graphs: AttributeError"):
        call_checked(FakePlatform(), "graphs", returns=object)


def test_a_field_that_the_contract_does_not_have_is_a_contract_error(monkeypatch):
    source = PluginSource("acme", "acme_plugin", "mvllm-acme", "1.2")
    monkeypatch.setattr(checked_calls, "find_sources", lambda: [source])
    newer = platform_that(lambda: ShapePolicy(depths=(1,)))  # type: ignore[call-arg]
    with pytest.raises(ContractError, match=r"mvllm-acme 1.2 was built for another.*'depths'.*Run: .*pip install"):
        call_checked(newer, "shapes", returns=ShapePolicy)
