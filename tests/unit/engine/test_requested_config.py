"""Models are downloaded only if a platform can run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.hub import may_be_fetched
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend import requested_config as module
from mvllm.engine.llm_engine import LLMEngine
from mvllm.errors import PlatformError


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No platform can run; the list of what happened."""
    happened: list[str] = []

    def choose_platform(name: str | None) -> None:
        happened.append(f"platform {name}")
        raise PlatformError("torch 2.13.0+cpu was built for the host alone, not for CUDA.")

    monkeypatch.setattr(module, "choose_platform", choose_platform)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda args: happened.append("config"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return happened


@pytest.mark.parametrize("engine", [LLMEngine, AsyncLLM])
def test_a_platform_that_cannot_run_is_an_error_before_the_download(engine: type, broken: list[str]) -> None:
    args = EngineArgs.from_kwargs(model="organisation/name", platform="cuda")
    with pytest.raises(PlatformError, match="built for the host alone"):
        engine.from_engine_args(args)
    assert broken == ["platform cuda"]


def test_models_on_this_machine_are_not_checked_twice(broken: list[str], tmp_path: Path) -> None:
    for model in ("demo", str(tmp_path)):
        module.requested_config(EngineArgs.from_kwargs(model=model))
    assert broken == ["config", "config"]


def test_what_may_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mvllm.config.hub.is_offline", lambda: False)
    assert may_be_fetched("organisation/name") and may_be_fetched("organisation/name:Q4_K_M")
    assert not may_be_fetched("demo") and not may_be_fetched(str(tmp_path)) and not may_be_fetched(f"{tmp_path}:Q8_0")
    monkeypatch.setattr("mvllm.config.hub.is_offline", lambda: True)
    assert not may_be_fetched("organisation/name")
