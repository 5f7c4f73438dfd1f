"""A tiny checkpoint for the tests of this folder, and engines that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mvllm import LLM
from mvllm.executor.process import process_utils
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import engine

MakeLLM = Callable[..., LLM]


@pytest.fixture(autouse=True)
def time_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may take a while to write its stacks on a busy machine; one that is stopped never does."""
    monkeypatch.setattr(process_utils, "_STACK_SECONDS", 5.0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_llm(checkpoint: Path) -> Iterator[MakeLLM]:
    """Builds engines that are shut down at the end of the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(engine(settings.pop("model", checkpoint), **settings))
